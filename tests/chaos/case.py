"""The trainings that are broken into: their command lines, and what can be seen of them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.damage import manifests
from tests.chaos.processes import LAUNCH_MARK, MARK, kill_all

ROOT = Path(__file__).resolve().parents[2]
MODEL = "basic_cnn"  # BatchNorm and dropout
DIVIDED_MODEL = "timm:test_vit"  # of which a tensor group can divide the layers
RANKS = (1, 2, 4)  # of a launch: the bytes are promised for any number
GLOBAL_BATCH = 64
EPOCHS = 4  # 92 optimizer steps on 1,437 digits
STRATEGIES = ("ddp", "fsdp_stage2", "fsdp_stage3")
RECIPES = {
    "plain": "",
    "images": "--augmentation shift_flip --mirror alternate --shift-pixels auto:reflect --random-erasing 0.3 "
    "--mixup 0.4 --cutmix 1 --mixup-probability 0.7 --sampling balanced:3",
    "weights": "--optimizer adan --loss bce --schedule wsd --ema 0.9 --lookahead 3 --layer-decay 0.8",
}
# What a recipe has for one network alone: a ViT has one size of images.
OF_MODEL = {
    MODEL: {"images": "--progressive-size 16:1:3"},
    DIVIDED_MODEL: dict.fromkeys(RECIPES, "--drop-path 0.1"),
}
RUN = "run"
STOP_SECONDS = 40
HANG_SECONDS = 8
ORACLE_SECONDS = 300
SURVIVAL_FLAGS = (
    *("--save-every-steps", "3", "--keep-last", "3", "--resume", "auto"),
    *("--max-restarts", "1000", "--hang-timeout", str(HANG_SECONDS)),
)
# What would change a launch: another launch's variables, or the user's choices.
DROPPED_VARIABLES = {"MASTER_PORT", "DRY_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", LAUNCH_MARK}


class OracleError(Exception):
    """An uninterrupted training failed: there is nothing to compare with."""


@dataclass(frozen=True)
class Case:
    """What differs between the trainings."""

    strategy: str
    micro_batches: int  # of a step, over all ranks
    workers: int
    engine: str = "torch"
    image_size: int = 32  # pixels
    recipe: str = "plain"
    pipeline: int = 1  # ranks of a pipeline, if a launch has as many: no byte depends on it
    tensor: int = 1  # ranks of a tensor group: the bytes are its own

    def __str__(self) -> str:
        how = f"{self.micro_batches} micro-batches, workers {self.workers}, engine {self.engine}, recipe {self.recipe}"
        how += f", pipelines of {self.pipeline}" if self.pipeline > 1 else ""
        how += f", tensor groups of {self.tensor}" if self.tensor > 1 else ""
        return f"{self.strategy}, {how}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that a launch may have for the same bytes; the first is the oracle's."""
        return tuple(ranks for ranks in RANKS if not ranks % self.tensor) if self.engine == "torch" else (2,)

    @property
    def oracle(self) -> Case:
        """The case whose uninterrupted run has to give the same bytes: stages 2 and 3 agree."""
        strategy = self.strategy if self.strategy == "ddp" or self.engine == "deepspeed" else "fsdp_stage2"
        return replace(self, strategy=strategy, workers=0, pipeline=1)

    def start(self, ranks: int, mark: str, log_dir: Path, output: Path, *flags: str) -> subprocess.Popen:
        """Start the launcher; it appends to the file `output`.

        Args:
            ranks: to start.
            mark: given to every process in its environment.
            log_dir: the run lies in `log_dir`/runs/run.
            output: gets standard output and standard error.
            flags: added to the training's flags.
        """
        pipeline = min(self.pipeline, ranks // self.tensor)
        batch_size = GLOBAL_BATCH // self.micro_batches
        accumulation = self.micro_batches * pipeline * self.tensor // ranks
        model = MODEL if self.tensor == 1 else DIVIDED_MODEL
        words = ["bash", "scripts/launch_distributed.sh", model, self.strategy, ranks, batch_size, EPOCHS]
        words += ["--learning-rate", 0.01, "--gradient-accumulation-steps", accumulation, "--engine", self.engine]
        words += ["--pipeline-parallel", pipeline, "--tensor-parallel", self.tensor]
        words += ["--image-size", self.image_size, "--workers", self.workers, "--log-every-steps", 1]
        words += ["--log-dir", log_dir, "--run-name", RUN, *RECIPES[self.recipe].split(), *flags]
        words += OF_MODEL[model].get(self.recipe, "").split()
        kept = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        changes = {
            MARK: mark,
            "STOP_TIMEOUT": str(STOP_SECONDS),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # bytes are promised on CPU
            "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        }
        with output.open("ab") as file:
            return subprocess.Popen(
                [str(word) for word in words],
                cwd=ROOT,
                env=kept | changes,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the harness, which ends the launch itself
            )


def make_case(number: int) -> Case:
    """Return the case of a training, from 0: all strategies with all recipes in 9.

    A quarter of them trains with DeepSpeed, under all strategies within 12 and with all recipes within 14. Every second
    one under ddp has pipelines. One in 8 has tensor groups, under all strategies and with all recipes within 19.
    """
    engine = "deepspeed" if number % 4 == 1 else "torch"
    return Case(
        STRATEGIES[number % 3],
        micro_batches=4 << number // 9 % 2,
        workers=(number + number // 18) % 2,
        engine=engine,
        recipe=list(RECIPES)[(number + number // 3) % 3],
        pipeline=2 if number % 6 == 0 else 1,
        tensor=2 if number % 8 == 2 else 1,
    )


def run_folder(log_dir: Path) -> Path:
    """Return where the run lies."""
    return log_dir / "runs" / RUN


def run_oracle(case: Case, folder: Path) -> Path:
    """Run a training to its end, without faults and saves in mid-epoch; return the run's folder.

    Raises:
        OracleError: where it fails, or takes too long.
    """
    mark = uuid.uuid4().hex
    folder.mkdir(parents=True)
    output = folder / "output.log"
    try:
        code = case.start(case.ranks[0], mark, folder / "logs", output).wait(timeout=ORACLE_SECONDS)
    except subprocess.TimeoutExpired:
        raise OracleError(
            f"the uninterrupted training ({case}) took over {ORACLE_SECONDS} s:\n{tail(output)}"
        ) from None
    finally:
        kill_all(mark)
    if code:
        raise OracleError(f"the uninterrupted training ({case}) ended with {code}:\n{tail(output)}")
    return run_folder(folder / "logs")


def tail(output: Path, lines: int = 25) -> str:
    """Return the last lines of a file, without what is blank."""
    text = output.read_text(encoding="utf-8", errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


class Watch:
    """What a run's files say about how far it is."""

    def __init__(self, run: Path) -> None:
        self._metrics = run / "metrics.jsonl"
        self.checkpoints = run / "checkpoints"

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps in metrics.jsonl, in the order written; a line cut off by a kill or a full disk is none."""
        entries = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict) and entry.get("kind") == "step"]

    def last_save(self) -> float:
        """Return the wall-clock time of the newest manifest, in seconds; 0 before the first."""
        newest = 0.0
        for manifest in manifests(self.checkpoints):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, manifest.stat().st_mtime)
        return newest

    def last_progress(self) -> float:
        """Return the wall-clock time of the newest line or manifest, in seconds; 0 before the first."""
        return max([self.last_save(), *(entry["time"] for entry in self.steps()[-1:])])

    def position(self) -> str:
        """Say how far the run is."""
        steps = self.steps()
        return f"step {steps[-1]['step']}" if steps else "the start"
