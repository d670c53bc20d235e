"""Starts the ranks of a training on one machine, over ssh and under Slurm, watches them and restarts them."""
