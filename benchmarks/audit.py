"""Measures what audit_data.py finds of mistakes that were put in: changed copies, and wrong labels.

    .venv/bin/python -m benchmarks.audit copies                   # digits and generated scenes
    .venv/bin/python -m benchmarks.audit cifair cifar10.npz --listed duplicates_cifar10.csv
    .venv/bin/python -m benchmarks.audit labels labels.npz        # flips of the digits' labels, and clean data
    .venv/bin/python -m benchmarks.audit trained labels.npz --data fashion-mnist.npz --models basic_cnn mobilenet
    .venv/bin/python -m benchmarks.audit published labels.npz --probabilities pyx.npy --labels original_labels.npy
    .venv/bin/python -m benchmarks.audit fixes labels.npz --data cifar10.npz       # accuracy after the fixes
    CLEANLAB/bin/python benchmarks/audit.py cleanlab labels.npz   # the same probabilities, in an environment with it

Prints rows of Markdown. `trained` trains each model on the flipped labels, as the run of an audit is, and has labels
judged by what it sees; its data are a file of benchmarks/record_data.py, of which it takes the first --images.
`published` flips labels that others' cross-validated probabilities belong to, such as those of CIFAR-10's test images
in https://github.com/cleanlab/label-errors. `cifair` takes CIFAR-10 in its original order (x_train, x_test: uint8
[N, 32, 32, 3]) and the list of https://github.com/cvjena/cifair, and draws the pairs that are found and not listed, to
be looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

DATA = "data.npz"
Arrays = tuple[np.ndarray, np.ndarray]  # images and labels
Pairs = set[tuple[int, int]]  # numbers of images, the smaller one first
RATES, KINDS, SUSPECTED = (0.0, 0.01, 0.05, 0.1), ("uniform", "class"), 0.5
CONFUSED_WITH = {  # the wrong label of each class, where it depends on the class
    "digits": [8, 7, 3, 8, 9, 6, 0, 1, 3, 4],
    "fashion-mnist": [6, 3, 4, 0, 2, 7, 0, 5, 0, 7],  # such as T-shirt and shirt, pullover and coat
    "cifar10": [8, 9, 0, 5, 7, 3, 3, 4, 0, 1],  # such as airplane and ship, cat and dog, deer and horse
}
TABLE = "| flips | seed | predicted | flagged | flipped ones | of | new label right |\n|---|---|---|---|---|---|---|"
RECIPE = "--batch-size 128 --learning-rate 0.004"
QUIET = "--tensorboard false --report false --progress off --workers 0"


def flipped(labels: np.ndarray, rate: float, kind: str, seed: int, task: str = "digits") -> np.ndarray:
    """Return labels of which a share is wrong: any other class, or the one that is easily confused with it."""
    generator = np.random.Generator(np.random.PCG64(seed))
    chosen = generator.permutation(len(labels))[: round(rate * len(labels))]
    wrong = (
        (labels + generator.integers(1, 10, len(labels))) % 10
        if kind == "uniform"
        else np.array(CONFUSED_WITH[task])[labels]
    )
    found = labels.copy()
    found[chosen] = wrong[chosen]
    return found


def kept(path: str) -> dict[str, np.ndarray]:
    """Return what the cases that were measured have left in a file; nothing of a file that is not there yet."""
    return dict(np.load(path)) if Path(path).exists() else {}


def judge(name: str, probabilities: np.ndarray, labels: np.ndarray, truth: np.ndarray, path: str) -> None:
    """Print what is found of the flips by probabilities of a classifier, and keep both in a file for `compare`."""
    from zerovision.delivery.audit.labels import wrong_label_probabilities

    wrong, other, _ = wrong_label_probabilities(probabilities, labels)
    is_flipped = labels != truth
    found = (wrong >= SUSPECTED) & is_flipped
    right = (other[found] == truth[found]).mean() if found.any() else float("nan")
    predicted = (probabilities.argmax(1) == labels).mean()
    counts = f"{(wrong >= SUSPECTED).sum()} | {found.sum()} | {is_flipped.sum()}"
    print(f"| {name.replace('/', ' | ')} | {predicted:.1%} | {counts} | {right:.1%} |", flush=True)
    arrays = {"probabilities": probabilities, "labels": labels, "flipped": is_flipped, "wrong": wrong}
    np.savez(path, **kept(path) | {f"{name}/{key}": array for key, array in arrays.items()})


def cases(rates: list[float], seeds: int) -> list[tuple[float, str, int]]:
    """Return rate, kind and seed of flips; without any there is one kind and seed."""
    every = [(rate, kind, seed) for seed in range(seeds) for rate in rates for kind in KINDS]
    return [case for case in every if case[0] or case[1:] == (KINDS[0], 0)]


def measure_labels(path: str, only: list[tuple[float, str, int]]) -> None:
    """Print what is found of the flips of each rate and kind among the digits, by their pictures."""
    from sklearn.datasets import load_digits

    from zerovision.delivery.audit.labels import out_of_sample_probabilities

    digits = load_digits()
    features = digits.images.reshape(len(digits.target), -1).astype(np.float32)
    print(TABLE)
    for rate, kind, seed in only:
        labels = flipped(digits.target, rate, kind, seed)
        probabilities = out_of_sample_probabilities(features, labels)
        judge(f"{rate:.0%} {kind}/{seed}", probabilities, labels, digits.target, path)


def measure_published(path: str, probabilities: str, labels: str, only: list[tuple[float, str, int]]) -> None:
    """Print what is found of flips by others' probabilities of CIFAR-10's test images."""
    said, truth = np.load(probabilities), np.load(labels).astype(np.int64)
    print(TABLE)
    for rate, kind, seed in only:
        judge(f"{rate:.0%} {kind}/{seed}", said, flipped(truth, rate, kind, seed, "cifar10"), truth, path)


def write(folder: str, train: Arrays, test: Arrays) -> None:
    """Write `DATA` into a folder."""
    np.savez(Path(folder) / DATA, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])


def train(folder: str, train: Arrays, test: Arrays, model: str, epochs: int, seed: int, recipe: str = RECIPE) -> Path:
    """Train a model on images and labels, by the flags of a recipe; return the folder of its run."""
    from zerovision.training.config.command_line import parse_args
    from zerovision.training.run import run

    write(folder, train, test)
    given = f"{recipe} {QUIET} --model-type {model} --epochs {epochs} --seed {seed} --run-name run".split()
    given += ["--data", f"npz:{folder}/{DATA}", "--log-dir", folder]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        code = run(parse_args(given)[0])
    if code:
        raise SystemExit(code)
    return Path(folder) / "runs" / "run"


def measure_trained(
    path: str, data: str, images: int, models: list[str], epochs: int, recipe: str, only: list[tuple[float, str, int]]
) -> None:
    """Train each model on flipped labels of the first images, a fifth of them held out; print what is found by it.

    "pictures" is no model: labels are judged as without `--run`. What the file has already is not measured again.
    """
    from zerovision.delivery.audit.catalogue import Catalogue, embeddings, picture_features
    from zerovision.delivery.audit.labels import out_of_sample_probabilities, with_history
    from zerovision.training.checkpoint.weights import load_model
    from zerovision.training.data import DataOptions, load_data
    from zerovision.training.observe.sample_history import mean_probabilities

    archive, task, held_out = np.load(data), Path(data).stem, images // 5
    pictures, truth = archive["x_train"][:images], archive["y_train"][:images].astype(np.int64)
    seen: np.ndarray | None = None
    print(TABLE)
    for (rate, kind, seed), model in ((case, model) for case in only for model in models):
        name, labels = f"{model}, {rate:.0%} {kind}/{seed}", flipped(truth, rate, kind, seed, task)
        if f"{name}/wrong" in kept(path):
            continue
        parts = [(pictures[some], labels[some]) for some in (slice(held_out, None), slice(held_out))]
        learned = np.full((len(labels), 10), np.nan)
        with tempfile.TemporaryDirectory() as folder:
            if model != "pictures":
                run = train(folder, parts[0], parts[1], model, epochs, seed, recipe)
                trained = load_model(run / "model.safetensors")
                learned[held_out:] = mean_probabilities(run, parts[0][1], 10)
                features = embeddings(*trained, Catalogue(load_data(DataOptions(data=f"npz:{folder}/{DATA}"))))
            elif seen is None:  # they do not depend on the labels
                write(folder, parts[0], parts[1])
                catalogue = Catalogue(load_data(DataOptions(data=f"npz:{folder}/{DATA}")))
                features = seen = picture_features(*catalogue.pictures()[:2])
            else:
                features = seen
        features = np.roll(features, held_out, axis=0)  # in the order of the labels
        probabilities = with_history(out_of_sample_probabilities(features, labels), learned)
        judge(name, probabilities, labels, truth, path)


def measure_fixes(path: str, data: str, model: str, epochs: int) -> None:
    """Train on the labels of each case of a file: as given, with the fixes, and less as many images at random.

    The images are the first x_train of the data, and accuracy is that of the last epoch on its x_test. What the file
    has already is not measured again.
    """
    from zerovision.delivery.audit.labels import wrong_label_probabilities

    archive = np.load(data)
    print("| flips | seed | relabelled | dropped | top-1 as given | fixed | as many removed at random |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in sorted({key.rpartition("/")[0] for key in kept(path) if key.endswith("/flipped")}):
        labels, seed = kept(path)[f"{name}/labels"], int(name.rpartition("/")[2])
        pictures = archive["x_train"][: len(labels)]
        wrong, other, certainty = wrong_label_probabilities(kept(path)[f"{name}/probabilities"], labels)
        is_suspect, is_known = wrong >= SUSPECTED, certainty >= SUSPECTED
        random = np.random.Generator(np.random.PCG64(seed)).permutation(len(labels))[is_suspect.sum() :]
        variants = {
            "given": (pictures, labels),
            "fixed": (pictures[~is_suspect | is_known], np.where(is_suspect, other, labels)[~is_suspect | is_known]),
            "random": (pictures[random], labels[random]),
        }
        for variant, arrays in variants.items():
            if f"{name}/{variant}" not in kept(path):
                with tempfile.TemporaryDirectory() as folder:
                    run = train(folder, arrays, (archive["x_test"], archive["y_test"]), model, epochs, seed)
                    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
                    top1 = [line["val_top1"] for line in lines if "val_top1" in line][-1]
                np.savez(path, **kept(path) | {f"{name}/{variant}": np.array(top1)})
        top1s = " | ".join(f"{kept(path)[f'{name}/{variant}']:.1%}" for variant in variants)
        counts = f"{(is_suspect & is_known).sum()} | {(is_suspect & ~is_known).sum()}"
        print(f"| {name.replace('/', ' | ')} | {counts} | {top1s} |", flush=True)


def compare(path: str) -> None:
    """Print recalls at equal precision: ours and that of cleanlab's list; of what we report and of its plain ranking.

    Of each case, then the means over the seeds with the least and the most. cleanlab's ranking is by
    `get_label_quality_scores`, whose default is the probability of the given label.
    """
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    def recall_at(ranking: np.ndarray, precision: float) -> float:
        ranked = is_flipped[np.argsort(ranking, kind="stable")]
        most = np.flatnonzero(ranked.cumsum() / np.arange(1, len(ranked) + 1) >= precision)
        return ranked[: most[-1] + 1].sum() / is_flipped.sum() if len(most) else 0.0

    ours = "our recall at that precision | our report's precision | its recall | cleanlab's ranking at that precision"
    header = f"cleanlab's precision | its recall | {ours} |\n|---|---|---|---|---|---|---|---|"
    print(f"| flips | seed | {header}")
    of_seeds: dict[str, list[list[float]]] = {}
    for key in sorted({name.rpartition("/")[0] for name in kept(path) if name.endswith("/flipped")}):
        probabilities, labels, is_flipped, wrong = (
            kept(path)[f"{key}/{name}"] for name in ("probabilities", "labels", "flipped", "wrong")
        )
        if not is_flipped.any():
            continue
        probabilities = probabilities / probabilities.sum(1, keepdims=True)
        listed = find_label_issues(labels, probabilities, return_indices_ranked_by="self_confidence")
        reported = np.flatnonzero(wrong >= SUSPECTED)
        row: list[float] = []
        for chosen, other in ((listed, -wrong), (reported, get_label_quality_scores(labels, probabilities))):
            precision, recall = is_flipped[chosen].mean(), is_flipped[chosen].sum() / is_flipped.sum()
            row += [precision, recall, recall_at(other, precision)]
        of_seeds.setdefault(key.rpartition("/")[0], []).append(row)
        print(f"| {key.replace('/', ' | ')} | {' | '.join(f'{value:.1%}' for value in row)} |")
    print(f"\n| flips | seeds | {header}")
    for name, rows in of_seeds.items():
        cells = [f"{np.mean(of):.0%} ({min(of):.0%}-{max(of):.0%})" for of in zip(*rows, strict=True)]
        print(f"| {name} | {len(rows)} | {' | '.join(cells)} |")


def measure_copies(count: int, each: int, folder: str, photographs: str) -> None:
    """Print how many of `each` copies of every change are found among `count` images, and false alarms.

    All images are left in a folder, for `copy_finders.py`, if one is named. So it is done with all photographs below
    another folder, of whose originals some may be copies of one another.
    """
    from PIL import Image, ImageEnhance, ImageOps
    from sklearn.datasets import load_digits

    from zerovision.delivery.audit.copies import SIDE, find_copies

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
        "mirrored and cropped to 90%": lambda image: crop(ImageOps.mirror(image), 0.9),
    }
    digits = [Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32)) for image in load_digits().images]
    sets = {"digits": [image.convert("RGB") for image in digits[:count]], "scenes": scenes(count)}
    if photographs:
        sets["photographs"] = [Image.open(path).convert("RGB") for path in sorted(Path(photographs).rglob("*.jpg"))]
    print("| images | copies | found |\n|---|---|---|")
    for name, images in sets.items():
        put_in, every = {}, list(images)
        order = generator.permutation(len(images)).tolist()
        for change, function in changes.items():
            for number in [order.pop() for _ in range(each)]:
                put_in[number, len(every)] = change
                every.append(function(images[number]))
        if folder:
            (Path(folder) / name).mkdir(parents=True)
            for number, image in enumerate(every):
                image.save(Path(folder) / name / f"{number}.png")
            lines = [f"{one},{other},{change}\n" for (one, other), change in put_in.items()]
            (Path(folder) / f"{name}.csv").write_text("".join(lines))
        pictures = [np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for image in every]
        print_found(name, {copy[:2] for copy in find_copies(np.stack(pictures))}, put_in, len(images))


def print_found(name: str, pairs: Pairs, put_in: dict[tuple[int, int], str], originals: int) -> None:
    """Print how many of the copies that were put in are among the pairs, by change, and how many pairs of originals."""
    found = Counter(put_in[pair] for pair in pairs & put_in.keys())
    for change, many in Counter(put_in.values()).items():
        print(f"| {name} | {change} | {found[change]} of {many} |")
    print(
        f"| {name} | none: false alarms | {sum(other < originals for _, other in pairs)} of {originals} |", flush=True
    )


def listed_pairs(listed: str, trained: int) -> dict[tuple[int, int], int]:
    """Return ciFAIR's pairs and how each was judged; test images are numbered after so many training images."""
    rows = np.loadtxt(listed, delimiter=",", skiprows=1)
    return {(int(one), trained + int(other)): int(judged) for other, one, _, judged in rows}


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_cifair(path: str, listed: str, drawing: str) -> None:
    """Print how many of the listed pairs are found, and draw the other pairs of a test and a training image."""
    import torch
    from PIL import Image

    from zerovision.delivery.audit.copies import find_copies
    from zerovision.training.data.reading.sources import grey

    train, test = (np.load(path)[key] for key in ("x_train", "x_test"))
    images = np.concatenate([train, test])
    pictures = grey(torch.from_numpy(images).permute(0, 3, 1, 2))[:, 0].numpy()
    before, begin, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    found = {copy[:2] for copy in find_copies(pictures)}
    took = f"{time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} s of CPUs"
    print(f"{len(found)} pairs in {took}; peak {peak_bytes() / 1e9:.2f} GB, before {before / 1e9:.2f} GB\n")
    pairs = listed_pairs(listed, len(train))
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
    parser.add_argument("what", choices=("copies", "cifair", "labels", "trained", "published", "fixes", "cleanlab"))
    parser.add_argument("file", nargs="?", default="labels.npz")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--pictures", default="", help="folder for the images of `copies`")
    parser.add_argument("--photographs", default="", help="folder of photographs for `copies`, *.jpg at any depth")
    parser.add_argument("--listed", default="duplicates_cifar10.csv")
    parser.add_argument("--drawing", default="others.png")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--data", default="fashion-mnist.npz")
    parser.add_argument("--models", nargs="+", default=["airbench_small"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--recipe", default=RECIPE, help="flags of `trained`, such as --recipe='--preset cifar10'")
    parser.add_argument("--probabilities", default="cifar10_test_set_pyx.npy")
    parser.add_argument("--labels", default="cifar10_test_set_original_labels.npy")
    given = parser.parse_args()
    only = cases(given.rates, given.seeds)
    if given.what == "copies":
        measure_copies(given.images, given.each, given.pictures, given.photographs)
    elif given.what == "cifair":
        measure_cifair(given.file, given.listed, given.drawing)
    elif given.what == "labels":
        measure_labels(given.file, only)
    elif given.what == "trained":
        measure_trained(given.file, given.data, given.images, given.models, given.epochs, given.recipe, only)
    elif given.what == "published":
        measure_published(given.file, given.probabilities, given.labels, only)
    elif given.what == "fixes":
        measure_fixes(given.file, given.data, given.models[0], given.epochs)
    else:
        compare(given.file)


if __name__ == "__main__":
    main()
