"""Trains variants of one line with several seeds each, and writes a table of them into a page of the docs.

    python benchmarks/variants.py ablation --data fashion-mnist.npz --seeds 5
    python benchmarks/variants.py zoo --data fashion-mnist.npz --seeds 1
    python benchmarks/variants.py ablation --table        # the page again, from the logs

`ablation` is the preset for Fashion-MNIST with one ingredient out at a time, `zoo` one line with each model of the
guide, for 2 epochs and for the 12 of the README's line. A round trains all variants with one seed, or those of
`--only`. What was broken off goes on with the runs that it lacks; all runs of a variant are of one kind of machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scipy import stats

from benchmarks.record import RECORDS, ROOT, add_data_and_seeds, keep_preset, our_command, summary, train_ours
from benchmarks.record_data import file_sha256
from benchmarks.record_table import replace_between, top1_cell
from benchmarks.report import machine_name, today, versions
from zerovision.models.build import build_model
from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import RunSettings
from zerovision.training.config.command_line import OneLineParser, run_script

INGREDIENTS = {
    "Muon (AdamW in its place)": "--optimizer adamw --learning-rate 0.004",
    "label smoothing": "--label-smoothing 0",
    "lookahead": "--lookahead 0",
    "weight decay": "--weight-decay 0",
    "warm-up": "--warmup-epochs 0",
}
ZOO = ("basic_cnn", "cnn_lstm", "mobilenet", "efficientnet", "vgg", "ensemble", "airbench_small", "airbench")
IMAGES, IMAGE_SIZE, SHORT, LONG = 60_000, 32, 2, 12
ANEW = "move the folder away to begin anew"


def ablation() -> dict[str, list[str]]:
    """Return the commands: all ingredients first, then without each of them."""
    line = our_command("fashion-mnist")
    return {"nothing": line} | {name: [*line, *flags.split()] for name, flags in INGREDIENTS.items()}


def zoo() -> dict[str, list[str]]:
    """Return the commands, two for each model that needs no pretrained weights: a short training, and a longer one."""
    line = f"bash scripts/launch_distributed.sh {{}} ddp 2 64 {{}} --image-size {IMAGE_SIZE} --learning-rate 0.001"
    short = {name: shlex.split(line.format(name, SHORT)) for name in ZOO}
    return short | {long_name(name): shlex.split(line.format(name, LONG)) for name in ZOO}


def long_name(model_type: str) -> str:
    """Return the name of the variant that is the longer training of a model."""
    return f"{model_type} {LONG} epochs"


def ablation_table(study: dict[str, Any]) -> str:
    """Return the table: accuracy without each ingredient, and Welch's t-test of the difference."""
    whole = study["variants"][0]
    rows = [
        "| without | top-1, mean ± standard deviation | difference | p |",
        "| --- | --- | --- | --- |",
    ]
    for variant in study["variants"]:
        cells = [variant["name"], top1_cell(variant)]
        if variant is whole:
            cells += ["", ""]
        else:
            new, old = ([run["top1"] for run in side["runs"]] for side in (variant, whole))
            p = float(stats.ttest_ind(new, old, equal_var=False).pvalue)
            cells += [f"{100 * (statistics.mean(new) - statistics.mean(old)):+.2f}", f"{p:.2g}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def zoo_table(study: dict[str, Any]) -> str:
    """Return the table: parameters, accuracy of both trainings, and images/s of the short one with its machine."""
    rows = [
        f"| `<model>` | parameters | top-1, {SHORT} epochs | {LONG} epochs | images/s | on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    variants = {variant["name"]: variant for variant in study["variants"]}
    for name in ZOO:
        module = build_model(RunSettings(model_type=name), 10, IMAGE_SIZE).module
        size = f"{sum(p.numel() for p in module.parameters()) / 1e6:.1f} million"
        short, long = variants[name], variants[long_name(name)]
        accuracies = [top1_cell(variant) if variant["runs"] else "not trained" for variant in (short, long)]
        speed = f"{SHORT * IMAGES / short['summary']['seconds_median']:.0f}" if short["runs"] else ""
        rows.append(f"| {' | '.join([f'`{name}`', size, *accuracies, speed, short.get('machine', '')])} |")
    return "\n".join(rows)


class Study(NamedTuple):
    """What is trained, by which preset ('' for none), and where its table stands: between two comments of a page."""

    commands: Callable[[], dict[str, list[str]]]
    preset: str
    table: Callable[[dict[str, Any]], str]
    page: str


STUDIES = {
    "ablation": Study(ablation, "fashion-mnist", ablation_table, "docs/dev/records.md"),
    "zoo": Study(zoo, "", zoo_table, "docs/dev/models.md"),
}


def study_folder(name: str) -> Path:
    """Return the folder of a study's logs."""
    return RECORDS / "fashion-mnist" / name


def run_study(name: str, data: Path, seeds: int, only: Collection[str] = ()) -> None:
    """Train each variant, or only those named, with each seed that it lacks; the file is written after each run.

    Raises:
        UserError: for other versions, data, commands or values of the preset than before, another machine than a
            variant's, or a name of no variant.
    """
    folder = study_folder(name)
    file, commands = folder / "study.json", STUDIES[name].commands()
    if unknown := set(only) - commands.keys():
        raise UserError(f"--only {' '.join(sorted(unknown))}: no such variant; there are {', '.join(commands)}.")
    study: dict[str, Any] = {
        "date": today(),
        "versions": versions("torch", "torchvision", "timm", "deepspeed"),
        "data_sha256": file_sha256(data),
        "variants": [{"name": key, "command": shlex.join(words), "runs": []} for key, words in commands.items()],
    }
    if file.exists():
        begun = json.loads(file.read_text())
        if different := [key for key in ("versions", "data_sha256") if begun[key] != study[key]]:
            raise UserError(f"{file}: has other {', '.join(different)}; {ANEW}.")
        known = {variant["name"]: variant["command"] for variant in begun["variants"]}
        if changed := [key for key, words in commands.items() if known.get(key, "") not in ("", shlex.join(words))]:
            raise UserError(f"{file}: has another command for {', '.join(changed)}; {ANEW}.")
        begun["variants"] += [variant for variant in study["variants"] if variant["name"] not in known]
        study = begun
    folder.mkdir(parents=True, exist_ok=True)
    if STUDIES[name].preset:
        keep_preset(STUDIES[name].preset, folder, ANEW)
    for seed in range(seeds):
        for number, variant in enumerate(study["variants"]):
            if variant["name"] in (only or commands) and all(run["seed"] != seed for run in variant["runs"]):
                if variant.setdefault("machine", machine_name()) != machine_name():
                    raise UserError(f"{file}: {variant['name']} was trained on {variant['machine']}; go on there.")
                command = [*commands[variant["name"]], "--data", f"npz:{data}"]
                log = folder / f"{number}-{seed}.log"
                variant["runs"].append({"seed": seed, **train_ours(command, seed, log)})
                variant["summary"] = summary(variant["runs"])
                print(variant["name"], variant["runs"][-1], flush=True)
                file.write_text(json.dumps(study, indent=1) + "\n")


def write_study_table(name: str) -> None:
    """Replace the study's table in its page."""
    study = json.loads((study_folder(name) / "study.json").read_text())
    replace_between(ROOT / STUDIES[name].page, *marks(name), STUDIES[name].table(study))


def marks(name: str) -> tuple[str, str]:
    """Return the comments before and after the table."""
    return f"<!-- {name}: made by benchmarks/variants.py {name} --table -->", f"<!-- end of {name} -->"


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("variants", __doc__)
    parser.add_choice("study", [*STUDIES])
    add_data_and_seeds(parser, 5)
    parser.add_argument("--only", nargs="+", default=(), help="names of variants to train now, of those in the table")
    parser.add_argument("--table", action="store_true", help="only write the page again")
    given = parser.parse(words)
    if not given.data and not given.table:
        parser.error("give --data FILE, or --table")
    return given


def run(given: argparse.Namespace) -> int:
    """Train, unless only the page is asked for, and write the table."""
    if not given.table:
        run_study(given.study, given.data, given.seeds, given.only)
    write_study_table(given.study)
    return 0


def main() -> int:
    """Return the exit code."""
    return run_script("variants", parse, run)


if __name__ == "__main__":
    sys.exit(main())
