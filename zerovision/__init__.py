"""Trains image classifiers from one laptop core to many GPUs with one line."""
