"""Makes the augmentation of a sample a function of (seed, epoch, index) alone.

The libraries of augmentation draw from three global generators: Python's `random` (timm), NumPy's legacy one (timm)
and torch's (torchvision). They are seeded before each sample, and put back after each batch, so that reading data in
the main process leaves the dropout masks of the training as they were.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global CPU generators of Python, NumPy and torch back when the block ends."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the three global CPU generators for one sample of one epoch."""
    digest = hashlib.blake2b(f"{seed},{epoch},{index}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would also queue a call on every GPU
    torch.random.default_generator.manual_seed(value)
