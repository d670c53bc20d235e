"""Answers questions before a run: whether the data set is sound, whether the model fits, and which settings to use."""
