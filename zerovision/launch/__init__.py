"""Starts the ranks of a training run on one machine, over ssh, or under Slurm; monitors and restarts them."""
