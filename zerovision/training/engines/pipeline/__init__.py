"""Pipeline parallelism: consecutive layers on neighbouring ranks, through which micro-batches pass."""
