"""Looks for mistakes in a data set: images that occur twice, wrong labels, images unlike all others."""
