"""Judges a trained model, exactly, and says where it errs.

python scripts/evaluate.py digits                                   # a run's name, on what it held out
python scripts/evaluate.py logs/runs/digits --data ~/more-photos    # other images: one folder per class
python scripts/evaluate.py model.safetensors --data digits
torchrun --nproc_per_node=2 scripts/evaluate.py digits              # the same numbers, sooner

Writes scores.json, per_class.csv, confusion.csv, confusion.png, worst.csv and worst.png. Only safetensors are read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delivery.image_flags import add_image_flags
from training.command_line import OneLineParser, run_script
from training.config import LARGEST_BATCH
from training.errors import UserError, printable
from training.observe.run_folder import EVALUATION

if TYPE_CHECKING:
    from torch import nn

    from delivery.evaluation_data import EvaluationData
    from delivery.trained_model import TrainedModel
    from training.config import TrainConfig
    from training.parallel.world import World

CLASSES_SHOWN = 20


def evaluate(given: argparse.Namespace) -> int:
    """Judge the model that the command line names, on as many ranks as were started; every rank calls this."""
    from delivery.trained_model import find_model
    from training.checkpoint.weights import load_model
    from training.parallel.world import start_world, stop_world

    model = find_model(given.model)
    module, metadata = load_model(model.weights)
    world = start_world()
    try:
        _judge_and_write(given, model, module, metadata, world)
    finally:
        stop_world()
    return 0


def _judge_and_write(
    given: argparse.Namespace, model: TrainedModel, module: nn.Module, metadata: dict[str, Any], world: World
) -> None:
    from delivery.evaluate import judge
    from delivery.evaluation_data import EvaluationChoice, load_evaluation_data
    from delivery.evaluation_files import check_replaceable
    from training.observe.evaluation import describe_scores
    from training.parallel.collectives import agreed
    from training.parallel.precision import resolve_precision

    choice = EvaluationChoice(given.data, given.split, given.data_root, given.bad_images, given.allow_missing_classes)
    config = agreed(model.config, world)
    data = agreed(lambda: load_evaluation_data(metadata, config, choice), world)
    precision = agreed(lambda: resolve_precision(given.precision, world.device), world)
    folder = Path(given.output).expanduser() if given.output else _default_output(model, config, data)
    agreed(lambda: check_replaceable(folder), world)
    class_names = metadata["class_names"]
    scores = judge(module, data, world, num_classes=len(class_names), batch_size=given.batch_size, precision=precision)
    facts = {"epoch": metadata["extra"].get("epoch"), "data": data.data, "split": data.split, "precision": precision}
    facts |= describe_scores(scores, class_names, data.datasets.val.source.name)
    agreed(lambda: _write(folder, facts, data) if world.is_main else None, world)
    if world.is_main:
        _show(facts, folder)


def _write(folder: Path, facts: dict[str, Any], data: EvaluationData) -> None:
    from delivery.evaluation_files import write_evaluation

    try:
        write_evaluation(folder, facts, data.datasets.val.source.read)
    except OSError as error:
        raise UserError(f"cannot write into '{folder}': {error.strerror or error}.") from None


def _default_output(model: TrainedModel, config: TrainConfig | None, data: EvaluationData) -> Path:
    """Return where the files go: the run's own evaluation, or another one beside it."""
    if model.run is None or config is None:
        return model.weights.with_name(f"{model.weights.stem}-{EVALUATION}")
    if (data.data, data.split) == (config.data, "val"):
        return model.run / EVALUATION
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data.data).name).strip("-")
    return model.run / f"{EVALUATION}-{slug}-{data.split}"


def _show(facts: dict[str, Any], folder: Path) -> None:
    """Print the scores and the classes, the weakest first where there are many."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    macro = facts["macro"]
    console.print(
        f"top-1 {facts['top1']:.4f}  top-5 {facts['top5']:.4f}  loss {facts['loss']:.4f}  ECE {facts['ece']:.4f}  "
        f"macro F1 {macro['f1']:.4f}  on {facts['samples']} images ({printable(facts['data'])}, "
        f"{facts['split']})",
        soft_wrap=True,
    )
    classes = facts["classes"]
    shown = classes if len(classes) <= CLASSES_SHOWN else sorted(classes, key=lambda one: one["f1"])[:CLASSES_SHOWN]
    title = None if shown is classes else f"the {CLASSES_SHOWN} classes with the lowest F1, of {len(classes)}"
    table = Table("class", "images", "precision", "recall", "F1", title=title, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in shown:
        table.add_row(
            printable(one["name"]), str(one["support"]), *(f"{one[key]:.4f}" for key in ("precision", "recall", "f1"))
        )
    console.print(table)
    console.print(f"files  {printable(str(folder))}", soft_wrap=True)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("evaluate", __doc__)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    add_image_flags(parser, "judge")
    parser.add_choice(
        "--split",
        ("auto", "val", "train", "all"),
        default="auto",
        help="Part of the data; auto: what the run held out, or all of a folder that it was not trained on.",
    )
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images per rank and forward pass.")
    parser.add_choice("--precision", ("auto", "bf16", "fp16", "fp32"), default="auto", help="As in training.")
    parser.add_argument("--output", default="", help="Folder of the files; default: in the run's folder.")
    parser.add_local_rank()
    return parser.parse(words)


def main() -> int:
    """Do what the command line says and return the exit code."""
    return run_script("evaluate", parse, evaluate)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # see train_distributed.py: taking the interpreter down under gloo's threads may abort
