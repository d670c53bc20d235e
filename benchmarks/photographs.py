"""Photographs as JPEG files for the benchmarks: windows of the two that scikit-learn brings along."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

GRAIN_LEVELS = 8  # brings the mean size of a file to about 90 kB at 500x375 and quality 90, as in ImageNet


def write_photographs(folder: Path, count: int, width: int = 500, height: int = 375, quality: int = 90) -> list[Path]:
    """Write `count` different windows of photographs of 640x427 pixels, half of them mirrored, with film grain.

    Returns:
        The paths, in order; neighbours come from different photographs.
    """
    photographs = load_sample_images().images
    generator = np.random.Generator(np.random.PCG64(0))
    paths = []
    for number in range(count):
        top, left = (int(generator.integers(0, 1 + room)) for room in (427 - height, 640 - width))
        window = photographs[number % 2][top : top + height, left : left + width]
        if number % 4 > 1:
            window = window[:, ::-1]
        grain = generator.normal(0, GRAIN_LEVELS, (height, width, 1))
        path = folder / f"{number:05}.jpg"
        Image.fromarray((window + grain).clip(0, 255).astype(np.uint8)).save(path, quality=quality)
        paths.append(path)
    return paths
