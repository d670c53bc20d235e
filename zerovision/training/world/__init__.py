"""The ranks: how they find each other and communicate."""
