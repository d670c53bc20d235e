"""What imagededup and CleanVision find of the copies that benchmarks/audit.py puts in, and of ciFAIR's list.

    .venv/bin/python -m benchmarks.audit copies --pictures FOLDER       # leaves the images there, as files
    PEERS/bin/python -m benchmarks.copy_finders copies FOLDER           # in an environment with both
    PEERS/bin/python -m benchmarks.copy_finders cifair cifar10.npz duplicates_cifar10.csv

Prints rows of Markdown: pairs found of those put in or listed, and of others. imagededup compares perceptual hashes of
64 bits; its default are pairs that differ in at most 10 of them. Its networks need published weights, which are not
measured. CleanVision takes images with equal hashes.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.audit import Pairs, listed_pairs, print_found

DISTANCES = (0, 2, 4, 6, 8, 10)  # bits


def found_by_hashes(folder: Path) -> dict[str, Pairs]:
    """Return the pairs of imagededup's hashes, by the bits that may differ.

    Each is compared with all later ones, as its `find_duplicates` does, which takes more than 12 minutes for 60,000.
    """
    from imagededup.methods import PHash

    by_name = PHash(verbose=False).encode_images(str(folder), num_enc_workers=0)
    hashes = np.array([int(by_name[f"{number}.png"], 16) for number in range(len(by_name))], dtype=np.uint64)
    like: dict[tuple[int, int], int] = {}
    for number, one in enumerate(hashes):
        distances = np.bitwise_count(hashes[number + 1 :] ^ one)
        for place in np.flatnonzero(distances <= max(DISTANCES)).tolist():
            like[number, number + 1 + place] = distances[place]
    return {f"imagededup, {most} bits": {pair for pair in like if like[pair] <= most} for most in DISTANCES}


def found_by_cleanvision(folder: Path) -> dict[str, Pairs]:
    """Return the pairs of CleanVision's sets of exact and near duplicates."""
    from cleanvision import Imagelab

    lab = Imagelab(data_path=str(folder), verbose=False)
    lab.find_issues({"exact_duplicates": {}, "near_duplicates": {}}, n_jobs=1, verbose=False)
    sets = [*lab.info["exact_duplicates"]["sets"], *lab.info["near_duplicates"]["sets"]]
    numbered = [sorted(int(Path(name).stem) for name in one) for one in sets]
    return {"CleanVision": {pair for one in numbered for pair in combinations(one, 2)}}


def finders(folder: Path) -> dict[str, Pairs]:
    """Return what each finds among the files of a folder, NUMBER.png."""
    return found_by_hashes(folder) | found_by_cleanvision(folder)


def measure_copies(root: Path) -> None:
    """Print what is found of each change, and the pairs of originals."""
    print("| images | finder | change | found |\n|---|---|---|---|")
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        with (root / f"{folder.name}.csv").open() as stream:
            put_in = {(int(one), int(other)): change for one, other, change in csv.reader(stream)}
        originals = len(list(folder.iterdir())) - len(put_in)
        for name, pairs in finders(folder).items():
            print_found(f"{folder.name} | {name}", pairs, put_in, originals)


def measure_cifair(path: str, listed: str) -> None:
    """Print how many of the listed pairs are found, of their test images, and other pairs of test and training."""
    from PIL import Image

    train, test = (np.load(path)[key] for key in ("x_train", "x_test"))
    pairs = listed_pairs(listed, len(train))
    near = {pair for pair, judged in pairs.items() if judged == 1}
    print("| finder | near-duplicates | their test images, with any copy | very similar | other pairs |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, image in enumerate(np.concatenate([train, test])):
            Image.fromarray(image).save(Path(folder) / f"{number}.png")
        for name, every in finders(Path(folder)).items():
            found = {pair for pair in every if pair[0] < len(train) <= pair[1]}
            tested = {other for _, other in found} & {other for _, other in near}
            similar = f"{len(found & (pairs.keys() - near))} of {len(pairs) - len(near)}"
            others = len(found - pairs.keys())
            print(f"| {name} | {len(near & found)} of {len(near)} | {len(tested)} | {similar} | {others} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    if sys.argv[1] == "copies":
        measure_copies(Path(sys.argv[2]))
    else:
        measure_cifair(sys.argv[2], sys.argv[3])
