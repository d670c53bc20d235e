"""Supervised contrastive training, then a head, beside cross-entropy at the same cost; several seeds of each.

    python benchmarks/contrast.py npz:fashion-mnist.npz --seeds 5
    python benchmarks/contrast.py memory        # of a step with and without --gradient-cache

Both train the same network on the same images, equally augmented. An epoch of `--loss supcon` costs what one of
cross-entropy does, and three of the frozen network's head about one: so features have an epoch less. The lines of a
seed follow each other. benchmarks/results gets the table, with what was run on what.

`memory` takes steps on one rank in processes that may have so much data and no more, as `ulimit -d` sets it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory import MALLOC
from benchmarks.memory_rank import Peak, resident_bytes
from benchmarks.our_engine import make_engine
from benchmarks.report import RESULTS, Section, hardware, machine_name, save, show, today, versions
from zerovision.models.build import build_model
from zerovision.training.base.timing import SpanClock
from zerovision.training.config.command_line import OneLineParser, run_script
from zerovision.training.data.reader import Batch
from zerovision.training.out_of_memory import is_out_of_memory
from zerovision.training.recipe.loss import EMBEDDING_SIZE
from zerovision.training.steps.accumulate import StepInput, TimedEngine
from zerovision.training.steps.gradient_cache import GradientCache
from zerovision.training.world.world import World

ROOT = Path(__file__).resolve().parents[1]
MODEL, RANKS, BATCH_SIZE, HEAD_EPOCHS = "airbench_small", 2, 128, 3
SHARED = "--workers 0 --tensorboard false --report false --progress off --augmentation shift_flip"
CROSS_ENTROPY = "--learning-rate 0.004 --label-smoothing 0.1"
FEATURES = "--learning-rate 0.004 --loss supcon"
HEAD = "--learning-rate 0.03 --tune head"
SMALL_MODEL, PIXELS, CLASSES, FEW, MANY, DATA_BYTES = "mobilenet", 64, 10, 128, 32 * 128, 3 * 10**9


def train(log_dir: Path, name: str, epochs: int, same: list[str], recipe: str) -> dict[str, Any]:
    """Train one line; return the last epoch's top-1 and the seconds of all epochs."""
    start = ["bash", "scripts/launch_distributed.sh", MODEL, "ddp", str(RANKS), str(BATCH_SIZE), str(epochs)]
    subprocess.run(
        [*start, *SHARED.split(), *same, *recipe.split(), "--log-dir", str(log_dir), "--run-name", name],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = (log_dir / "runs" / name / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    ends = [event for event in events if event["kind"] == "epoch"]
    return {"top1": ends[-1]["val_top1"], "seconds": round(sum(event["seconds"] for event in ends), 1)}


def one_seed(data: str, epochs: int, seed: int) -> dict[str, dict[str, Any]]:
    """Train all lines with one seed; return their scores by column of the table."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir, same = Path(folder), ["--data", data, "--seed", str(seed)]
        ours = train(log_dir, "cross-entropy", epochs, same, CROSS_ENTROPY)
        features = train(log_dir, "features", epochs - 1, same, FEATURES)
        weights = log_dir / "runs" / "features" / "model.safetensors"
        head = train(log_dir, "head", HEAD_EPOCHS, [*same, "--weights", str(weights)], HEAD)
    head["seconds"] = round(head["seconds"] + features["seconds"], 1)
    return {"cross-entropy": ours, "supcon, 20 neighbours": features, "supcon, head": head}


def table(study: dict[str, Any]) -> str:
    """Return the table: top-1 of the last epoch, mean and sample standard deviation, and seconds of training."""
    rows = ["| training | top-1 | seconds, median |", "|---|---|---|"]
    for name in study["runs"][0]["scores"]:
        scores = [run["scores"][name] for run in study["runs"]]
        top1 = [100 * score["top1"] for score in scores]
        deviation = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        seconds = statistics.median(score["seconds"] for score in scores)
        rows.append(f"| {name} | {statistics.mean(top1):.2f}{deviation} % | {seconds:.0f} |")
    return "\n".join(rows)


class KeptByGraphs:
    """The most bytes that graphs have kept for backward, each storage once, without the weights'."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
        self._uses: Counter[int] = Counter()
        self._bytes = self.most = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context whose graphs count."""

        class Saved:
            def __init__(saved, tensor: torch.Tensor) -> None:
                saved.tensor = tensor
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._weights:
                    self._change(storage.data_ptr(), storage.nbytes(), 1)
                    weakref.finalize(saved, self._change, storage.data_ptr(), storage.nbytes(), -1)

        return torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor)

    def _change(self, storage: int, size: int, uses: int) -> None:
        if self._uses[storage] == (uses < 0):  # the first use begins, or the last one ends
            self._bytes += uses * size
        self._uses[storage] += uses
        self.most = max(self.most, self._bytes)


def measure_step(images: int, chunk: int, limit: int) -> tuple[int, int] | None:
    """Take steps; return the bytes of a rank above those of its libraries, and of the graphs; None if they do not fit.

    Args:
        images: of a step.
        chunk: as of `--gradient-cache`; `images` for a step without it.
        limit: bytes of data that this process may have.
    """
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    alone = World(0, 0, 1, 1, torch.device("cpu"))
    start, _ = resident_bytes()
    module = build_model(SMALL_MODEL, num_classes=CLASSES, image_size=PIXELS, embedding=EMBEDDING_SIZE).module
    parts = images // chunk
    engine = TimedEngine(
        make_engine(module, "ddp", "fp32", chunk, alone, engine="torch", accumulation_steps=parts), SpanClock()
    )
    labels, weights = torch.arange(chunk) % CLASSES, torch.ones(chunk)
    batches = [
        Batch(
            torch.randn(chunk, 3, PIXELS, PIXELS).contiguous(memory_format=torch.channels_last), labels, weights, labels
        )
        for _ in range(parts)
    ]
    step, given = GradientCache(alone, 0.1, CLASSES), StepInput(batches, torch.manual_seed, 1 / images, lambda *_: None)
    graphs = KeptByGraphs(module)
    try:
        with graphs.hooks():
            step(engine, given)  # which also makes the optimizer's state
        with Peak(alone) as peak:
            step(engine, given)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return peak.bytes[0] - start, graphs.most


def memory() -> int:
    """Measure steps, each in a process of its own; print and save."""
    os.environ.update(MALLOC)
    rows, unlimited = [], resource.RLIM_INFINITY
    for images, chunk, limit in (
        *((FEW, FEW, DATA_BYTES), (MANY, FEW, DATA_BYTES)),
        *((MANY, MANY, DATA_BYTES), (MANY, MANY, unlimited)),
    ):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(measure_step, images, chunk, limit).result()
        cells = ["out of memory"] * 2 if found is None else [f"{size / 1e6:,.0f}" for size in found]
        allowed = "any" if limit == unlimited else f"{limit / 1e9:.0f} GB"
        rows.append((str(images), "" if images == chunk else f"--gradient-cache {chunk}", allowed, *cells))
        print(rows[-1], flush=True)
    text = (
        f"{SMALL_MODEL}, {PIXELS} pixels, AdamW, fp32, one rank with a thread, that may have so much data (`ulimit -d "
        f"{DATA_BYTES // 1024}`). MB (10^6 bytes): the rank's peak in its second step, without libraries, with the "
        "images; and the most that graphs kept for backward in its first, without weights."
    )
    section = Section("Memory of a step of --loss supcon", text, ("images", "flag", "allowed", "rank", "graphs"), rows)
    show(section)
    facts = f"{machine_name()}; {versions('torch', 'timm')}"
    command = "python benchmarks/contrast.py memory"
    save("contrast_memory", "Contrastive training in the memory of a chunk", facts, command, [section])
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("contrast", __doc__)
    parser.add_value("data", str, "text", help="as of --data of a training, or memory")
    parser.add_number("--epochs", 2, 1000, default=8, help="of cross-entropy (default: 8)")
    parser.add_number("--seeds", 1, 100, default=5, help="how many (default: 5)")
    return parser.parse(words)


def run(given: argparse.Namespace) -> int:
    """Train all seeds and write the file after each, so that a break keeps what is there."""
    if given.data == "memory":
        return memory()
    name = Path(given.data.rpartition(":")[2]).stem
    file = RESULTS / f"contrast_{name}_{hardware()}_{today()}.md"
    study: dict[str, Any] = {"runs": []}
    about = f"{MODEL}, {RANKS} ranks of {BATCH_SIZE} images, {given.epochs} epochs of cross-entropy; {machine_name()}"
    for seed in range(given.seeds):
        study["runs"].append({"seed": seed, "scores": one_seed(given.data, given.epochs, seed)})
        print(study["runs"][-1], flush=True)
        facts = f"{about}; {versions('torch', 'torchvision', 'timm')}"
        lines = ["# Contrastive training beside cross-entropy", f"{name}, {seed + 1} seed(s): {facts}.", table(study)]
        file.write_text("\n\n".join([*lines, f"```json\n{json.dumps(study['runs'])}\n```"]) + "\n")
    return 0


def main() -> int:
    """Return the exit code."""
    return run_script("contrast", parse, run)


if __name__ == "__main__":
    sys.exit(main())
