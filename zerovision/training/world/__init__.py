"""The ranks: how they find, prove and talk to each other."""
