"""On a real GPU: `pytest -m gpu`. The same engine, launcher and checkpoints as on the CPU, in bf16 and in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from commands import ROOT, assert_success, launch, read_metrics
from ranks import Ranks, run_ranks
from safetensors.torch import load_file

from tests.gpu.gpu_ranks import TRAINABLE_MODELS
from zerovision.training.engines.build import ENGINES
from zerovision.training.engines.ways import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

STEPS = 6


@pytest.fixture(scope="module")
def bf16_steps(tmp_path_factory):
    """{(strategy, engine, model): what one step in bf16 did}; one process for all."""
    keys = [*product(STRATEGIES, ENGINES, TRAINABLE_MODELS)]
    cases = [{"strategy": strategy, "engine": engine, "model_type": model} for strategy, engine, model in keys]
    (results,) = run_ranks("tests.gpu.gpu_ranks:one_bf16_step", 1, tmp_path_factory.mktemp("bf16"), cases)
    return dict(zip(keys, results, strict=True))


@pytest.mark.parametrize("model", TRAINABLE_MODELS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_model_takes_a_step_in_bf16(strategy, engine, model, bf16_steps):
    step = bf16_steps[strategy, engine, model]
    assert step["device"] == "cuda"
    assert step["loss"] == pytest.approx(step["plain"], rel=0.05)
    assert step["not_finite"] == []
    assert step["unchanged"] == []


def test_fp32_losses_are_those_of_a_plain_loop_on_the_cpu(tmp_path):
    cases = [
        {"model_type": model, "strategy": strategy, "engine": engine, "steps": STEPS}
        for strategy, engine, model in product(STRATEGIES, ENGINES, ("basic_cnn", "mobilenet"))
    ]
    (results,) = run_ranks("tests.gpu.gpu_ranks:losses_beside_plain", 1, tmp_path, cases)
    for case, result in zip(cases, results, strict=True):
        assert result["device"] == "cuda"
        # Adam divides by the root of squared gradients: rounding grows with each step.
        assert result["ours"] == pytest.approx(result["plain"], rel=1e-2), case
        assert result["ours"][0] == pytest.approx(result["plain"][0], rel=1e-4), case


def test_fp32_is_fp32(tmp_path):
    """TF32, with 10 bits of mantissa, is off by 1e-4 and more; fp32 by rounding alone."""
    ((errors,),) = run_ranks("tests.gpu.gpu_ranks:fp32_errors", 1, tmp_path, [{}])
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """Run functions of gpu_ranks in one process; return what each case gave."""
    ranks = Ranks(1, tmp_path_factory.mktemp("gpu-ranks"))
    yield lambda function, cases: ranks.run(f"tests.gpu.gpu_ranks:{function}", cases)[0]
    ranks.close()


def test_accumulation_keeps_no_images(on_gpu):
    one, sixteen = on_gpu("peak_of_an_epoch", [{"accumulation": 1}, {"accumulation": 16}])
    bytes_of_a_batch = 64 * 3 * 64 * 64 * 4
    assert one > bytes_of_a_batch
    assert sixteen < one + 4 * bytes_of_a_batch


def test_an_epoch_takes_the_memory_of_the_epoch_before(on_gpu):
    """The allocator keeps what it gave to a stream for that stream alone."""
    (reserved,) = on_gpu("reserved_by_epochs", [{"epochs": 6}])
    assert reserved[1:] == reserved[1:2] * 5


def test_nothing_in_a_step_waits_for_the_gpu(on_gpu):
    assert on_gpu("steps_without_waits", [{"workers": 0}, {"workers": 1}]) == [8, 8]


def test_a_resumed_run_is_bit_identical_with_deterministic_algorithms(tmp_path):
    words = ["mobilenet", "ddp", "1", "32", "2", "--data", "fake", "--precision", "bf16", "--deterministic", "true"]
    words += ["--log-dir", str(tmp_path), "--log-every-steps", "1", "--tensorboard", "false"]
    words += ["--save-every-steps", "20", "--keep-last", "100"]
    assert_success(launch(*words, "--run-name", "whole"))
    middle = sorted((tmp_path / "runs" / "whole" / "checkpoints").glob("step-00000-*"))[0]
    assert_success(launch(*words, "--run-name", "resumed", "--resume", str(middle)))
    folders = [tmp_path / "runs" / name for name in ("whole", "resumed")]
    losses = [{line["step"]: line["loss"] for line in read_metrics(folder, "step")} for folder in folders]
    assert 0 < len(losses[1]) < len(losses[0])
    assert losses[1].items() <= losses[0].items()
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_is_judged_on_the_gpu_and_on_the_cpu(tmp_path):
    words = ["mobilenet", "ddp", "1", "32", "3", "--learning-rate", "0.004", "--tensorboard", "false"]
    assert_success(launch(*words, "--run-name", "digits", "--log-dir", str(tmp_path)))
    run = tmp_path / "runs" / "digits"
    for line in read_metrics(run, "step"):
        assert sum(line["time_shares"].values()) == pytest.approx(1.0)
        assert line["data_wait_share"] == line["time_shares"]["data"]
        assert line["gpu_utilization"] is None or 0 <= line["gpu_utilization"] <= 1
    own = json.loads((run / "evaluation" / "scores.json").read_text())
    judged = {}
    for name, environment, flags in (
        ("cuda", {}, ["--batch-size", "32"]),
        ("cuda-fp32", {}, ["--precision", "fp32"]),
        ("cpu", {"CUDA_VISIBLE_DEVICES": ""}, []),
    ):
        command = [sys.executable, "scripts/evaluate.py", str(run), "--output", str(tmp_path / name), *flags]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        judged[name] = json.loads((tmp_path / name / "scores.json").read_text())
    assert judged["cuda"]["precision"] == "bf16"
    assert judged["cuda"]["top1"] == pytest.approx(own["top1"], abs=1 / 360)
    assert judged["cuda-fp32"]["loss"] == pytest.approx(judged["cpu"]["loss"], rel=1e-4)
    assert judged["cpu"]["top1"] == pytest.approx(own["top1"], abs=4 / 360)
