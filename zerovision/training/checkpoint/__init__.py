"""Checkpoints: the state that a resume restores, in a format that any strategy, precision and number of ranks can read.

A checkpoint is a folder logs/runs/<run>/checkpoints/step-<epoch>-<step>/:

    manifest.json             position of the run, its configuration, and size and sha256 of every shard
    shard-00000.safetensors   rank 0's part of the fp32 weights and of the optimizer's moments, and its own buffers
    shard-00001.safetensors   rank 1's, ...
    frozen.safetensors        weights that are not trained, if there are any

The folder gets its name only when it is complete and on disk; then its name is written to the file `last` next to it,
and after the best epoch so far also to `best`. Dropout, sample order and augmentation are functions of (seed, epoch,
step), so no random state is stored.
"""
