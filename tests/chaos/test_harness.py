"""The harness itself: what it must not overlook, and what it must not touch; and twenty faults of a campaign."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tests.chaos.campaign import Deck, draw_moment
from tests.chaos.case import RECIPES, STRATEGIES, Case, make_case, run_folder, run_oracle
from tests.chaos.compare import WEIGHTS, differences
from tests.chaos.damage import DAMAGES, MANIFEST, newest_checkpoint
from tests.chaos.disk import fill, small_disk, why_no_disk
from tests.chaos.faults import FAULTS
from tests.chaos.processes import MARK, kill_all, processes_of, ranks_of
from tests.chaos.records import Draw, Injection, TrialResult
from tests.chaos.report import misses, print_report, write_records
from tests.chaos.trial import Trial
from tests.unit.small_checkpoints import write_checkpoint
from zerovision.training.base.progress import Progress

POSITIONS = ("step-00001-0000003", "step-00001-0000006")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as that of a finished run, with two checkpoints of two ranks."""
    return make_run(tmp_path / "run")


def make_run(folder: Path, ranks: int = 2) -> Path:
    for seed, step in enumerate((3, 6)):
        write_checkpoint(folder / "checkpoints", Progress(epoch=1, step=step, best_score=0.25), seed=seed, ranks=ranks)
    save_file({"a": torch.arange(64.0), "b": torch.ones(3)}, folder / WEIGHTS, metadata={"epoch": "3"})
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_equal_runs_have_no_differences(run: Path, tmp_path: Path):
    assert differences(run, make_run(tmp_path / "oracle")) == []
    # The pretended ranks have one version of the buffers each.
    (line,) = differences(run, make_run(tmp_path / "other", ranks=4))
    assert "2 of 14 tensors differ: buffer/norm_batches, buffer/norm_mean" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (WEIGHTS, "model.safetensors: 1 of 2 tensors differ"),
        (f"checkpoints/{POSITIONS[1]}/shard-00001.safetensors", f"{POSITIONS[1]}: 1 of 14 tensors differ"),
    ],
)
def test_one_flipped_bit_is_found(run: Path, tmp_path: Path, name: str, words: str):
    oracle = make_run(tmp_path / "oracle")
    flip_last_bit(run / name)
    found = differences(run, oracle)
    assert len(found) == 1
    assert words in found[0]


def test_other_metadata_are_found(run: Path, tmp_path: Path):
    oracle = make_run(tmp_path / "oracle")
    save_file({"a": torch.arange(64.0), "b": torch.ones(3)}, run / WEIGHTS, metadata={"epoch": "2"})
    assert differences(run, oracle) == ["model.safetensors: other metadata"]


def test_what_is_missing_is_found(run: Path, tmp_path: Path):
    oracle = make_run(tmp_path / "oracle")
    (run / WEIGHTS).unlink()
    (run / "checkpoints" / POSITIONS[1] / "shard-00000.safetensors").unlink()
    assert [line.partition(":")[0] for line in differences(run, oracle)] == ["no model.safetensors", "last checkpoint"]
    (run / "checkpoints" / "last").write_text(POSITIONS[0])
    assert differences(run, oracle)[1] == f"last checkpoint: {POSITIONS[0]}, expected {POSITIONS[1]}"


def test_a_run_with_other_bytes_is_a_miss(tmp_path: Path):
    injection = Injection("flip_bits", "flip bit 3", at=100.0, ranks=[], done_at=100.0, recovered_at=108.5)
    good = TrialResult(0, make_case(0), tmp_path / "good", [injection])
    other = TrialResult(1, make_case(1), tmp_path / "other", [injection], differences=["model.safetensors: 1 of 2"])
    dead = TrialResult(2, make_case(2), tmp_path / "dead", [injection], miss="the launch ended with exit code 1")
    assert misses([good, other, dead]) == [other, dead]

    console = Console(record=True, width=400, file=(tmp_path / "console").open("w"))
    print_report(console, [good, other, dead], {"fill_disk": "not permitted"})
    text = console.export_text()
    row = next(line for line in text.splitlines() if " flip_bits " in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["flip_bits", "3", "2", "1", "8.5 s", "8.5 s"]
    assert f"training 1 ({make_case(1)}), kept in {tmp_path / 'other'}" in text
    assert "the launch ended with exit code 1" in text
    assert "fill_disk skipped: not permitted" in text

    write_records(tmp_path / "records.json", 7, [good, other, dead], {})
    trainings = json.loads((tmp_path / "records.json").read_text())["trainings"]
    assert [(entry["survived"], entry["bit_identical"]) for entry in trainings] == [
        (True, True),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_hits_one_file_of_the_newest_checkpoint(run: Path, name: str):
    before = contents(run)
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    said = DAMAGES[name](checkpoint, Random(1))
    after = contents(run)
    changed = {path for path in before if after.get(path) != before[path]}
    assert changed
    assert not after.keys() - before.keys()
    newest = f"checkpoints/{POSITIONS[1]}/"
    assert all(path.startswith(newest) or path == "checkpoints/last" for path in changed)
    assert len(changed) == 1 or name == "remove_checkpoint"
    assert any(Path(path).name in said for path in changed) or name == "remove_checkpoint"


def test_one_bit_and_one_number_mean_one(run: Path):
    checkpoint = run / "checkpoints" / POSITIONS[1]
    shards = sorted(checkpoint.glob("*.safetensors"))
    before = [int.from_bytes(path.read_bytes()) for path in shards]
    DAMAGES["flip_bits"](checkpoint, Random(2))
    after = [int.from_bytes(path.read_bytes()) for path in shards]
    assert sum((old ^ new).bit_count() for old, new in zip(before, after, strict=True)) == 1

    old = json.loads((checkpoint / MANIFEST).read_text())
    DAMAGES["edit_manifest"](checkpoint, Random(2))
    new = json.loads((checkpoint / MANIFEST).read_text())
    changes = [(x, y) for x, y in zip(leaves(old), leaves(new), strict=True) if x != y]
    assert [y - x for x, y in changes] == [1]


def leaves(content: Any) -> list[Any]:
    """Return all values of a JSON document, in order."""
    if isinstance(content, dict):
        content = [*content.values()]
    return [leaf for entry in content for leaf in leaves(entry)] if isinstance(content, list) else [content]


def test_only_marked_processes_are_found_and_ended():
    code = "import time; time.sleep(60)"
    ours, others = (
        subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ) | {MARK: mark}) for mark in ("m1", "m2")
    )
    try:
        assert [seen.process.pid for seen in processes_of("m1")] == [ours.pid]
        kill_all("m1")
        assert ours.wait(timeout=5) == -9
        assert others.poll() is None
    finally:
        ours.kill()
        others.kill()


def test_a_fork_of_a_rank_is_no_rank():
    program = "import os, time; os.fork(); print(flush=True); time.sleep(100)"
    words = [sys.executable, "-c", program, "train_distributed.py"]
    environment = os.environ | {MARK: "forks", "LOCAL_RANK": "0"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline(), rank.stdout.readline()
        assert len(processes_of("forks")) == 2
        assert [seen.process.pid for seen in ranks_of("forks")] == [rank.pid]
        kill_all("forks")


@pytest.mark.skipif(bool(why_no_disk()), reason="a tmpfs cannot be mounted here")
def test_a_full_disk_is_full_for_a_while_and_gone_at_the_end(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        filling = threading.Thread(target=fill, args=(disk, 2.0))
        filling.start()
        refused = ""
        while filling.is_alive() and not refused:
            try:
                (disk / "file").write_bytes(bytes(10_000))
            except OSError as error:
                refused = str(error)
        filling.join()
        assert "No space left" in refused
        (disk / "file").write_bytes(bytes(10_000))
    assert str(disk) not in {partition.mountpoint for partition in psutil.disk_partitions(all=True)}


def test_all_mixtures_of_a_training_come():
    assert len({(case.strategy, case.recipe) for case in map(make_case, range(9))}) == 9
    assert len(set(map(make_case, range(36)))) == 36
    for chosen, count in ((lambda case: case.engine == "deepspeed", 14), (lambda case: case.tensor > 1, 19)):
        cases = [case for case in map(make_case, range(count)) if chosen(case)]
        assert {case.strategy for case in cases} == set(STRATEGIES)
        assert {case.recipe for case in cases} == set(RECIPES)
    assert sum(case.pipeline > 1 for case in map(make_case, range(0, 36, 3))) == 6


def test_all_kinds_come_equally_often_and_none_that_is_impossible():
    deck = Deck(list(FAULTS), Random(0))
    drawn = [deck.draw(frozenset()) for _ in range(3 * len(FAULTS))]
    assert set(Counter(drawn).values()) == {3}
    rest = [deck.draw(frozenset({"kill_worker"})) for _ in range(100)]
    assert "kill_worker" not in rest
    assert deck.draw(frozenset()) == "kill_worker"
    assert deck.draw(frozenset(FAULTS)) is None


def test_moments_come_from_the_seed_and_a_damage_only_after_progress():
    draws = [[draw_moment(kind, Random(f"{seed}-{kind}")) for kind in FAULTS] for seed in (0, 0, 1)]
    moments = [[(draw.at_start_up, draw.delay_s) for draw in each] for each in draws]
    assert moments[0] == moments[1] != moments[2]
    many = [draw_moment(kind, Random(f"{seed}-{kind}")) for kind in FAULTS for seed in range(50)]
    early = {draw.kind for draw in many if draw.at_start_up}
    assert early == set(FAULTS) - set(DAMAGES) - {"stop_rank"}


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
