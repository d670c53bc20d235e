"""Part 1 of `run.py`: is the GPU path right, and how fast is a step beside a plain loop and timm's?

python -m benchmarks.gpu.smoke --seconds 170
"""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.contestants import MAKERS
from benchmarks.gpu.lines import attempt, emit
from benchmarks.gpu.measure import compare, release, synchronize
from benchmarks.gpu.options import ROOT, Options, part_options
from benchmarks.peers.job import mean_cross_entropy
from benchmarks.report import hardware, today, versions
from models.build import build_model
from training.world.world import World, start_world, stop_world

FAMILIES = ("mobilenet", "efficientnet", "vgg", "cnn_lstm", "ensemble")
QUICK_FAMILIES = ("mobilenet", "cnn_lstm")
MODELS = ("mobilenet", "timm:resnet50", "timm:vit_small_patch16_224")
PIXELS, IMAGES, CLASSES = 64, 8, 10
KILLED_AT_STEP = 20
DIGITS = "--model-type basic_cnn --data digits --epochs 10 --batch-size 32 --deterministic true --save-every-steps 10"


def rates(options: Options, world: World) -> None:
    """Emit what the card reaches: copies within it and to it, and products of matrices."""
    side, bytes_ = (8192, 1 << 30) if world.device.type == "cuda" else (512, 1 << 24)
    matrix = torch.randn(side, side, device=world.device).bfloat16()
    ours, other = (torch.zeros(bytes_ // 4, device=world.device) for _ in range(2))
    host = torch.zeros(bytes_ // 4, pin_memory=world.device.type == "cuda")
    product_s = _seconds(lambda: matrix @ matrix, world)
    copy_s = _seconds(lambda: ours.copy_(other), world)
    upload_s = _seconds(lambda: ours.copy_(host, non_blocking=True), world)
    emit("rates", tflops_bf16=2 * side**3 / product_s / 1e12, copy_gb_s=2 * bytes_ / copy_s / 1e9)
    emit("rates", upload_gb_s=bytes_ / upload_s / 1e9)


def _seconds(action: Any, world: World, times: int = 10) -> float:
    action()
    synchronize(world)
    start = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(world)
    return (time.perf_counter() - start) / times


def family(model: str, world: World) -> None:
    """Emit how far logits and gradient in bf16 on the device are from those in fp32 on the CPU, without dropout."""
    torch.manual_seed(0)
    reference = build_model(model, num_classes=CLASSES, image_size=PIXELS).module
    for module in reference.modules():
        for name in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    module = copy.deepcopy(reference).to(world.device, memory_format=torch.channels_last)
    images, labels = torch.randn(IMAGES, 3, PIXELS, PIXELS), torch.arange(IMAGES) % CLASSES
    logits, gradient = _step(reference, images, labels)
    with torch.autocast(world.device.type, dtype=torch.bfloat16):
        found_logits, found_gradient = _step(module, images.to(world.device), labels.to(world.device))
    emit(
        "family",
        model=model,
        logits_error=float((found_logits - logits).norm() / logits.norm()),
        gradient_cosine=float(nn.functional.cosine_similarity(found_gradient, gradient, dim=0)),
        gradient_ratio=float(found_gradient.norm() / gradient.norm()),
    )


def _step(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and the whole gradient in fp32 on the CPU."""
    logits = module(images)
    mean_cross_entropy(logits, labels).backward()
    parts = [
        parameter.grad.float().reshape(-1).cpu() for parameter in module.parameters() if parameter.grad is not None
    ]
    return logits.detach().float().cpu(), torch.cat(parts)


def throughput(model: str, options: Options, world: World, deadline: float) -> None:
    """Emit the contestants' images/s at 128 images of 224 pixels, in turns."""
    batch_size = 4 if options.is_quick else 128
    for row in compare([*MAKERS], model, batch_size, options.effort, world, deadline):
        emit("throughput", model=model, batch_size=batch_size, pixels=options.effort.image_size, **row)


def killed_and_resumed() -> None:
    """Emit whether a run on digits that was killed and resumed ends with the bytes of one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _train(folder, "whole").wait()
        killed = _train(folder, "killed")
        while killed.poll() is None and _newest_step(Path(folder, "runs", "killed")) < KILLED_AT_STEP:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        at, code = _newest_step(Path(folder, "runs", "killed")), killed.wait()
        resumed = _train(folder, "killed", "--resume", "auto").wait()
        weights = [Path(folder, "runs", name, "model.safetensors").read_bytes() for name in ("whole", "killed")]
    equal = weights[0] == weights[1]
    emit("resume", codes=[whole, code, resumed], killed_after_step=at, equal_bytes=equal)


def _train(folder: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "scripts/train_distributed.py", *DIGITS.split(), "--log-dir", folder, "--run-name", name]
    quiet = ["--progress", "off", "--tensorboard", "false", "--report", "false"]
    return subprocess.Popen([*command, *quiet, *flags], cwd=ROOT)


def _newest_step(run: Path) -> int:
    steps = [0]
    metrics = run / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        entry = json.loads(line)
        steps += [entry["step"]] if entry["kind"] == "checkpoint" else []
    return steps[-1]


def main() -> None:
    """Do all in order of worth."""
    options = part_options(__doc__)
    deadline = options.deadline
    emit("facts", hardware=hardware(), date=today(), versions=versions("torch", "torchvision", "deepspeed", "timm"))
    attempt("digits, killed and resumed", killed_and_resumed, deadline)
    world = start_world()
    attempt("rates", partial(rates, options, world), deadline)
    for model in options.models or (QUICK_FAMILIES if options.is_quick else FAMILIES):
        attempt(f"{model} in bf16 against fp32 on the CPU", partial(family, model, world), deadline)
    release(world)
    models = options.models or MODELS[: 1 if options.is_quick else None]
    for number, model in enumerate(models):
        end = time.monotonic() + (deadline - time.monotonic()) / (len(models) - number)
        attempt(f"throughput of {model}", partial(throughput, model, options, world, end), deadline)
        release(world)
    stop_world()


if __name__ == "__main__":
    main()
