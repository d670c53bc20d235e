"""A few faults against a real training: what CI runs of the harness; `make chaos` runs a hundred."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from tests.chaos.case import Case, run_folder, run_oracle
from tests.chaos.compare import WEIGHTS, differences
from tests.chaos.records import Draw, TrialResult
from tests.chaos.trial import Trial

KINDS = ["kill_rank", "flip_bits", "sigterm_launcher"]


@pytest.mark.timeout(280)
def test_a_training_survives_faults_bit_for_bit(tmp_path: Path):
    case = Case("fsdp_stage2", micro_batches=4, workers=0, image_size=12)
    oracle = run_oracle(case.oracle, tmp_path / "oracle")
    result = TrialResult(0, case, tmp_path / "training")
    draws = [Draw(kind, at_start_up=False, delay_s=0.3, rng=Random(0)) for kind in KINDS]
    Trial(result, oracle, None, print).run(draws, deadline=float("inf"))
    output = (result.folder / "output.log").read_text()
    assert (result.miss, result.differences) == ("", []), output
    assert [injection.kind for injection in result.injections] == KINDS, output
    assert len({*result.ranks}) == 2, output  # SIGTERM ends the first launch, and the second is on other ranks

    copy = shutil.copytree(run_folder(tmp_path / "training" / "logs"), tmp_path / "copy")
    content = bytearray((copy / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (copy / WEIGHTS).write_bytes(content)
    assert len(differences(copy, oracle)) == 1
