"""Answers before a run: is the data set well, does the model fit, are the machines well."""
