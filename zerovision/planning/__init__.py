"""Answers questions before a run: is the data set sound, does the model fit, which settings suit it."""
