"""Training steps, and the work that is done before and after each step."""
