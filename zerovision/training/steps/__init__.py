"""What is done with the micro-batches of a step."""
