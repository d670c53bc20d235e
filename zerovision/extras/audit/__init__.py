"""Looks for mistakes in a data set: duplicate images, wrong labels, and outliers."""
