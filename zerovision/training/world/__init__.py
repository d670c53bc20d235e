"""How the ranks find each other and communicate."""
