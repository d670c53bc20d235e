"""The way to a GPU without one: what waits for it, and how many kernels a step has, on pretended GPUs (README.md)."""

from __future__ import annotations

import json
import re

import pytest
import timm
import torch

from tests.gpu.pretended.client import CASES, EXPECTED, PretendedGpus, problems
from tests.gpu.pretended.garbage import NameIsGoneError, does, replace
from tests.gpu.pretended.library import CannotBuildError

MOST_KERNELS, MOST_RECORDED = 1.10, 0.15  # of timm's loop, a bare step; a CUDA graph is one
MOST_AT_START = 1.3  # of the bytes in use in a step
SLOW = re.compile(r"averaged|deepspeed fp16|workers|fsdp_stage3 torch 2 GPUs")


@pytest.fixture(scope="module")
def gpus():
    try:
        process = PretendedGpus()
    except CannotBuildError as reason:
        pytest.skip(f"no pretended GPU: {reason}")
    yield process
    process.close()


@pytest.fixture(scope="module")
def expected():
    return json.loads(EXPECTED.read_text())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if SLOW.search(case) else []) for case in CASES]
)
def test_a_training_waits_and_launches_as_the_table_says(case, gpus, expected):
    assert problems(gpus.train(case), expected[case]) == []


def test_only_what_must_waits(expected):
    """The table may be measured again, but not to allow this."""
    assert expected.keys() == CASES.keys()
    for case, step in expected.items():
        if "deepspeed" not in case:
            assert sum(step["waits"].values()) == ("fp16" in case), case


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("item_in_the_step", "faults.py: item_in_the_step.<locals>.reading.<locals>.read: 1.0, expected 0"),
        ("copy_that_is_not_pinned", "copies from or to memory that is not pinned: 2.0, expected 0"),
        ("labels_on_the_cpu", "Could not run 'aten::record_stream' with arguments from the 'CPU' backend"),
        ("labels_of_32_bits", "expected target dtype to be Long or Byte, but got Int"),
    ],
)
def test_a_planted_fault_is_found(fault, told, gpus, expected):
    case = "ddp torch plain"
    (found,) = problems(gpus.train(case, fault), expected[case])
    assert told in found


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_a_model_is_whole_on_no_gpu_while_a_run_starts(size, gpus):
    """Under ZeRO 3 on 4 GPUs, with Adam: a quarter of the weights and of the two moments of each."""
    with torch.device("meta"):
        network = timm.create_model(f"vit_{size}_patch16_224", num_classes=10, img_size=32)
    kept = 3 * sum(parameter.nbytes for parameter in network.parameters()) / 4
    flags = f"--model-type timm:vit_{size}_patch16_224 --strategy fsdp_stage3 --engine torch --batch-size 2"
    report = gpus.run("memory", gpus=4, flags=flags)
    assert "failure" not in report, report["failure"]
    assert kept < report["starting"] < MOST_AT_START * min(kept, report["training"])


@pytest.mark.parametrize("model_type", ["mobilenet", "timm:resnet50"])
def test_a_bare_step_has_hardly_more_kernels_than_timms(model_type, gpus):
    report = gpus.run("bare_step", model_type=model_type)
    assert "failure" not in report, report["failure"]
    assert report["ours"] <= MOST_KERNELS * report["timm"]
    assert report["recorded"] <= MOST_RECORDED * report["timm"]


def test_a_name_that_is_gone_is_told():
    with pytest.raises(NameIsGoneError, match=r"uses torch\.cuda\.gone, which is gone"):
        replace(torch.cuda, "gone", does(None))
