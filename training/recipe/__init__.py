"""How weights are updated: optimizers, schedules, freezing, and steps that are not finite."""
