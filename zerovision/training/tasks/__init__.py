"""The tasks that a network can learn; `settings.TASKS` is the table of tasks."""
