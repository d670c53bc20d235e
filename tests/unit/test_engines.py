"""Which engine a run gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.compilation import FASTER_ON, compile_mode, resolve_compile
from training.engines import resolve_engine
from training.errors import UserError
from training.strategies import STRATEGIES, engine_config, read_strategy_json

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL, LARGE = 1000, 60_000_000  # weights; the JSON files' buckets hold 50,000,000


def configuration(strategy="ddp", offload="none", **changes):
    json = read_strategy_json(strategy) | changes
    return engine_config(json, batch_size_per_rank=1, accumulation_steps=1, gradient_clipping=0, offload=offload)


def model(parameters):
    with torch.device("meta"):
        return nn.Linear(parameters, 1, bias=False)


@pytest.mark.parametrize(
    ("strategy", "parameters", "device", "expected"),
    [
        ("ddp", SMALL, CPU, "native"),
        ("ddp", LARGE, CPU, "native"),
        ("fsdp_stage2", SMALL, CPU, "native"),
        ("fsdp_stage2", LARGE, CPU, "deepspeed"),
        ("fsdp_stage3", SMALL, CPU, "native"),
        ("fsdp_stage3", LARGE, CPU, "deepspeed"),
        *((strategy, SMALL, GPU, "deepspeed") for strategy in STRATEGIES),
    ],
)
def test_auto_takes_the_native_engine_where_it_was_measured(strategy, parameters, device, expected):
    assert resolve_engine("auto", configuration(strategy), model(parameters), device) == expected


@pytest.mark.parametrize(
    "config",
    [
        configuration("fsdp_stage3", offload="all"),
        configuration(flops_profiler={"enabled": True}),
    ],
    ids=["offload", "a key of DeepSpeed's own"],
)
def test_what_only_deepspeed_does_goes_to_deepspeed(config):
    assert resolve_engine("auto", config, model(SMALL), CPU) == "deepspeed"
    with pytest.raises(
        UserError, match=r"--engine native does not know (flops_profiler|offload_optimizer|offload_param)"
    ):
        resolve_engine("native", config, model(SMALL), CPU)


@pytest.mark.parametrize("engine", ["deepspeed", "native"])
def test_the_users_word_holds(engine):
    assert resolve_engine(engine, configuration(), model(LARGE), GPU) == engine


@pytest.mark.parametrize("device", [CPU, GPU])
def test_compile_is_as_asked_and_auto_follows_the_measurements(device):
    assert resolve_compile("on", device)
    assert not resolve_compile("off", device)
    assert resolve_compile("auto", device) == (device.type in FASTER_ON)


def test_compile_without_a_compiler_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"--compile on: needs a C\+\+ compiler"):
        resolve_compile("on", CPU)
    assert not resolve_compile("auto", CPU)


def test_small_batches_on_a_gpu_take_cuda_graphs():
    assert compile_mode(GPU, 16) == "reduce-overhead"
    assert compile_mode(GPU, 64) is None
    assert compile_mode(CPU, 16) is None
