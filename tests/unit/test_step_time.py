"""The estimate of time against closed forms, published speeds and what is known of volumes; the planner's table."""

from __future__ import annotations

import dataclasses
import json

import pytest

from zerovision.planning.machines import Interconnect, find_machine
from zerovision.planning.plan_command import parse, read_counts, run
from zerovision.planning.plan_output import what_the_batch_does
from zerovision.planning.run_workload import workload_of
from zerovision.planning.search import PlannedJob, evaluate, step_of
from zerovision.planning.step_time import ADAMW_PASSES, GPU, MESSAGE_BYTES, estimate_step, exposed_s
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.engines.strategies import ParallelPlan, plan_of

LINK = Interconnect("made-up", 1e-5, 1e9, "", achieved_share=1)
MACHINE = dataclasses.replace(find_machine("h100", 8), inside=LINK, between=dataclasses.replace(LINK, latency_s=2e-5))
PUBLISHED = [  # images/s in training, as the docstring of zerovision/planning/step_time.py says
    ("rtx3090", "timm:mobilenetv3_large_100", 2732),
    ("rtx3090", "timm:mobilenetv2_100", 2313),
    ("rtx3090", "timm:efficientnet_b0", 1752),
    ("rtx3090", "timm:vgg16", 546),
    ("rtx3090", "timm:resnet50", 1218),
    ("a100-80gb", "timm:efficientnet_b0", 2489),
    ("a100-80gb", "timm:resnet50", 2470),
    ("h100-80gb", "timm:resnet50", 2790),
]
MEASURED = [  # on an H200, under ddp, 128 images: benchmarks/results/gpu_nvidia-h200_2026-11-27.md
    ("mobilenet", 17537),
    ("timm:resnet50", 4482),
    ("timm:vit_small_patch16_224", 5521),
    ("efficientnet", 4832),
]
OTHERS = [one for one in PUBLISHED if one != PUBLISHED[1]]


@pytest.mark.parametrize(
    ("gpu", "model", "images_per_s"), [PUBLISHED[1], *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_within_what_the_docstring_says_of_published_speeds(gpu, model, images_per_s):
    assert -0.26 < off(gpu, model, 256, images_per_s) < 0.78


@pytest.mark.parametrize(
    ("model", "images_per_s"), MEASURED[:1] + [pytest.param(*one, marks=pytest.mark.slow) for one in MEASURED[1:]]
)
def test_within_what_the_docstring_says_of_measured_speeds(model, images_per_s):
    assert -0.045 < off("h200-141gb", model, 128, images_per_s) < 0.035


def off(gpu, model, batch_size, images_per_s):
    config = TrainConfig(model_type=model, batch_size=batch_size)
    job = PlannedJob(config, find_machine(gpu, 1), 1, 1000, 224, 0)
    return step_of(job, config, plan_of("ddp", 1)).step_s * images_per_s / batch_size - 1


def test_a_rank_alone_takes_its_closed_form():
    config = TrainConfig(model_type="basic_cnn", batch_size=64)
    workload, gpu = workload_of(config, 10, 32), MACHINE.gpu
    found = estimate_step(workload, MACHINE, plan_of("ddp", 1), config, "bf16", 10**9)
    operations_s = GPU.operations * workload.flops_per_image * 64 / gpu.peaks["bf16"]
    traffic_s = GPU.traffic * 10**9 / gpu.bandwidth_bytes_per_s
    assert found.compute_s == pytest.approx(operations_s + traffic_s + workload.layers * GPU.layer_s)
    assert found.update_s == pytest.approx(ADAMW_PASSES * 4 * workload.sizes.trained / gpu.bandwidth_bytes_per_s)
    assert found.exchange_s == 0
    more = dataclasses.replace(config, gradient_accumulation_steps=4, activation_checkpointing=True)
    again = estimate_step(workload, MACHINE, plan_of("ddp", 1), more, "bf16", 10**9, compute_scale=2.0)
    assert again.compute_s == pytest.approx(found.compute_s * 4 * 4 / 3 * 2)
    assert again.update_s == pytest.approx(2 * found.update_s)


@pytest.mark.parametrize(
    ("stage", "ranks", "micro_steps", "seconds"),
    [
        # 2 or 3 times the parameters, of which a ring leaves a rank's own part out: ZeRO, section 7.
        (1, 8, 4, 2 * 7 / 8 * 4 + 2 * 160 * 3 * 1e-5),
        (3, 8, 1, 3 * 7 / 8 * 4 + 3 * 160 * 3 * 1e-5),
        (3, 8, 2, 5 * 7 / 8 * 4 + 5 * 160 * 3 * 1e-5),
        (2, 2, 1, 2 * 1 / 2 * 4 + 2 * 160 * 1 * 1e-5),
        # Four machines of 8: no faster than inside one, and the ports of 8 GPUs between them.
        (1, 32, 1, 2 * 31 / 32 * 4 + 2 * 160 * 5 * 2e-5),
    ],
)
def test_an_exchange_that_nothing_hides_is_volume_over_bandwidth(stage, ranks, micro_steps, seconds):
    size = 160 * MESSAGE_BYTES
    found = exposed_s(MACHINE, ParallelPlan(stage, shards=ranks), size, micro_steps, 0.0)
    assert found == pytest.approx(seconds * size / 4e9, rel=0.02)


def test_computation_hides_all_but_a_message():
    plan, size = ParallelPlan(1, shards=8), 10 * MESSAGE_BYTES
    alone = exposed_s(MACHINE, plan, size, 1, 0.0)
    assert exposed_s(MACHINE, plan, size, 1, alone * 3 / 4) == pytest.approx(alone / 2)
    assert exposed_s(MACHINE, plan, size, 1, 100.0) == pytest.approx(alone / 20)
    assert exposed_s(MACHINE, ParallelPlan(1, shards=1), size, 1, 0.0) == 0


WORDS = ["--model-type", "basic_cnn", "--gpu", "h100-80gb", "--image-size", "64", "--scale", "8..64"]


def test_the_table_and_the_json_have_the_same_numbers(capsys):
    assert run(parse(WORDS, None)) == 0
    table = capsys.readouterr().out
    assert run(parse([*WORDS, "--json"], None)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in printed["points"]] == [8, 16, 32, 64]
    efficiencies = [point["efficiency"] for point in printed["points"]]
    assert 1 > efficiencies[0] > efficiencies[-1] > 0
    assert all(f"{share:.1%}" in table for share in efficiencies)
    assert printed["batch"] in table
    assert printed["error"] in table


def test_the_global_batch_grows_with_the_gpus_and_the_learning_rate_as_asked():
    """16 images per GPU, or 16 x 4: so many on 8 GPUs, eight times as many on 64."""
    for settings, steps, said in (
        ({}, 1, "from 128 to 1,024; the learning rate stays 0.001, unless --base-batch-size 128 scales it"),
        ({"base_batch_size": 256}, 1, "from 128 to 1,024; the learning rate grows with it (--base-batch-size 256)"),
        (
            {"learning_rate": "auto"},
            4,
            "keeps its 16 images x 4, so the global batch grows from 512 to 4,096; --learning",
        ),
    ):
        config = TrainConfig(**settings, gradient_accumulation_steps=steps)
        assert said in what_the_batch_does(config, 128 * steps, 1024 * steps)
        assert what_the_batch_does(config, 128, 128) == "the global batch is 128 images"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--scale", "8-64"], "give FIRST..LAST"),
        (["--scale", ""], "give FIRST..LAST"),
        (["--scale", "8..64", "--gpuu", "x"], "--gpuu"),
        (["--measure"], "--measure trains on this machine: leave --gpu out"),
    ],
)
def test_a_mistake_is_one_line(words, answer):
    with pytest.raises(UserError, match=answer):
        parse([*WORDS[:-2], *words], None)


@pytest.mark.parametrize(
    ("text", "counts"), [("8..4096", [8 << n for n in range(10)]), ("3..20", [3, 6, 12, 20]), ("5", [5]), ("4..4", [4])]
)
def test_numbers_of_gpus(text, counts):
    assert read_counts(text) == counts


def test_a_measured_step_takes_the_place_of_the_estimated_one(monkeypatch, capsys):
    """Three times as long as estimated, whatever the number of ranks; the exchange stays."""
    words = ["--model-type", "basic_cnn", "--num-gpus", "2", "--image-size", "32", "--batch-size", "4", "--json"]
    request = parse(words, None)
    estimated = evaluate(request.job, request.job.config).step
    monkeypatch.setattr("zerovision.planning.step_time.STEPS", 2)
    assert run(parse([*words, "--measure"], None)) == 0
    best = json.loads(capsys.readouterr().out)
    assert best["compute_scale"] > 0
    expected = best["compute_scale"] * (estimated.compute_s + estimated.update_s) + estimated.exchange_s
    assert best["recommended"]["step_s"] == pytest.approx(expected)
