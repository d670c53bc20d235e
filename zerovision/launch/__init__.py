"""Starts the ranks of a training on one machine, over ssh or under Slurm; watches and restarts them."""
