"""The tasks that a network can learn: one or several classes per image, similar features, or a teacher's outputs."""
