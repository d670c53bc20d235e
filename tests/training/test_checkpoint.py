"""A bad step leaves no trace, and a full disk costs checkpoints: on real ranks. Resuming is test_resume.py's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from zerovision.training.base.errors import CANNOT_SAVE_EXIT_CODE, TOO_MANY_BAD_STEPS_EXIT_CODE
from zerovision.training.engines.ways import STRATEGIES

RANKS = "tests.training.checkpoint_ranks"
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


POISONED = [
    *product(STRATEGIES, ("fp32",), (0.0, 0.5), CULPRITS),
    *product(STRATEGIES, ("bf16", "fp16"), (0.0,), CULPRITS),
]
SLOW = [  # stage 2 steps as stage 3 does, bf16 as fp32
    (strategy, precision, clipping, culprit)
    for strategy, precision, clipping, culprit in POISONED
    if (strategy == "fsdp_stage2" or precision == "bf16") and (precision, clipping) != ("fp32", 0.0)
]


@pytest.fixture(scope="module")
def poisoned(launches):
    """A function from strategy, precision, clipping, culprit (and other changes) to every rank's report."""

    def run(*values, **changes) -> list[dict]:
        case = dict(zip(("strategy", "precision", "clipping", "culprit"), values, strict=True)) | changes
        folder = launches.folder / "-".join(["poisoned", *map(str, case.values())])
        return launches.run("poisoned", 2, [case | {"folder": str(folder)}])[0]

    return run


@pytest.mark.parametrize(
    ("strategy", "precision", "clipping", "culprit"),
    [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else []) for case in POISONED],
)
def test_a_bad_step_leaves_no_trace_on_any_rank(strategy, precision, clipping, culprit, poisoned):
    """Weights, BatchNorm's statistics and the count of updates stay, and the samples are named."""
    ranks = poisoned(strategy, precision, clipping, culprit)
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


def test_a_pipeline_skips_the_steps_that_one_rank_skips(launches):
    case = {"strategy": "ddp", "precision": "fp32", "clipping": 0.5, "culprit": "image"}
    ((alone,), staged) = (
        launches.run("poisoned", stages, [case | {"folder": str(launches.folder / f"of-{stages}"), "stages": stages}])[
            0
        ]
        for stages in (1, 2)
    )
    assert alone["skipped"] == 2
    for report in staged:
        assert report["unchanged"] is True
        assert all(report[key] == alone[key] for key in ("weights", "train_loss", "samples", "skipped"))
    skipped = [[message for message in report["messages"] if "skipped" in message] for report in (staged[0], alone)]
    assert skipped[0] == skipped[1] != []


def test_too_many_bad_steps_end_the_run(poisoned):
    for report in poisoned("ddp", "fp32", 0.0, "image", most_bad_steps=1):
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
            assert any("the next attempt follows within" in message for message in report["messages"])
