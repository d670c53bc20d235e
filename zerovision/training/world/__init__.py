"""The ranks: how they find and talk to each other."""
