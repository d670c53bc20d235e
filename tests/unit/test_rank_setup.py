"""The set-up of a large run's ranks without the ranks: against arithmetic, and what has to be noticed."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from planning.machines import find_gpu
from planning.plan_command import parse, run
from planning.rank_setup import chosen_ranks, in_own_process, set_up_rank
from planning.setup_checks import RankSetUp, check_files, check_memory, check_order, check_parts
from training.data import data_options, load_data
from training.data.sampler import BatchPlan
from training.errors import UserError

WORDS = ["--dry-run", "--model-type", "basic_cnn", "--data", "fake", "--batch-size", "2"]
PLAN = BatchPlan(1000, 4, 2, 16, seed=0)


def set_up(*words):
    job = parse([*WORDS, *words], None).job
    data = load_data(data_options(job.config))
    return [in_own_process(set_up_rank, job, data, rank) for rank in range(job.ranks)]


@pytest.fixture(scope="module")
def fresh_process():
    """PyTorch computes no gradients in a process that is forked from one which did, as this one may have."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("words", [("native", "fsdp_stage2"), ("torch", "fsdp_stage3"), ("torch", "ddp")])
def test_the_parts_of_all_ranks_are_the_whole_state(words, fresh_process):
    flags = ["--engine", words[0], "--strategy", words[1], "--world", "3", "--gpus-per-node", "3"]
    found = fresh_process.submit(set_up, *flags).result()
    assert len(found) == 3
    assert check_parts(found, 3).verdict == "ok"
    assert sum(one.elements for one in found) == found[0].parameters
    # AdamW: weight and two moments in fp32; the buffers, in every file, and the files' headers are the rest.
    rest = sum(one.file_bytes for one in found) - 12 * found[0].parameters
    assert 0 < rest < 3 * 20_000
    assert check_parts(found[:2] + found[:1], 3).verdict == "wrong"


def test_a_run_of_1024_ranks(capsys):
    assert run(parse([*WORDS, "--world", "1024", "--engine", "native", "--images", "1281167"], None)) == 0
    printed = capsys.readouterr().out
    assert "ranks 0, 512, 1023 of 1024 on 128 machine(s), 2048 images a step" in printed
    assert "1281167 images in 626 steps of 2048, 0.1% padding" in printed
    assert "1025 files" in printed


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--world", "1001"], "--world 1001 is no multiple of 8 GPUs per machine: give 1000 or 1008"),
        (["--world", "0"], "--world '0': expected a whole number from 1 to 65536"),
        (["--world", "8", "--scale", "8..16"], "--dry-run sets one run up"),
        (["--world"], "--world: expected a whole number"),
        (["--world", "8", "--strategy", "fsdp"], "--strategy 'fsdp': expected ddp | fsdp_stage2"),
        (["--world", "8", "--gpuss", "x"], "unknown argument '--gpuss'"),
    ],
)
def test_a_mistake_is_one_line(words, answer):
    with pytest.raises(UserError, match=answer) as raised:
        parse([*WORDS, *words], None)
    assert "\n" not in str(raised.value)


def test_what_a_rank_refuses_is_refused():
    with pytest.raises(UserError, match="--engine native does not know --offload"):
        set_up("--world", "16", "--engine", "native", "--strategy", "fsdp_stage3", "--offload", "all")


def test_every_sample_is_counted():
    assert check_order(PLAN).verdict == "ok"
    twice = type("Twice", (BatchPlan,), {"micro_batch": lambda self, *key: BatchPlan.micro_batch(self, *key[:3], 0)})
    assert check_order(twice(**dataclasses.asdict(PLAN))).verdict == "wrong"
    much = check_order(dataclasses.replace(PLAN, num_samples=130))
    assert (much.verdict, much.cure[:15]) == ("warning", "--batch-size 4 ")


@pytest.mark.parametrize(("gigabytes", "verdict"), [(11, "ok"), (13, "wrong")])
def test_the_state_has_to_fit(gigabytes, verdict):
    found = RankSetUp(0, "native", {}, 10, 3, gigabytes * 10**9, 1000)
    assert check_memory([found], find_gpu("rtx3060")).verdict == verdict


def test_files_of_a_checkpoint():
    """Each has 1,000 bytes of buffers; the state itself is divided, however unevenly the chosen ranks have it."""
    boxes = {"weight": [(slice(0, 100), slice(0, 10))]}
    found = [RankSetUp(0, "torch", boxes, 50_000, 3, 0, 13_000), RankSetUp(1, "torch", {}, 50_000, 3, 0, 1000)]
    row = check_files(found, 64)
    assert row.found == "65 files, 1 kB to 13 kB each, 664 kB"
    assert check_files(found, 200_000).verdict == "wrong"


def test_the_ranks_that_are_set_up():
    assert chosen_ranks(4) == [0, 1, 2, 3]
    assert chosen_ranks(1024) == [0, 512, 1023]
