"""The engines, which shard and update the training state."""
