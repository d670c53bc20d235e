"""Saving and going on: bit for bit on any number of ranks, under any strategy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from tests.training.checkpoint_ranks import DropoutNet
from training.base.errors import CANNOT_SAVE_EXIT_CODE, TOO_MANY_BAD_STEPS_EXIT_CODE
from training.checkpoint.manifest import read_manifest
from training.checkpoint.shards import CheckpointReader
from training.engines.build_engine import ENGINES
from training.engines.strategies import STRATEGIES

RANKS = "tests.training.checkpoint_ranks"
WORLDS = (1, 2, 4)
LEAVES = 4  # of a step
CHANNELS = {False: 3, True: 1}  # of the images, without and with BatchNorm
MIDDLE = "step-00000-0000002"  # two of three steps of the first epoch
MATRIX = [*product(STRATEGIES, WORLDS, STRATEGIES, WORLDS)]
CULPRITS = ("image", "loss", "gradient")


class Launches:
    """Runs cases on ranks, and holds the folder of their checkpoints."""

    def __init__(self, run_on_ranks, folder) -> None:
        self.folder = folder
        self._run_on_ranks = run_on_ranks

    def run(self, function: str, world_size: int, cases: list[dict]) -> list[list]:
        """Return result [case][rank]."""
        ranks = self._run_on_ranks(f"{RANKS}:{function}", world_size, cases)
        return [list(case) for case in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def launches(run_on_ranks, tmp_path_factory):
    return Launches(run_on_ranks, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def whole_runs(launches):
    """{(strategy, world size, with BatchNorm): every rank's report}; their checkpoints of every step stay."""
    runs = {}
    for world_size in WORLDS:
        keys = [*product(STRATEGIES, (False, True))]
        cases = [
            {
                "folder": str(checkpoints_of(launches, strategy, world_size, norm)),
                "strategy": strategy,
                "with_batchnorm": norm,
                "image_channels": CHANNELS[norm],
            }
            for strategy, norm in keys
        ]
        for (strategy, norm), ranks in zip(keys, launches.run("train_whole", world_size, cases), strict=True):
            runs[strategy, world_size, norm] = ranks
    return runs


def checkpoints_of(launches, strategy, world_size, with_batchnorm):
    return launches.folder / f"{strategy}-{world_size}{'-norm' if with_batchnorm else ''}"


@pytest.fixture(scope="module")
def resumed_runs(launches, whole_runs):
    """{(saved strategy, saved world size, strategy, world size, with BatchNorm): every rank's report}."""
    runs = {}
    for world_size in WORLDS:
        keys = [key for key in product(STRATEGIES, WORLDS, STRATEGIES, (False, True)) if not key[3] or key[0] == key[2]]
        cases = [
            {
                "checkpoint": str(checkpoints_of(launches, saved, saved_size, norm) / MIDDLE),
                "folder": str(launches.folder / f"from-{saved}-{saved_size}-to-{strategy}-{world_size}-{norm}"),
                "strategy": strategy,
                "with_batchnorm": norm,
                "image_channels": CHANNELS[norm],
            }
            for saved, saved_size, strategy, norm in keys
        ]
        results = launches.run("resume_from", world_size, cases + (chain_of(launches) if world_size == 2 else []))
        if world_size == 2:
            runs["chain"] = results[-1]
        for (saved, saved_size, strategy, norm), ranks in zip(keys, results[: len(keys)], strict=True):
            runs[saved, saved_size, strategy, world_size, norm] = ranks
    return runs


def chain_of(launches):
    """One step under ddp, then one under each of fsdp_stage2, fsdp_stage3, ddp, from the checkpoint before."""
    folder, cases = checkpoints_of(launches, "ddp", 2, False), []
    for number, strategy in enumerate(("fsdp_stage2", "fsdp_stage3", "ddp")):
        place = f"step-{number // 2:05d}-{(1, 2, 1)[number]:07d}"  # after 1, 2 and 4 of 6 steps
        cases.append({"checkpoint": str(folder / place), "strategy": strategy})
        folder = launches.folder / f"chain-{number}"
        cases[-1]["folder"] = str(folder)
    return cases


def alike(strategy):
    """Return a strategy that gives the bytes of this one: stages 2 and 3 are FSDP2, whose weights lie otherwise."""
    return "ddp" if strategy == "ddp" else "fsdp_stage2"


def assert_same_steps(resumed, whole, steps):
    assert resumed["losses"] == {step: whole["losses"][step] for step in steps}
    assert resumed["weights"] == whole["weights"]
    assert (resumed["samples"], resumed["train_loss"]) == (45, whole["train_loss"])


def assert_near(resumed, whole, steps, largest_difference):
    np.testing.assert_allclose(
        [resumed["losses"][step] for step in steps], [whole["losses"][step] for step in steps], atol=1e-5
    )
    assert largest_difference(resumed["weights"], whole["weights"]) < 1e-5
    assert resumed["samples"] == 45


@pytest.mark.parametrize(("strategy", "world_size", "norm"), [*product(STRATEGIES, WORLDS, (False, True))])
def test_any_number_of_ranks_trains_the_same_bytes(strategy, world_size, norm, whole_runs):
    for report in whole_runs[strategy, world_size, norm]:
        assert_same_steps(report, whole_runs[alike(strategy), 1, norm][0], ["1", "2", "3", "4", "5", "6"])


@pytest.mark.parametrize(("saved", "saved_size", "strategy", "world_size"), MATRIX)
def test_a_run_goes_on_under_any_strategy_on_any_number_of_ranks(
    saved, saved_size, strategy, world_size, whole_runs, resumed_runs, largest_difference
):
    """Bit for bit, except from ddp to stages 2 and 3 and back."""
    for norm in (False, True)[: 1 + (saved == strategy)]:
        for report in resumed_runs[saved, saved_size, strategy, world_size, norm]:
            if alike(saved) == alike(strategy):
                assert_same_steps(report, whole_runs[alike(saved), 1, norm][0], ["3", "4", "5", "6"])
            else:
                assert_near(report, whole_runs["ddp", 1, norm][0], ["3", "4", "5", "6"], largest_difference)


def test_three_changes_of_strategy_in_one_training(whole_runs, resumed_runs, largest_difference):
    assert_near(resumed_runs["chain"][0], whole_runs["ddp", 2, False][0], ["5", "6"], largest_difference)


@pytest.mark.parametrize(("strategy", "world_size"), [*product(STRATEGIES, WORLDS)])
def test_the_content_of_a_checkpoint_does_not_depend_on_the_ranks(strategy, world_size, launches, whole_runs):
    assert whole_runs, "they have written the checkpoints"
    contents = []
    for other, ranks in ((alike(strategy), 1), (strategy, world_size)):
        folder = checkpoints_of(launches, other, ranks, True) / MIDDLE
        reader = CheckpointReader(folder, read_manifest(folder))
        tensors = {(kind, name): tensor for kind in reader.tensors for name, tensor in reader.tensors[kind].items()}
        buffers = [reader.buffers(leaf, LEAVES, 1) for leaf in range(LEAVES)]
        contents.append({"sums": reader.epoch_sums(0, 100), **tensors, **dict(enumerate(buffers))})
    first, second = contents
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(second[key], first[key], atol=0, rtol=0, msg=str(key))


@pytest.fixture(scope="module")
def frozen_runs(launches):
    """{(strategy, engine): every rank's report of a whole run and of a resumed one}; the convolution is frozen."""
    keys = [*product(STRATEGIES, ENGINES)]
    folders = [launches.folder / f"frozen-{strategy}-{engine}" for strategy, engine in keys]
    shared = [{"strategy": strategy, "engine": engine, "is_frozen": True} for strategy, engine in keys]
    whole = launches.run("train_whole", 2, [case | {"folder": str(f)} for case, f in zip(shared, folders, strict=True)])
    places = [{"checkpoint": str(folder / MIDDLE), "folder": f"{folder}-resumed"} for folder in folders]
    # Another engine's checkpoint on another number of ranks, and their own on as many.
    alone = launches.run(
        "resume_from", 1, [shared[n] | places[n - 1] | {"folder": f"{folders[n]}-1"} for n in range(len(keys))]
    )
    same = launches.run("resume_from", 2, [case | place for case, place in zip(shared, places, strict=True)])
    return dict(zip(keys, zip(whole, same, alone, strict=True), strict=True))


@pytest.mark.parametrize(("strategy", "engine"), [*product(STRATEGIES, ENGINES)])
def test_frozen_parameters_are_rank_0s_are_saved_and_come_back(strategy, engine, frozen_runs, largest_difference):
    whole, same, alone = frozen_runs[strategy, engine]
    torch.manual_seed(0)
    frozen = DropoutNet(with_batchnorm=False).convolution.weight
    for report in (*whole, *same, *alone):
        assert np.array_equal(report["weights"]["convolution.weight"], frozen.double().tolist())
    for expected, resumed in zip(whole, same, strict=True):
        assert resumed["weights"] == expected["weights"]
        assert resumed["losses"] == {step: loss for step, loss in expected["losses"].items() if int(step) > 2}
    assert largest_difference(alone[0]["weights"], whole[0]["weights"]) < 1e-5
    assert np.ptp(list(whole[0]["losses"].values())) > 0.01, "the head must have moved for this to mean anything"


@pytest.fixture(scope="module")
def tuned_runs(launches):
    """{(strategy, engine): every rank's report of a run with adapters, of its resumption, and on one rank}."""
    keys = [*product(("ddp", "fsdp_stage3"), ENGINES)]
    folders = [launches.folder / f"tuned-{strategy}-{engine}" for strategy, engine in keys]
    shared = [
        {"strategy": strategy, "engine": engine, "tuning": "lora:2", "with_batchnorm": True}
        for strategy, engine in keys
    ]
    whole = launches.run("train_whole", 2, [case | {"folder": str(f)} for case, f in zip(shared, folders, strict=True)])
    places = [{"checkpoint": str(folder / MIDDLE), "folder": f"{folder}-resumed"} for folder in folders]
    same = launches.run("resume_from", 2, [case | place for case, place in zip(shared, places, strict=True)])
    torchs = [shared[keys.index((strategy, "torch"))] for strategy, _ in keys]
    alone = launches.run(
        "resume_from", 1, [case | p | {"folder": f"{f}-1"} for case, p, f in zip(torchs, places, folders, strict=True)]
    )
    return dict(zip(keys, zip(whole, same, alone, strict=True), strict=True))


@pytest.mark.parametrize(("strategy", "engine"), [*product(("ddp", "fsdp_stage3"), ENGINES)])
def test_adapters_go_on_under_every_engine_and_all_else_stays(strategy, engine, tuned_runs, largest_difference):
    whole, same, alone = tuned_runs[strategy, engine]
    torch.manual_seed(0)
    untouched = DropoutNet(with_batchnorm=True)
    kept = {
        name.replace("convolution.", "convolution.base_layer."): tensor.double().tolist()
        for name, tensor in untouched.state_dict().items()
        if not name.startswith("head")
    }
    for report in (*whole, *same, *alone):
        assert {name: report["weights"][name] for name in kept} == kept
    for expected, resumed in zip(whole, same, strict=True):
        assert resumed["weights"] == expected["weights"]
        assert resumed["losses"] == {step: loss for step, loss in expected["losses"].items() if int(step) > 2}
    assert np.any(whole[0]["weights"]["convolution.lora_B.default.weight"])
    assert largest_difference(alone[0]["weights"], whole[0]["weights"]) <= (0 if engine == "torch" else 1e-5)


@pytest.mark.parametrize(
    ("strategy", "replicate_across"), [("ddp", "none"), *product(("fsdp_stage2", "fsdp_stage3"), ("none", "nodes"))]
)
def test_torchs_runs_go_on_with_the_same_bytes_on_4_ranks_and_1(
    strategy, replicate_across, launches, whole_runs, largest_difference
):
    """With rows that 4 do not divide, in one copy, in two of two ranks each, and in four."""
    folder = launches.folder / f"torch-{strategy}-{replicate_across}"
    own = {"strategy": strategy, "engine": "torch", "replicate_across": replicate_across}
    (whole,) = launches.run("train_whole", 4, [own | {"folder": str(folder)}])
    place = {"checkpoint": str(folder / MIDDLE)}
    (same,) = launches.run("resume_from", 4, [own | place | {"folder": f"{folder}-resumed"}])
    ((alone,),) = launches.run("resume_from", 1, [own | place | {"folder": f"{folder}-1", "replicate_across": "none"}])
    assert [report["weights"] for report in (*same, alone)] == [whole[0]["weights"]] * 5
    assert all(same[0]["losses"][step] == whole[0]["losses"][step] for step in same[0]["losses"])
    assert largest_difference(whole[0]["weights"], whole_runs["ddp", 1, False][0]["weights"]) < 1e-5


def test_averages_of_the_weights_go_on_bit_for_bit(launches):
    """From 2 ranks to 1 and 4 under PyTorch's engine, and to 2 ranks under DeepSpeed, whose sums depend on the ranks.

    From the step of a pull to the slow weights, which are every second, and from those beside it.
    """
    engines = [
        ("torch", "ddp", "adamw"), ("deepspeed", "fsdp_stage3", "adamw"), ("torch", "fsdp_stage2", "adamw"),
        ("torch", "ddp", "muon"),
    ]  # fmt: skip
    shared = [
        {"strategy": strategy, "engine": engine, "optimizer": rule, "is_averaged": True, "with_batchnorm": True}
        for engine, strategy, rule in engines
    ]
    folders = [launches.folder / f"averaged-{engine}-{rule}" for engine, _, rule in engines]
    whole = launches.run("train_whole", 2, [case | {"folder": str(f)} for case, f in zip(shared, folders, strict=True)])
    for world_size, step in ((1, 1), (2, 1), (2, 2), (4, 2), (1, 4)):
        place = f"step-{step // 3:05d}-{step % 3:07d}"
        kept = [number for number, case in enumerate(shared) if world_size == 2 or case["engine"] == "torch"]
        cases = [
            shared[n] | {"checkpoint": str(folders[n] / place), "folder": f"{folders[n]}-{step}-to-{world_size}"}
            for n in kept
        ]
        for number, ranks in zip(kept, launches.run("resume_from", world_size, cases), strict=True):
            for report in ranks:
                assert_same_steps(report, whole[number][0], [str(later) for later in range(step + 1, 7)])
    names = whole[0][0]["weights"].keys()
    assert {"ema head.weight", "slow_weights head.weight", "average/norm.running_var"} < names


def test_the_runs_mean_something(whole_runs):
    losses = whole_runs["ddp", 1, False][0]["losses"]
    assert np.ptp(list(losses.values())) > 0.02


@pytest.mark.parametrize(("strategy", "saved_size", "world_size"), [*product(STRATEGIES, WORLDS, WORLDS)])
def test_every_leaf_goes_on_with_its_own_statistics(strategy, saved_size, world_size, resumed_runs):
    own, resumed = (
        [leaf for rank in resumed_runs[strategy, saved_size, strategy, size, True] for leaf in leaves_of(rank)]
        for size in (saved_size, world_size)
    )
    assert len(own) == LEAVES
    assert own == resumed
    assert len({str(leaf) for leaf in own}) == LEAVES, "each leaf saw other samples"


def leaves_of(report):
    return report["resumed_buffers"]["norm.running_mean"]


POISONED = [
    *product(STRATEGIES, ("fp32",), (0.0, 0.5), CULPRITS),
    *product(STRATEGIES, ("bf16", "fp16"), (0.0,), CULPRITS),
]
LIMITED = ("ddp", "fp32", 0.0, "image")


@pytest.fixture(scope="module")
def poisoned_runs(launches):
    """{(strategy, precision, clipping, culprit): every rank's report}, and under `None` one with --max-bad-steps 1."""
    names = ("strategy", "precision", "clipping", "culprit")
    cases = [
        dict(zip(names, key, strict=True)) | {"folder": str(launches.folder / f"poisoned-{number}")}
        for number, key in enumerate([*POISONED, LIMITED])
    ]
    cases[-1]["most_bad_steps"] = 1
    return dict(zip([*POISONED, None], launches.run("poisoned", 2, cases), strict=True))


@pytest.mark.parametrize(("strategy", "precision", "clipping", "culprit"), POISONED)
def test_a_bad_step_leaves_no_trace_on_any_rank(strategy, precision, clipping, culprit, poisoned_runs):
    """Weights, BatchNorm's statistics and the count of updates stay, and the samples are named."""
    ranks = poisoned_runs[strategy, precision, clipping, culprit]
    for report in ranks:
        assert report["unchanged"] is True
        assert report["ended"] is None
        assert all(np.isfinite(values).all() for values in report["weights"].values())
        assert np.isfinite(report["train_loss"])
    main = ranks[0]
    if culprit == "gradient" and precision == "fp16":
        assert not any(event["kind"] == "skipped_step" for event in main["events"]), "the search for a loss scale"
        assert main["skipped"] == 1
        return
    events = [event for event in main["events"] if event["kind"] == "skipped_step"]
    # The broken image comes once an epoch; the broken loss and gradient came once.
    assert len(events) == main["skipped"] == (2 if culprit == "image" else 1)
    assert events[0]["culprit"].split()[1] == culprit
    assert events[0]["in_row"] == 1
    assert sum("skipped on all ranks" in message for message in main["messages"]) == len(events)
    assert len(events[0]["samples"]) == {"image": 1, "loss": 8, "gradient": 16}[culprit]


def test_too_many_bad_steps_end_the_run(poisoned_runs):
    for report in poisoned_runs[None]:
        message, code = report["ended"]
        assert code == TOO_MANY_BAD_STEPS_EXIT_CODE
        assert message.startswith("1 steps in a row were skipped")
        assert "\n" not in message


def test_a_full_disk_on_one_rank_costs_checkpoints_and_for_ten_minutes_the_run(launches):
    cases = [
        {"folder": str(launches.folder / f"full-{full_rank}"), "strategy": "fsdp_stage2", "full_rank": full_rank}
        for full_rank in range(2)
    ]
    for full_rank, reports in enumerate(launches.run("save_on_full_disk", 2, cases)):
        for report in reports:
            assert report["after_failure"] == ["last", "step-00000-0000001"]
            assert report["after_success"] == ["last", "step-00000-0000001", "step-00000-0000003"]
            assert report["at_end"] == report["after_success"]
            assert report["last"].strip() == "step-00000-0000003"
            assert report["ended"][1] == CANNOT_SAVE_EXIT_CODE
            failed = [event for event in report["events"] if event["kind"] == "checkpoint_failed"]
            assert [event["step"] for event in failed] == [2, 4, 5, 6]
            assert all(f"rank {full_rank}" in event["error"] and "too large" in event["error"] for event in failed)
            assert any("the next try comes within" in message for message in report["messages"])
