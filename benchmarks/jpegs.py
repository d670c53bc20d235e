"""Makes JPEG files that look like photographs to a decoder: smooth shapes, fine texture, noise; always the same ones.

    python benchmarks/jpegs.py /tmp/jpegs --images 4000

Written as train/CLASS/NUMBER.jpg and a few under val/; done once per folder.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
VALIDATION_IMAGES = 40
QUALITY = 90
TEXTURES = 24


def make_folder(folder: Path, images: int, pixels: int = 256) -> Path:
    """Write the files where they are not there yet; return the folder `images`-`pixels` below `folder`."""
    made = folder / f"jpegs-{images}-{pixels}px"
    if made.is_dir():
        return made
    unfinished = folder / f"unfinished-{made.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    generator = np.random.Generator(np.random.PCG64(0))
    textures = np.stack([fractal_noise(generator, 2 * pixels) for _ in range(TEXTURES)])
    for part, count in (("train", images), ("val", VALIDATION_IMAGES)):
        for number in range(count):
            label = number % CLASSES
            target = unfinished / part / f"class{label}" / f"{number:06d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photograph(generator, textures, label, pixels)).save(target, quality=QUALITY)
    unfinished.rename(made)
    return made


def fractal_noise(generator: np.random.Generator, side: int) -> np.ndarray:
    """Noise whose amplitude falls as 1/frequency, as in photographs (Field 1987); float32 [side, side], deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = np.inf
    spectrum = np.exp(2j * np.pi * generator.random(frequency.shape)) / frequency
    noise = np.fft.irfft2(spectrum, s=(side, side))
    return (noise / noise.std()).astype(np.float32)


def photograph(generator: np.random.Generator, textures: np.ndarray, label: int, pixels: int) -> np.ndarray:
    """Mix light, color and grain; the class decides the hue. uint8 [pixels, pixels, 3]."""
    layers = []
    for number in generator.integers(len(textures), size=3):
        top, left = generator.integers(textures.shape[1] - pixels, size=2)
        layers.append(textures[number, top : top + pixels, left : left + pixels])
    light, colour, second_colour = layers
    angle = 2 * np.pi * label / CLASSES
    hue = 25 * np.array([np.cos(angle), np.cos(angle + 2.1), np.cos(angle + 4.2)], dtype=np.float32)
    image = 120 + 45 * light[..., None] + hue
    image = image + 12 * colour[..., None] * np.array([1, 0, -1], dtype=np.float32)
    image = image + 8 * second_colour[..., None] * np.array([-0.5, 1, -0.5], dtype=np.float32)
    image = image + 4 * generator.standard_normal((pixels, pixels, 1), dtype=np.float32)
    return image.clip(0, 255).astype(np.uint8)


def main() -> None:
    """Write the files, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--pixels", type=int, default=256)
    given = parser.parse_args()
    made = make_folder(given.folder, given.images, given.pixels)
    sizes = [path.stat().st_size for path in made.glob("train/*/*.jpg")]
    print(f"{made}: {len(sizes)} training images, {sum(sizes) / len(sizes) / 1000:.1f} kB each on average")


if __name__ == "__main__":
    main()
