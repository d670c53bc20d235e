"""Measures what audit_data.py finds of mistakes that were put in: changed copies, and wrong labels.

    .venv/bin/python -m benchmarks.audit copies                   # digits and generated scenes
    .venv/bin/python -m benchmarks.audit cifair cifar10.npz --listed duplicates_cifar10.csv
    .venv/bin/python -m benchmarks.audit labels labels.npz        # flips of the digits' labels, and clean data
    CLEANLAB/bin/python benchmarks/audit.py cleanlab labels.npz   # the same probabilities, in an environment with it

Prints rows of Markdown. `cifair` takes CIFAR-10 in its original order (x_train, x_test: uint8 [N, 32, 32, 3]) and the
list of https://github.com/cvjena/cifair, and draws the pairs that are found and not listed, to be looked at.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter

import numpy as np

RATES, KINDS, SUSPECTED = (0.01, 0.05, 0.1), ("uniform", "class"), 0.5
CONFUSED_WITH = np.array([8, 7, 3, 8, 9, 6, 0, 1, 3, 4])  # of each digit, where the wrong label depends on the class


def flipped(labels: np.ndarray, rate: float, kind: str, seed: int) -> np.ndarray:
    """Return labels of which a share is wrong: any other class, or the one that is easily confused with it."""
    generator = np.random.Generator(np.random.PCG64(seed))
    chosen = generator.permutation(len(labels))[: round(rate * len(labels))]
    wrong = (labels + generator.integers(1, 10, len(labels))) % 10 if kind == "uniform" else CONFUSED_WITH[labels]
    found = labels.copy()
    found[chosen] = wrong[chosen]
    return found


def measure_labels(path: str, seeds: int) -> None:
    """Print what is found of the flips of each rate and kind, and keep the probabilities for `compare`."""
    from sklearn.datasets import load_digits

    from delivery.audit.labels import out_of_sample_probabilities, wrong_label_probabilities

    digits = load_digits()
    features, kept = digits.images.reshape(len(digits.target), -1).astype(np.float32), {}
    print("| flips | seed | flagged | flipped ones | of | new label right |\n|---|---|---|---|---|---|")
    cases = [(rate, kind, seed) for rate in RATES for kind in KINDS for seed in range(seeds)]
    for rate, kind, seed in [(0.0, "none", 0), *cases]:
        labels = flipped(digits.target, rate, kind, seed)
        probabilities = out_of_sample_probabilities(features, labels)
        wrong, other, _ = wrong_label_probabilities(probabilities, labels)
        name, is_flipped = f"{rate:.0%} {kind}", labels != digits.target
        found = (wrong >= SUSPECTED) & is_flipped
        right = (other[found] == digits.target[found]).mean() if found.any() else float("nan")
        counts = f"{(wrong >= SUSPECTED).sum()} | {found.sum()} | {is_flipped.sum()}"
        print(f"| {name} | {seed} | {counts} | {right:.1%} |", flush=True)
        arrays = {"probabilities": probabilities, "labels": labels, "flipped": is_flipped, "wrong": wrong}
        kept |= {f"{name}/{seed}/{key}": array for key, array in arrays.items()}
    np.savez(path, **kept)


def compare(path: str) -> None:
    """Print beside our recall that of cleanlab's own list at its precision, of the same probabilities."""
    from cleanlab.filter import find_label_issues

    kept = np.load(path)
    print("| flips | seed | cleanlab's precision | its recall | our recall at that precision |\n|---|---|---|---|---|")
    for key in sorted({name.rpartition("/")[0] for name in kept.files}):
        probabilities, labels, is_flipped, wrong = (
            kept[f"{key}/{name}"] for name in ("probabilities", "labels", "flipped", "wrong")
        )
        if not is_flipped.any():
            continue
        probabilities = probabilities / probabilities.sum(1, keepdims=True)
        listed = find_label_issues(labels, probabilities, return_indices_ranked_by="self_confidence")
        precision, recall = is_flipped[listed].mean(), is_flipped[listed].sum() / is_flipped.sum()
        ranked = is_flipped[np.argsort(-wrong, kind="stable")]
        precisions = ranked.cumsum() / np.arange(1, len(ranked) + 1)
        most = np.flatnonzero(precisions >= precision)
        ours = ranked[: most[-1] + 1].sum() / is_flipped.sum() if len(most) else 0.0
        print(f"| {key.replace('/', ' | ')} | {precision:.1%} | {recall:.1%} | {ours:.1%} |")


def measure_copies(count: int, each: int) -> None:
    """Print how many of `each` copies of every change are found among `count` images, and false alarms."""
    from PIL import Image, ImageEnhance, ImageOps
    from sklearn.datasets import load_digits

    from delivery.audit.copies import SIDE, find_copies

    sys.path.insert(0, "tests/unit")  # where its helpers are
    from tests.unit.test_audit import scenes

    generator = np.random.Generator(np.random.PCG64(0))

    def crop(image: Image.Image, share: float) -> Image.Image:
        sides = [round(share * side) for side in image.size]
        left, top = (int(generator.integers(0, 1 + old - new)) for old, new in zip(image.size, sides, strict=True))
        return image.crop((left, top, left + sides[0], top + sides[1]))

    def encoded(image: Image.Image) -> Image.Image:
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=40)
        return Image.open(stream).convert("RGB")

    changes = {
        "encoded again": encoded,
        "mirrored": ImageOps.mirror,
        "half": lambda image: image.resize((image.width // 2, image.height // 2)),
        "double": lambda image: image.resize((image.width * 2, image.height * 2)),
        "30 % brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
        "30 % flatter": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
        **{f"cropped to {share:.0%}": lambda image, share=share: crop(image, share) for share in (0.9, 0.8, 0.7)},
        "mirrored, cropped to 90%": lambda image: crop(ImageOps.mirror(image), 0.9),
    }
    digits = [Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32)) for image in load_digits().images]
    sets = {"digits": [image.convert("RGB") for image in digits[:count]], "scenes": scenes(count)}
    print("| images | copies | found |\n|---|---|---|")
    for name, images in sets.items():
        put_in, every = {}, list(images)
        order = generator.permutation(len(images)).tolist()
        for change, function in changes.items():
            for number in [order.pop() for _ in range(each)]:
                put_in[number, len(every)] = change
                every.append(function(images[number]))
        pictures = [np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for image in every]
        pairs = {copy[:2] for copy in find_copies(np.stack(pictures))}
        found = Counter(put_in[pair] for pair in pairs & put_in.keys())
        for change in changes:
            print(f"| {name} | {change} | {found[change]} of {each} |")
        of_originals = sum(other < len(images) for _, other in pairs)
        print(f"| {name} | none: false alarms | {of_originals} of {len(images)} |", flush=True)


def measure_cifair(path: str, listed: str, drawing: str) -> None:
    """Print how many of the listed pairs are found, and draw the other pairs of a test and a training image."""
    import torch
    from PIL import Image

    from delivery.audit.copies import find_copies
    from training.data.reading.sources import grey

    train, test = (np.load(path)[key] for key in ("x_train", "x_test"))
    images = np.concatenate([train, test])
    found = {copy[:2] for copy in find_copies(grey(torch.from_numpy(images).permute(0, 3, 1, 2))[:, 0].numpy())}
    rows = np.loadtxt(listed, delimiter=",", skiprows=1)
    pairs = {(int(one), len(train) + int(other)): int(judged) for other, one, _, judged in rows}
    print("| listed as | pairs | found |\n|---|---|---|")
    for name, kind in (("near-duplicate", 1), ("very similar", 2)):
        those = {pair for pair, judged in pairs.items() if judged == kind}
        print(f"| {name} | {len(those)} | {len(those & found)} |")
    others = sorted(pair for pair in found - pairs.keys() if pair[0] < len(train) <= pair[1])
    print(f"| not | | {len(others)}, drawn in {drawing} |")
    sheet = Image.new("RGB", (20 * 66, -(-len(others) // 20) * 134))
    for place, pair in enumerate(others):
        for row, number in enumerate(pair):
            corner = place % 20 * 66, place // 20 * 134 + row * 65
            sheet.paste(Image.fromarray(images[number]).resize((64, 64)), corner)
    sheet.save(drawing)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("copies", "cifair", "labels", "cleanlab"))
    parser.add_argument("file", nargs="?", default="labels.npz")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--listed", default="duplicates_cifar10.csv")
    parser.add_argument("--drawing", default="others.png")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "copies":
        measure_copies(given.images, given.each)
    elif given.what == "cifair":
        measure_cifair(given.file, given.listed, given.drawing)
    elif given.what == "labels":
        measure_labels(given.file, given.seeds)
    else:
        compare(given.file)


if __name__ == "__main__":
    main()
