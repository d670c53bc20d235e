"""Part 2 of `run.py`: how fast is a step beside a plain loop and timm's, eager, compiled and with CUDA graphs?

python -m benchmarks.gpu.steps --seconds 290
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contestants import (
    COMPILED,
    DEEPSPEED,
    DEEPSPEED_STAGE3,
    OURS,
    OURS_COMPILED,
    OURS_EAGER,
    PLAIN,
    STAGE3,
    TIMM,
    TIMM_COMPILED,
)
from benchmarks.gpu.lines import attempt, emit
from benchmarks.gpu.measure import compare, make_batch, make_timed, release, synchronize
from benchmarks.gpu.options import Options, part_options
from zerovision.training.world.world import World, start_world, stop_world

EAGER = (OURS, OURS_EAGER, PLAIN, TIMM)
# Network, images, contestants; in order of worth.
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("timm:resnet50", 128, (OURS, TIMM, TIMM_COMPILED, OURS_COMPILED, PLAIN)),
    ("mobilenet", 128, (OURS, TIMM, TIMM_COMPILED, OURS_COMPILED, STAGE3, DEEPSPEED, DEEPSPEED_STAGE3)),
    ("timm:vit_small_patch16_224", 128, (OURS, TIMM, TIMM_COMPILED, OURS_COMPILED, STAGE3, DEEPSPEED_STAGE3)),
    ("efficientnet", 128, (OURS, TIMM, TIMM_COMPILED, OURS_COMPILED)),
    *((model, images, EAGER) for model, images in (("vgg", 128), ("cnn_lstm", 128), ("ensemble", 64))),
    *((model, 16, (OURS, OURS_EAGER, TIMM)) for model in ("mobilenet", "efficientnet", "vgg", "cnn_lstm", "ensemble")),
)
QUICK_IMAGES = 4
AUTOTUNED = "*.best_config"  # of PyTorch's compiler: which variant of a kernel was the fastest


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


def _seconds(action: Callable[[], Any], world: World, times: int = 10) -> float:
    action()
    synchronize(world)
    start = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(world)
    return (time.perf_counter() - start) / times


def cases_of(options: Options) -> list[tuple[str, int, tuple[str, ...]]]:
    """Return networks with numbers of images and contestants."""
    if options.is_quick:
        every = dict.fromkeys(name for _, _, names in CASES for name in names)
        return [(model, QUICK_IMAGES, (*every,)) for model in options.models or ("basic_cnn",)]
    return [case for case in CASES if not options.models or case[0] in options.models]


def compiled_models(options: Options) -> list[str]:
    """Return the networks that are compiled."""
    return [model for model, _, names in cases_of(options) if not set(COMPILED).isdisjoint(names)]


def measure(case: tuple[str, int, tuple[str, ...]], options: Options, world: World, deadline: float) -> None:
    """Emit a row of each contestant."""
    model, images, names = case
    for row in compare(names, model, images, options.effort, world, deadline):
        emit("steps", model=model, batch_size=images, pixels=options.effort.image_size, **row)


def only_compile(case: tuple[str, int, tuple[str, ...]], options: Options, world: World) -> None:
    """Take the first steps of the compiled contestants."""
    model, images, names = case
    for name in names:
        if name in COMPILED:
            make_timed(name, model, make_batch(options.effort, images, world), options.effort, world)
            print(f"{model}: {name} is compiled", flush=True)


def main() -> None:
    """Give each case its share of the time that is left."""
    options = part_options(__doc__)
    world = start_world()
    cases = cases_of(options)
    if options.only_compile:
        for case in cases:
            only_compile(case, options, world)
        return
    for file in Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "nowhere")).rglob(AUTOTUNED):
        file.unlink()
    attempt("rates", partial(rates, options, world), options.deadline)
    for number, case in enumerate(cases):
        # Compiling takes tens of seconds: the first cases may take three shares.
        share = 3 * (options.deadline - time.monotonic()) / (len(cases) - number + 2)
        end = time.monotonic() + share
        attempt(f"{case[0]}, {case[1]} images", partial(measure, case, options, world, end), options.deadline)
        release(world)
    stop_world()


if __name__ == "__main__":
    main()
