"""Answers before a run: is the data well."""
