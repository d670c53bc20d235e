"""Makes run folders by hand, with numbers that a test can add up in its head."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from zerovision.training.base.files import write_json
from zerovision.training.config import TrainConfig

START = 1_700_000_000.0
STEPS_PER_EPOCH, EPOCHS = 20, 2
GLOBAL_BATCH = 32  # 16 per rank, 2 ranks
SHARES = {"data": 0.25, "forward": 0.75}


def step(number: int, seconds: float, steps: int = 10, *, at: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A logging point after `steps` steps that took so many seconds."""
    return {
        "kind": "step",
        "time": START + at,
        "epoch": (number - 1) // STEPS_PER_EPOCH + 1,
        "step": number,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "total_steps": EPOCHS * STEPS_PER_EPOCH,
        "loss": 4 / number,
        "learning_rate": 0.001,
        "seconds": seconds,
        "images_per_second": steps * GLOBAL_BATCH / seconds,
        "gradient_norm": 2.0,
        "time_shares": SHARES,
        "memory_bytes": 1000,
    } | changes


def epoch(number: int, top1: float, *, at: float = 0.0, **changes: Any) -> dict[str, Any]:
    """The line of an epoch whose evaluation took half a second."""
    return {
        "kind": "epoch",
        "time": START + at,
        "epoch": number,
        "step": number * STEPS_PER_EPOCH,
        "epochs": EPOCHS,
        "train_loss": 1.0 / number,
        "train_top1": top1,
        "val_loss": 2.0 / number,
        "val_top1": top1,
        "val_top5": 1.0,
        "val_samples": 10,
        "best_by": "top1",
        "score": top1,
        "evaluation_seconds": 0.5,
        "memory_bytes_per_rank": [3000, 2000 + number],
    } | changes


def event(kind: str, at: float, number: int, **values: Any) -> dict[str, Any]:
    """Any other line."""
    return {"kind": kind, "time": START + at, "step": number} | values


def end(number: int, seconds: float, *, at: float = 0.0) -> dict[str, Any]:
    """The last line of a process."""
    values = {"seconds": seconds, "evaluation_seconds": 0.5, "images_per_second": 100.0, "time_shares": SHARES}
    return event("end", at, number, **values, memory_bytes=1000, memory_bytes_per_rank=[3000, 2500])


RESTARTED = [
    step(10, 1.0, at=1),
    step(20, 1.0, at=2),
    epoch(1, 0.5, at=2.5),
    event("checkpoint", 3, 20, name="step-1", stall_seconds=0.25, seconds=0.5),
    step(30, 2.0, at=5),
    event("checkpoint", 5, 30, name="step-2", stall_seconds=9.0, seconds=0.5),
    event("resume", 12, 20, checkpoint="step-1", restarts=1),
    step(30, 1.0, at=13, loss=0.25),
    event("slow_rank", 13, 30, rank=1, host="node", step_seconds=0.4, others_step_seconds=0.2),
    event("wrong_gradient", 13, 32, ranks=[0, 1], hosts=["node", "other"], parameters=["stem.weight", "head.bias"]),
    event("skipped_step", 13.5, 35, in_row=1, culprit="the loss", samples=["a.png"]),
    step(40, 1.0, at=14, loss=0.125),
    epoch(2, 0.75, at=14.5),
    end(40, 2.5, at=15),
]


def make_scores(class_names: Sequence[str], worst: int = 2) -> dict[str, Any]:
    """An evaluation in which every class has 3 images, one of which is taken for the next class."""
    classes = [
        {"name": name, "support": 3, "predicted": 3, "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3}
        for name in class_names
    ]
    number = len(classes)
    cells = [
        [true, said, 2 if true == said else 1] for true in range(number) for said in sorted({true, (true + 1) % number})
    ]
    return {
        "epoch": 2,
        "samples": 3 * number,
        "loss": 0.5,
        "top1": 2 / 3,
        "top5": 1.0,
        "ece": 0.125,
        "macro": {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3},
        "weighted": {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3},
        "classes": classes,
        "calibration": [
            {"lower": 0.0, "upper": 0.5, "samples": 0, "confidence": None, "accuracy": None},
            {"lower": 0.5, "upper": 1.0, "samples": 3 * number, "confidence": 0.75, "accuracy": 2 / 3},
        ],
        "confusion": cells,
        "worst": [
            {
                "index": place,
                "name": f"images/{place}.png",
                "label": place % number,
                "prediction": (place + (place < worst)) % number,
                "confidence": 0.875,
                "loss": 2.0,
            }
            for place in range(worst + 1)
        ],
        "typical": [
            {"index": 7, "name": "images/7.png", "label": 0, "prediction": 0, "confidence": 1.0, "loss": 0.0},
        ],
    }


def make_run(
    folder: Path,
    lines: Sequence[dict[str, Any]] | None = RESTARTED,
    *,
    class_names: Sequence[str] | None = ("cat", "dog", "cow"),
    worst: int = 2,
    command: str = "scripts/train_distributed.py --epochs 2",
    **settings: Any,
) -> Path:
    """Write a run's folder; `lines` None leaves metrics.jsonl out, `class_names` None the evaluation."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", dataclasses.asdict(TrainConfig(epochs=EPOCHS, **settings)))
    environment = {
        "command": command,
        "ranks": 2,
        "precision": "fp32",
        "packages": {"torch": "2.15.0"},
        "memory_bytes": 8_000_000_000,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if class_names is not None:
        (folder / "evaluation" / "worst").mkdir(parents=True)
        scores = make_scores(class_names, worst)
        (folder / "evaluation" / "scores.json").write_text(json.dumps(scores))
        pixels = np.random.default_rng(0).integers(0, 256, (len(scores["worst"]), 128, 128, 3), dtype=np.uint8)
        for number, picture in enumerate(pixels):
            Image.fromarray(picture).save(folder / "evaluation" / "worst" / f"{number:03d}.png")
        (folder / "evaluation" / "typical").mkdir()
        for name in ("typical/000", "typical/000-why", "worst/000-why"):
            Image.fromarray(pixels[0] // 2).save(folder / "evaluation" / f"{name}.png")
    return folder
