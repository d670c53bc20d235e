"""Trainings inside Slurm jobs."""
