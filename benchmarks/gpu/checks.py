"""Part 1 of `run.py`: is the GPU path right? All at once, and the compiler's work for the next part beside it.

python -m benchmarks.gpu.checks --seconds 150
"""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu.lines import attempt, emit
from benchmarks.gpu.options import ROOT, Options, part_options
from benchmarks.gpu.steps import compiled_models
from benchmarks.launch import run
from benchmarks.peers.job import mean_cross_entropy
from benchmarks.report import hardware, results_folder, today, versions
from zerovision.models.build import build_model
from zerovision.training.base.settings import RunSettings
from zerovision.training.world.world import World, start_world, stop_world

FAMILIES = ("mobilenet", "efficientnet", "vgg", "cnn_lstm", "ensemble")
PIXELS, IMAGES, CLASSES = 64, 8, 10
KILLED_AT_STEP = 20
DIGITS = "--data digits --epochs 6 --batch-size 32 --deterministic true --save-every-steps 10"
QUIET = "--progress off --tensorboard false --report false"
TRIALS = {
    "ddp, bf16": "--strategy ddp --precision bf16",
    "fsdp_stage3, bf16": "--strategy fsdp_stage3 --precision bf16",
    "ddp, fp16": "--strategy ddp --precision fp16",
    "ddp, bf16, compiled": "--strategy ddp --precision bf16 --compile on",
}
QUICK_TRIALS = {"ddp, bf16": TRIALS["ddp, bf16"]}
CPUS_PER_COMPILER = "3"
TESTS = ("tests/gpu/test_gpu_engines.py",)


def family(model: str, world: World) -> None:
    """Emit how far logits and gradient in bf16 on the device are from those in fp32 on the CPU, without dropout."""
    torch.manual_seed(0)
    reference = build_model(RunSettings(model_type=model), CLASSES, PIXELS).module
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


def killed_and_resumed(model: str, trial: str) -> None:
    """Emit whether runs that were killed and resumed, or done otherwise, end with an undisturbed run's bytes."""
    flags = ["--model-type", model, *TRIALS[trial].split()]
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = {"whole": _train(folder, "whole", flags)}
        killed = _train(folder, "killed", flags)
        if "compiled" in trial:
            undisturbed["again"] = _train(folder, "again", flags)
        elif "ddp" in trial:  # of stage 3 nothing is recorded
            undisturbed["without-graphs"] = _train(folder, "without-graphs", [*flags, "--compile", "off"])
        while killed.poll() is None and _newest_step(Path(folder, "runs", "killed")) < KILLED_AT_STEP:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        at, code = _newest_step(Path(folder, "runs", "killed")), killed.wait()
        codes = {"killed": code, "resumed": _train(folder, "killed", [*flags, "--resume", "auto"]).wait()}
        codes |= {name: process.wait() for name, process in undisturbed.items()}
        names = ("whole", "killed", *list(undisturbed)[1:])
        weights = [Path(folder, "runs", name, "model.safetensors").read_bytes() for name in names]
    equal = {name: found == weights[0] for name, found in zip(names[1:], weights[1:], strict=True)}
    emit("resume", model=model, trial=trial, codes=codes, killed_after_step=at, equal_bytes=equal)


def _train(folder: str, name: str, flags: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "scripts/train_distributed.py", *DIGITS.split(), "--log-dir", folder, "--run-name", name]
    return subprocess.Popen([*command, *QUIET.split(), *flags], cwd=ROOT)


def _newest_step(run: Path) -> int:
    steps = [0]
    metrics = run / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        entry = json.loads(line)
        steps += [entry["step"]] if entry["kind"] == "checkpoint" else []
    return steps[-1]


def run_tests(deadline: float) -> None:
    """Run the small tests marked `gpu` until the deadline, and emit how they ended."""
    log = results_folder() / "gpu_tests.log"
    command = [sys.executable, "-u", "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", *TESTS]
    with log.open("w") as output:
        try:
            seconds = max(deadline - time.monotonic(), 1)
            code = subprocess.run(
                command, cwd=ROOT, timeout=seconds, stdout=output, stderr=output, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = log.read_text().splitlines() or [""]
    emit("tests", exit_code=code, last_line=lines[-1])


def compile_ahead(model: str, options: Options) -> None:
    """Let PyTorch's compiler keep what the next part needs; what it chose on a busy GPU is chosen again there."""
    command = [sys.executable, "-m", "benchmarks.gpu.steps", "--only-compile", "--models", model]
    threads = f"TORCHINDUCTOR_COMPILE_THREADS={CPUS_PER_COMPILER}"
    run(["env", threads, *command], timeout_s=options.deadline - time.monotonic())


def main() -> None:
    """Do all side by side: nothing is timed here."""
    options = part_options(__doc__)
    deadline = options.deadline
    emit("facts", hardware=hardware(), date=today(), versions=versions("torch", "torchvision", "deepspeed", "timm"))
    trials = QUICK_TRIALS if options.is_quick else TRIALS
    model = options.models[0] if options.models else "mobilenet"
    with ThreadPoolExecutor(16) as pool:
        for trial in trials:
            action = partial(killed_and_resumed, model, trial)
            pool.submit(attempt, f"{model}, {trial}, killed and resumed", action, deadline)
        pool.submit(attempt, "tests", partial(run_tests, deadline), deadline)
        for name in () if options.is_quick else compiled_models(options):
            pool.submit(attempt, f"compiling {name} ahead", partial(compile_ahead, name, options), deadline)
        world = start_world()
        for name in options.models or FAMILIES:
            attempt(f"{name} in bf16 against fp32 on the CPU", partial(family, name, world), deadline)
        stop_world()


if __name__ == "__main__":
    main()
