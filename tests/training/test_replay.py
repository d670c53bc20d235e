"""A step of a run of two ranks, trained again in one process: the run's bytes, its numbers, and a bit that is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import assert_success, assert_user_error, command_here, launch, read_metrics, train_here
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zerovision.extras.replay import replay
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.manifest import ShardFacts, read_manifest, shard_name, write_manifest

# Dropout, BatchNorm and augmentation; the update of a step is its gradient times the rate.
FLAGS = ("--data", "fake", "--image-size", "8", "--augmentation", "shift_flip", "--threads-per-rank", "1")
PLAIN = ("--optimizer", "sgd:0", "--weight-decay", "0", "--gradient-clipping", "0")
LOGGED = ("--log-hashes", "1", "--log-every-steps", "1", "--save-every-steps", "3", "--keep-last", "100")
QUIET = ("--tensorboard", "false", "--report", "false", "--workers", "0")
STEPS_PER_EPOCH = 5  # 1,000 images, 2 x 100 at a time


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    logs = tmp_path_factory.mktemp("replayed")
    words = ("basic_cnn", "ddp", "2", "100", "2", *FLAGS, *PLAIN, *LOGGED, *QUIET, "--audit", "1")
    assert_success(launch(*words, "--run-name", "two", "--log-dir", str(logs)))
    return logs / "runs" / "two"


def test_a_step_of_two_ranks_leaves_its_bytes_in_one_process(run, tmp_path):
    before, step, output = content(run), 5, tmp_path / "out"
    result = command_here("replay", str(run), "--step", str(step), "--output", str(output))
    assert (result.returncode, result.stderr.strip()) in ((0, ""), (0, "no GPU found: training on CPU"))
    assert f"step {step}: the same bytes as in the run\n" in result.stdout
    assert content(run) == before
    seen = json.loads((output / "step.json").read_text())
    (logged,) = (line for line in read_metrics(run, "step") if line["step"] == step)
    assert seen["start"] == "step-00000-0000003"
    # The hashes of a run whose ranks check each other are those of one without it.
    checked = [(line["step"], line["rank"], line["again_on"]) for line in read_metrics(run, "audit")]
    assert checked == [(number, number % 2, 1 - number % 2) for number in range(1, 2 * STEPS_PER_EPOCH + 1)]
    assert seen["loss"] == pytest.approx(logged["loss"], rel=1e-9)
    # What the hooks have added up is what the optimizer was given, and all of it.
    norms = seen["layers"].values()
    assert sum(one["gradient"] ** 2 for one in norms) ** 0.5 == pytest.approx(logged["gradient_norm"], rel=1e-6)
    for one in norms:
        assert one["change"] == pytest.approx(logged["learning_rate"] * one["gradient"], rel=1e-2)
    assert len({one["name"] for one in seen["samples"]}) == 200
    for one in seen["samples"]:
        assert one["labels"] == {f"wave-{int(one['name'].removeprefix('image ')) % 10}": 1.0}
    assert Image.open(output / "batch.png").width == 824
    again = command_here("replay", str(run), "--step", str(step), "--output", str(output))
    assert_user_error(again, f"'{output}' exists: move it away")

    changed = tmp_path / "changed"
    shutil.copytree(run, changed)
    flip_a_bit(changed / "checkpoints" / "step-00000-0000003")
    result = command_here("replay", str(changed), "--step", str(step))
    assert result.returncode == 1, result.stderr
    assert f"step {step}: differs from the run in " in result.stdout
    # Not the images; and each leaf, since what differs is older than the step.
    assert " of its hashes: rank 0 (micro-batch 1): different outputs of the same images; rank 1 (" in result.stdout
    assert (changed / f"replay-{step}" / "batch.png").read_bytes() == (output / "batch.png").read_bytes()


def flip_a_bit(checkpoint: Path) -> None:
    """Flip the lowest bit of an element of the first weights, and make all hashes right."""
    for rank in range(2):
        shard = checkpoint / shard_name(rank)
        with safe_open(shard, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if "weights" in name and tensor.numel():
                tensor.view(-1).view(dtype=torch.int32)[0] ^= 1
        save_file(tensors, shard, metadata)
    manifest = read_manifest(checkpoint)
    files = [(checkpoint / shard_name(rank)).read_bytes() for rank in range(2)]
    facts = tuple(ShardFacts(len(file), hashlib.sha256(file).hexdigest()) for file in files)
    write_manifest(checkpoint, dataclasses.replace(manifest, shards=facts))


@pytest.mark.slow
def test_a_step_without_a_checkpoint_is_trained_from_the_seed(run, tmp_path):
    """Over the end of an epoch, whose evaluation is left out."""
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    shutil.rmtree(bare / "checkpoints")
    result = assert_success(command_here("replay", str(bare), "--step", str(STEPS_PER_EPOCH + 2)))
    assert f"step {STEPS_PER_EPOCH + 2}, from the seed: loss " in result.stdout
    assert f"step {STEPS_PER_EPOCH + 2}: the same bytes as in the run\n" in result.stdout
    lines = (bare / "metrics.jsonl").read_text().splitlines()
    (bare / "metrics.jsonl").write_text("\n".join(line for line in lines if '"hashes"' not in line) + "\n")
    result = assert_success(command_here("replay", str(bare), "--step", "1"))
    assert "step 1: the run has no hashes of this step" in result.stdout


@pytest.mark.slow
def test_a_damaged_checkpoint_and_a_step_that_never_was_are_refused(run, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "checkpoints" / "step-00000-0000003" / shard_name(0)).write_bytes(b"")
    assert_user_error(
        command_here("replay", str(damaged), "--step", "4"), "step-00000-0000003: there is no good checkpoint. "
    )
    assert (damaged / "checkpoints" / "step-00000-0000003").is_dir()
    assert_user_error(command_here("replay", str(run), "--step", "11"), "--step 11: run two has 10 steps: use 1 to 10")
    stopped = shutil.copytree(run, tmp_path / "stopped")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    trained = [line for line in lines if json.loads(line).get("step", 0) <= 7]
    trained.append(json.dumps({"kind": "resume", "step": 6, "time": 0.0, "checkpoint": "x", "restarts": 1}) + "\n")
    (stopped / "metrics.jsonl").write_text("".join(trained))
    told = "--step 8: run stopped has trained 7 of its 10 steps: use 1 to 7"
    assert_user_error(command_here("replay", str(stopped), "--step", "8"), told)
    (damaged / "environment.json").write_text("{}")
    assert_user_error(command_here("replay", str(damaged), "--step", "4"), "is damaged: no number 'ranks'")


def test_a_run_whose_ranks_trained_independently_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"local_steps": 10}')
    (tmp_path / "environment.json").write_text('{"ranks": 2, "training_images": 1000}')
    told = f"run {tmp_path.name} has --local-steps: one process cannot repeat ranks that train independently."
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"):
        replay(tmp_path, 1)


VARIANTS = {
    "averages": ("--strategy", "fsdp_stage2", "--ema", "0.9", "--lookahead", "2", "--gradient-clipping", "0.1"),
    "mixed": ("--mixup", "0.4", "--cutmix", "1", "--label-smoothing", "0.1", "--optimizer", "lamb"),
    "pairs": ("--loss", "supcon"),
    "global": ("--global-batch", "200", "--sampling", "uniform:2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_a_step_consists_of(variant, tmp_path):
    words = ("--model-type", "basic_cnn", "--batch-size", "100", "--epochs", "2", *FLAGS, *LOGGED, *QUIET)
    words += () if "--global-batch" in VARIANTS[variant] else ("--gradient-accumulation-steps", "2")
    assert_success(train_here(*words, *VARIANTS[variant], "--run-name", "one", "--log-dir", str(tmp_path)))
    result = assert_success(command_here("replay", str(tmp_path / "runs" / "one"), "--step", str(STEPS_PER_EPOCH + 4)))
    assert f"step {STEPS_PER_EPOCH + 4}: the same bytes as in the run\n" in result.stdout
