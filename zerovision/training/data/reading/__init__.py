"""Reads images from files: decoders, caches, sources."""
