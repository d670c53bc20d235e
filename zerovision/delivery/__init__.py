"""Evaluates, exports, serves and publishes trained models, and reports on runs."""
