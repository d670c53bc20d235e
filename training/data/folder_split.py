"""Holds out a validation part of each class, by the paths of its images."""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Sequence

from training.data.folder_listing import FoundFile

TOLERANCE = 0.1  # of the expected number, and one image


def split_class(
    files: Sequence[FoundFile], val_fraction: float, seed: int = 0
) -> tuple[list[FoundFile], list[FoundFile]]:
    """Return the training and the validation files of one class.

    A file is held out if the hash of its path is below `val_fraction`: that depends on no other file, so adding images
    moves none, and on no seed of a run, so that runs of different seeds are evaluated on the same images. Chance alone
    would hold out 7 of 11 images now and then: if the number is more than `TOLERANCE` and one image off the expected
    one, the files with the next hashes make up for it, and only those can move when images are added. Of two or more
    files, each part has at least one.

    Args:
        files: Of the class.
        val_fraction: Share that is held out, above 0 and below 1.
        seed: Another one holds out other files.
    """
    ranked = sorted((_unit_hash(file[0], seed), file) for file in files)
    expected = val_fraction * len(files)
    slack = 1 + TOLERANCE * expected
    held_out = bisect.bisect_left(ranked, (val_fraction,))
    held_out = round(min(max(held_out, expected - slack), expected + slack))
    held_out = min(max(held_out, 1), len(files) - 1)
    return [file for _, file in ranked[held_out:]], [file for _, file in ranked[:held_out]]


def _unit_hash(path: str, seed: int) -> float:
    salt = seed.to_bytes(8, "little") if seed else b""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little") / 2**64
