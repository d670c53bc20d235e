"""Makes the augmentation of a sample depend only on (seed, epoch, index).

`uniform_draws` computes stateless hashes. The policies of timm and torchvision draw from the global generators of
Python, NumPy and torch. These generators are seeded before each sample and restored after each batch, so that reading
data in the main process does not affect other random numbers in training.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

COPY = 2**32  # copy k of a sample in an epoch uses the draws of index + k * COPY; no data set has this many samples
# The first draws for the crop and for erasing; the draws before them determine mirroring and shift.
FIRST_CROP_DRAW, FIRST_ERASING_DRAW = 3, 25

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform_draws(seed: int, epoch: int, draw_keys: np.ndarray, count: int, first: int = 0) -> np.ndarray:
    """Return `count` independent draws for each sample of an epoch: float64 [B, count], uniform in [0, 1).

    The hash is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014), applied in turn to the seed, epoch, index and draw number. It uses integer
    arithmetic and one exact division, so the bits are the same on every machine. The keys, int64 [B], are positions in
    the data set, or the `draw_keys` of a `BatchKey`; `first` is the number of the first draw.
    """
    state = _mix(np.full(1, seed, dtype=np.uint64))
    state = _mix(state + np.uint64(epoch))
    state = _mix(state + draw_keys.astype(np.uint64))
    bits = _mix(state[:, None] + np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply one step of SplitMix64, modulo 2^64, to a uint64 array of any shape."""
    values = values + _GOLDEN_GAMMA
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_global_generators(seed: int, epoch: int, index: int) -> int:
    """Seed the three global CPU generators for one sample of one epoch; return the 64-bit seed."""
    value = int.from_bytes(hashlib.blake2b(f"{seed},{epoch},{index}".encode(), digest_size=8).digest(), "little")
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would also queue a call on every GPU
    torch.random.default_generator.manual_seed(value)
    return value
