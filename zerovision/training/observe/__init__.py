"""Reporting of a training run: logs, measurements, observers of its steps, and the run's files."""
