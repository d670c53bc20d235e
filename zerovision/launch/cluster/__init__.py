"""Trainings on several machines: an agent on every node, and the supervisor that leads them."""
