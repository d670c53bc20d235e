"""A resumed run is the uninterrupted one: one table of engines, strategies, numbers of ranks and kill points."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.kit import assert_same_but_rounding
from tests.stored_tensors import whole_tensors
from tests.training.checkpoint_ranks import DropoutNet
from zerovision.training.checkpoint.manifest import read_manifest
from zerovision.training.checkpoint.shards import CheckpointReader
from zerovision.training.engines.build import ENGINES
from zerovision.training.engines.ways import STRATEGIES

RANKS = "tests.training.checkpoint_ranks"
WORLDS = (1, 2, 4)
LEAVES = 4  # of a step
STEPS_PER_EPOCH, STEPS = 3, 6
VARIANTS = {
    "plain": {},
    "batchnorm": {"with_batchnorm": True, "image_channels": 1},
    "replicated": {"replicate_across": "nodes"},  # two copies of two ranks each
    "frozen": {"is_frozen": True},
    "adapters": {"tuning": "lora:2", "with_batchnorm": True},
    "averages": {"is_averaged": True, "with_batchnorm": True},
    "contrastive": {"is_contrastive": True, "with_batchnorm": True},
    "members": {"members": 3, "is_averaged": True, "with_batchnorm": True},
    "averages of muon": {"is_averaged": True, "with_batchnorm": True, "optimizer": "muon"},
}


class Place(NamedTuple):
    """Where a part of a run trains."""

    engine: str
    strategy: str
    ranks: int
    stages: int = 1


class Row(NamedTuple):
    """A run with a checkpoint after each step, and one that goes on from it."""

    variant: str
    saved: Place
    step: int  # after which it was killed, of two epochs of three
    resumed: Place

    def __str__(self) -> str:
        places = ("-".join(map(str, place)) for place in (self.saved, self.resumed))
        return f"{self.variant} {f' {self.step} '.join(places)}"

    @property
    def is_exact(self) -> bool:
        """Whether the bytes must be the same: under our engine on any ranks, else in the same place alone.

        Stages 2 and 3 are FSDP2, whose weights lie otherwise than those of ddp.
        """
        ours = self.saved.engine == self.resumed.engine == "torch"
        return self.saved == self.resumed or (ours and alike(self.saved.strategy) == alike(self.resumed.strategy))


def alike(strategy: str) -> str:
    """Return a strategy that gives the bytes of this one."""
    return "ddp" if strategy == "ddp" else "fsdp_stage2"


def quick() -> Iterator[Row]:
    """Yield the rows of `make test`: each variant, each strategy, to fewer, as many and more ranks."""
    for strategy, (saved, resumed) in product(STRATEGIES, MOVES):
        yield Row("batchnorm", Place("torch", strategy, saved), 2, Place("torch", strategy, resumed))
    for saved, resumed in CHANGES:
        yield Row("plain", Place("torch", saved, 1), 2, Place("torch", resumed, 2))
    yield Row("replicated", Place("torch", "fsdp_stage3", 4), 2, Place("torch", "fsdp_stage3", 4))
    for place in PLACES:
        if place.strategy != "fsdp_stage2":
            yield Row("frozen", place, 2, place)
    for strategy in ("ddp", "fsdp_stage3"):
        yield Row("adapters", Place("torch", strategy, 2), 2, Place("torch", strategy, 1))
    yield Row("adapters", Place("deepspeed", "ddp", 2), 2, Place("torch", "ddp", 1))
    # From the step of a pull to the slow weights, which are every second, and from those beside it.
    for variant, strategy, ranks, step in (
        ("averages", "ddp", 1, 1),
        ("averages", "ddp", 2, 2),
        ("averages", "fsdp_stage2", 1, 4),
        ("averages of muon", "ddp", 1, 1),
    ):
        yield Row(variant, Place("torch", strategy, 2), step, Place("torch", strategy, ranks))
    yield Row("contrastive", Place("torch", "ddp", 2), 2, Place("torch", "ddp", 1))
    # A pipeline, kept in mid-epoch, that goes on whole.
    yield Row("batchnorm", Place("torch", "ddp", 2, 2), 2, Place("torch", "ddp", 1, 1))
    yield Row("members", Place("torch", "ddp", 2, 2), 2, Place("torch", "ddp", 1, 1))
    yield Row("averages", Place("deepspeed", "fsdp_stage3", 2), 1, Place("deepspeed", "fsdp_stage3", 2))


def slow() -> Iterator[Row]:
    """Yield all rows, also those of `make test`."""
    for strategy, saved, resumed in product(STRATEGIES, WORLDS, WORLDS):
        yield Row("batchnorm", Place("torch", strategy, saved), 2, Place("torch", strategy, resumed))
    for (saved, resumed), size, other in product(CHANGES, WORLDS, WORLDS):
        yield Row("plain", Place("torch", saved, size), 2, Place("torch", resumed, other))
    for strategy, ranks in product(("fsdp_stage2", "fsdp_stage3"), (4, 1)):
        yield Row("replicated", Place("torch", strategy, 4), 2, Place("torch", strategy, ranks))
    for number, place in enumerate(PLACES):
        yield Row("frozen", place, 2, place)
        yield Row("frozen", PLACES[number - 1], 2, place._replace(ranks=1))
        if place.strategy != "fsdp_stage2":
            yield Row("adapters", place, 2, place)
            yield Row("adapters", place, 2, Place("torch", place.strategy, 1))
    for strategy, (ranks, step) in product(("ddp", "fsdp_stage2"), ((1, 1), (2, 1), (2, 2), (4, 2), (1, 4))):
        yield Row("averages", Place("torch", strategy, 2), step, Place("torch", strategy, ranks))
        if strategy == "ddp":
            yield Row("averages of muon", Place("torch", strategy, 2), step, Place("torch", strategy, ranks))
    for strategy, size, ranks in (("ddp", 2, 1), ("ddp", 2, 4), ("fsdp_stage3", 4, 2)):
        yield Row("contrastive", Place("torch", strategy, size), 2, Place("torch", strategy, ranks))
    # Pipelines, kept in mid-epoch, that go on whole and on other meshes.
    for variant, (saved, resumed) in product(("batchnorm", "averages"), (((2, 2), (1, 1)), ((2, 1), (4, 2)))):
        yield Row(variant, Place("torch", "ddp", *saved), 2, Place("torch", "ddp", *resumed))
    for variant, saved, resumed in product(
        ("frozen", "adapters", "averages of muon"), ((2, 2), (3, 3), (4, 2)), ((2, 1), (4, 2))
    ):
        yield Row(variant, Place("torch", "ddp", *saved), 2, Place("torch", "ddp", *resumed))
    for saved, resumed in (((1, 1), (2, 2)), ((3, 3), (4, 2)), ((4, 2), (2, 1))):
        yield Row("members", Place("torch", "ddp", *saved), 2, Place("torch", "ddp", *resumed))
    for step in (1, 2):
        yield Row("averages", *[Place("deepspeed", "fsdp_stage3", 2), step, Place("deepspeed", "fsdp_stage3", 2)])


MOVES = ((1, 2), (2, 1), (2, 4), (4, 1))
CHANGES = [pair for pair in product(STRATEGIES, STRATEGIES) if pair[0] != pair[1]]
PLACES = [Place(engine, strategy, 2) for strategy, engine in product(STRATEGIES, ENGINES)]
QUICK = [*quick()]
SLOW = [row for row in dict.fromkeys(slow()) if row not in QUICK]
TABLE = pytest.mark.parametrize("row", [*QUICK, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)], ids=str)


class Runs:
    """The runs of the table, each made when it is first asked for: the reports of its ranks."""

    def __init__(self, run_on_ranks, tmp_path_factory) -> None:
        self._run_on_ranks = run_on_ranks
        self._new_folder = lambda: tmp_path_factory.mktemp("run") / "checkpoints"
        self._whole = functools.cache(self._train)
        self.resumed = functools.cache(self._resume)

    def whole(self, variant: str, place: Place) -> list[dict[str, Any]]:
        return self._whole(variant, place)[0]

    def checkpoint(self, variant: str, place: Place, step: int) -> Path:
        return self._whole(variant, place)[1] / name_of(step)

    def go_on(self, checkpoint: Path, variant: str, place: Place) -> tuple[list[dict[str, Any]], Path]:
        """Go on from a checkpoint; return the reports, and the folder of the checkpoints."""
        return self._run("resume_from", variant, place, checkpoint=str(checkpoint))

    def _resume(self, row: Row) -> list[dict[str, Any]]:
        return self.go_on(self.checkpoint(row.variant, row.saved, row.step), row.variant, row.resumed)[0]

    def _train(self, variant: str, place: Place) -> tuple[list[dict[str, Any]], Path]:
        return self._run("train_whole", variant, place)

    def _run(self, function: str, variant: str, place: Place, **given: str) -> tuple[list[dict[str, Any]], Path]:
        folder = self._new_folder()
        case = VARIANTS[variant] | {"engine": place.engine, "strategy": place.strategy, "folder": str(folder)} | given
        if place.stages > 1:
            case["stages"] = place.stages
        if place.ranks == 1:
            case.pop("replicate_across", None)
        return [reports[0] for reports in self._run_on_ranks(f"{RANKS}:{function}", place.ranks, [case])], folder


def name_of(step: int) -> str:
    return f"step-{step // STEPS_PER_EPOCH:05d}-{step % STEPS_PER_EPOCH:07d}"


@pytest.fixture(scope="module")
def runs(run_on_ranks, tmp_path_factory):
    return Runs(run_on_ranks, tmp_path_factory)


def assert_same(report, whole, step: int = 0) -> None:
    """Check for the bits of an uninterrupted run from a step on."""
    assert report["losses"] == {number: loss for number, loss in whole["losses"].items() if int(number) > step}
    assert report["weights"] == whole["weights"]
    assert (report["samples"], report["train_loss"]) == (45, whole["train_loss"])


def assert_near(report, whole, step: int) -> None:
    later = [str(number) for number in range(step + 1, STEPS + 1)]
    losses, expected = ([run["losses"][number] for number in later] for run in (report, whole))
    assert_same_but_rounding(losses, expected, msg="losses")
    assert_same_but_rounding(report["weights"], whole["weights"], msg="weights")
    assert report["samples"] == 45


@TABLE
def test_a_resumed_run_is_the_uninterrupted_one(row, runs):
    whole = runs.whole(row.variant, row.saved)[0]
    for report in runs.resumed(row):
        if row.is_exact:
            assert_same(report, whole, row.step)
        else:
            assert_near(report, whole, row.step)


@pytest.mark.parametrize("row", [row for row in QUICK if row.resumed.ranks > 1], ids=str)
def test_ranks_read_a_checkpoint_once_in_all(row, runs):
    folder = runs.checkpoint(row.variant, row.saved, row.step)
    read = sum(report["bytes_read"] for report in runs.resumed(row))
    files = [*folder.glob("*.safetensors"), *folder.parent.glob("frozen-*.safetensors")]
    stored = sum(path.stat().st_size for path in files)
    copies = 2 if row.variant == "replicated" else 1
    assert 0.5 * copies * stored < read < 1.2 * copies * stored


def test_three_changes_of_strategy_in_one_training(runs):
    whole = Place("torch", "ddp", 2)
    checkpoint = runs.checkpoint("plain", whole, 1)
    for strategy, step in (("fsdp_stage2", 2), ("fsdp_stage3", 4), ("ddp", 6)):
        reports, folder = runs.go_on(checkpoint, "plain", whole._replace(strategy=strategy))
        checkpoint = folder / name_of(step)
    assert_near(reports[0], runs.whole("plain", whole)[0], 4)


SAME_BYTES = [*product(("plain", "batchnorm"), STRATEGIES, WORLDS)]
SAME_BYTES += [*product(("contrastive",), ("ddp", "fsdp_stage3"), (2, 4))]
SAME_BYTES += [("replicated", strategy, 4) for strategy in STRATEGIES if strategy != "ddp"]


@pytest.mark.parametrize(("variant", "strategy", "ranks"), SAME_BYTES)
def test_any_number_of_ranks_trains_the_same_bytes(variant, strategy, ranks, runs):
    alone = runs.whole("plain" if variant == "replicated" else variant, Place("torch", alike(strategy), 1))[0]
    assert np.ptp(list(alone["losses"].values())) > 0.02, "the run must mean something"
    for report in runs.whole(variant, Place("torch", strategy, ranks)):
        assert_same(report, alone)


@pytest.mark.parametrize(("strategy", "ranks"), [*product(STRATEGIES, WORLDS)])
def test_the_content_of_a_checkpoint_does_not_depend_on_the_ranks(strategy, ranks, runs):
    contents = []
    for place in (Place("torch", alike(strategy), 1), Place("torch", strategy, ranks)):
        folder = runs.checkpoint("batchnorm", place, 2)
        reader = CheckpointReader(folder, read_manifest(folder))
        tensors = {(kind, name): one for kind, named in whole_tensors(reader).items() for name, one in named.items()}
        buffers = [reader.buffers([leaf], LEAVES) for leaf in range(LEAVES)]
        contents.append({"sums": reader.epoch_sums(0, 100), **tensors, **dict(enumerate(buffers))})
    first, second = contents
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(second[key], first[key], atol=0, rtol=0, msg=str(key))


@pytest.mark.parametrize(
    ("strategy", "saved", "ranks"), [(strategy, *move) for strategy, move in product(STRATEGIES, MOVES)]
)
def test_every_leaf_goes_on_with_its_own_statistics(strategy, saved, ranks, runs):
    place = Place("torch", strategy, saved)
    row = Row("batchnorm", place, 2, place._replace(ranks=ranks))
    reader = CheckpointReader(folder := runs.checkpoint("batchnorm", place, 2), read_manifest(folder))
    saved_means = [reader.buffers([leaf], LEAVES)["norm.running_mean"][0].tolist() for leaf in range(LEAVES)]
    resumed = {}
    for report in runs.resumed(row):
        resumed |= zip(report["resumed_leaves"], report["resumed_buffers"]["norm.running_mean"], strict=True)
    assert [resumed[leaf] for leaf in range(LEAVES)] == saved_means
    assert len(set(map(str, saved_means))) == LEAVES, "each leaf saw other samples"


@pytest.mark.parametrize("row", [row for row in QUICK if row.variant in ("frozen", "adapters")], ids=str)
def test_what_is_not_trained_is_rank_0s_is_saved_and_comes_back(row, runs):
    torch.manual_seed(0)
    untouched = DropoutNet(row.variant == "adapters").state_dict()
    if row.variant == "frozen":
        expected = {"convolution.weight": untouched["convolution.weight"]}
    else:
        names = {name: name.replace("convolution.", "convolution.base_layer.") for name in untouched}
        expected = {names[name]: tensor for name, tensor in untouched.items() if not name.startswith("head")}
    whole = runs.whole(row.variant, row.saved)
    for report in (*whole, *runs.resumed(row)):
        assert {name: report["weights"][name] for name in expected} == {
            name: tensor.double().tolist() for name, tensor in expected.items()
        }
    assert np.ptp(list(whole[0]["losses"].values())) > 0.01, "the rest must have moved for this to mean anything"
    assert row.variant == "frozen" or np.any(whole[0]["weights"]["convolution.lora_B.default.weight"])


def test_averages_are_among_what_is_compared(runs):
    names = runs.whole("averages", Place("torch", "ddp", 2))[0]["weights"].keys()
    assert {"ema head.weight", "slow_weights head.weight", "average/norm.running_var"} < names
