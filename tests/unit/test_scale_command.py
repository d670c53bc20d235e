"""`plan.py --scale` from its command line to its table."""

from __future__ import annotations

import dataclasses
import json

import pytest

from planning.machines import find_machine
from planning.plan_command import parse, run
from planning.scale_command import what_the_batch_does
from planning.scaling import ScaleJob, ScalePoint
from training.config import TrainConfig
from training.errors import UserError

WORDS = ["--model-type", "mobilenet", "--gpu", "h100-80gb", "--image-size", "64", "--scale", "8..64"]


def test_the_table_and_the_json_have_the_same_numbers(capsys):
    assert run(parse(WORDS, None)) == 0
    table = capsys.readouterr().out
    assert run(parse([*WORDS, "--json"], None)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in printed["points"]] == [8, 16, 32, 64]
    efficiencies = [point["efficiency"] for point in printed["points"]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert all(f"{share:.1%}" in table for share in efficiencies)
    assert printed["verdict"] in table
    assert printed["batch"] in table


def test_the_global_batch_grows_with_the_gpus_and_the_learning_rate_as_asked():
    """16 images per GPU, or 16 x 4: so many on 8 GPUs, eight times as many on 64."""
    point = ScalePoint(8, 0, *[1.0] * 10)
    for settings, steps, said in (
        ({}, 1, "from 128 to 1,024; the learning rate stays 0.001, unless --base-batch-size 128 scales it"),
        ({"base_batch_size": 256}, 1, "from 128 to 1,024; the learning rate grows with it (--base-batch-size 256)"),
        (
            {"learning_rate": "auto"},
            4,
            "keeps its 16 images x 4, so the global batch grows from 512 to 4,096; --learning",
        ),
    ):
        job = ScaleJob(
            "torch", "ddp", 10**6, find_machine("h100", 8), 16, 1.0, 1.0, 1.0, 10**6, accumulation_steps=steps
        )
        points = [dataclasses.replace(point, global_batch=16 * steps * ranks) for ranks in (8, 64)]
        assert said in what_the_batch_does(TrainConfig(**settings), job, points)
        assert what_the_batch_does(TrainConfig(), job, points[:1]) == f"the global batch is {128 * steps} images"


def test_more_failures_lose_more(capsys):
    lost = []
    for rate in ("0.001", "0.1"):
        run(parse([*WORDS, "--failures-per-gpu-day", rate, "--json"], None))
        lost.append([point["lost_share"] for point in json.loads(capsys.readouterr().out)["points"]])
    assert all(many > few > 0 for few, many in zip(*lost, strict=True))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--scale", "8-64"], "give FIRST..LAST"),
        (["--scale", ""], "give FIRST..LAST"),
        (["--scale", "8..64", "--gpuu", "x"], "--gpuu"),
    ],
)
def test_a_mistake_is_one_line(words, answer):
    with pytest.raises(UserError, match=answer):
        parse([*WORDS[:-2], *words], None)
