"""The processing of a step's micro-batches."""
