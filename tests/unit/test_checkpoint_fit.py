"""Which run may go on from a checkpoint: the global batch held, the recipe the same, all else free."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
from small_checkpoints import ALONE, IDENTITY, PREPARATION

from zerovision.training.base.errors import UserError
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import Manifest, ShardFacts
from zerovision.training.checkpoint.settings import CheckpointSettings
from zerovision.training.checkpoint.store import FoundCheckpoint
from zerovision.training.config import CHANGEABLE_ON_RESUME, FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.global_batch import largest_divisor
from zerovision.training.config.values import field_types
from zerovision.training.observe.settings import ObserveSettings
from zerovision.training.resume import (
    NORMALIZATION,
    check_fit,
    keep_global_batch,
    keep_groups,
    note_other_bytes,
    own_threads,
    resumed,
)
from zerovision.training.world.world import World

CONFIG = TrainConfig(epochs=5, batch_size=8)
STEPS_PER_EPOCH = 7
RECIPE = sorted(FIELDS.keys() - CHANGEABLE_ON_RESUME)
BOTTOMLESS: list = []
for _ in range(100_000):
    BOTTOMLESS = [BOTTOMLESS]
STRANGE = {
    "bottomless": BOTTOMLESS,
    "bottomless entry": {"depth": BOTTOMLESS, "model_type": BOTTOMLESS},
    "control characters": "\n\x1b[2J\ud800" * 10**5,
    "large number": 10**4000,
    "nan": math.nan,
    "long list": [1] * 10**6,
    "nothing": None,
}


MIDDLE = Progress(epoch=1, step=3)


def found(progress=MIDDLE, config=None, given=CONFIG, **identity):
    """Return a checkpoint as it is after its way through the JSON file, for a run with the `given` configuration."""
    saved = json.loads(json.dumps(dataclasses.asdict(CONFIG))) | (config or {})
    identity = (
        IDENTITY | {NORMALIZATION: PREPARATION} | {name.replace("_", " "): value for name, value in identity.items()}
    )
    manifest = Manifest(progress, identity, saved, 9, None, {}, (ShardFacts(1, "0"),))
    return resumed(FoundCheckpoint(Path("runs/first/checkpoints/step-00001-0000003"), manifest), given)


def world_of(size):
    return World(0, 0, size, size, torch.device("cpu"))


def refusal(checkpoint, config=CONFIG, identity=IDENTITY):
    with pytest.raises(UserError) as caught:
        check_fit(checkpoint, config, identity, STEPS_PER_EPOCH)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 1000
    assert str(checkpoint.path) in line
    return line


def changed(name):
    """Return another value of a field, of the field's type."""
    value, kind = getattr(CONFIG, name), field_types()[name]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if {int, float} & {*get_args(kind)}:
        return 0.625 if float in get_args(kind) else 5
    return {
        bool: lambda: not value,
        str: lambda: value + "x",
        int: lambda: value + 1,
        float: lambda: value / 2 + 0.125,
    }[kind]()


@pytest.mark.parametrize("name", sorted(CHANGEABLE_ON_RESUME))
def test_what_is_free_may_change(name):
    check_fit(found(), dataclasses.replace(CONFIG, **{name: changed(name)}), IDENTITY, STEPS_PER_EPOCH)


@pytest.mark.parametrize("name", RECIPE)
def test_the_recipe_may_not(name):
    line = refusal(found(), dataclasses.replace(CONFIG, **{name: changed(name)}))
    assert f" {FLAG_OF[name]} " in line
    assert str(getattr(CONFIG, name)) in line
    assert str(changed(name)) in line


@pytest.mark.parametrize("name", RECIPE)
def test_a_flag_younger_than_the_checkpoint_had_its_default(name):
    checkpoint = found()
    del checkpoint.settings[name]
    default = dataclasses.replace(CONFIG, **{name: FIELDS[name].default})
    check_fit(checkpoint, default, IDENTITY, STEPS_PER_EPOCH)
    if changed(name) != FIELDS[name].default:
        assert FLAG_OF[name] in refusal(checkpoint, config=dataclasses.replace(CONFIG, **{name: changed(name)}))


def test_the_promises_of_the_manual_are_free():
    # Issue: "what may change freely (world size, strategy, precision, workers, logging) does".
    assert {"strategy", "precision", "workers"} <= CHANGEABLE_ON_RESUME
    assert inspect.get_annotations(ObserveSettings).keys() <= CHANGEABLE_ON_RESUME, "output alone"
    assert inspect.get_annotations(CheckpointSettings).keys() <= CHANGEABLE_ON_RESUME
    assert not {"seed", "model_type", "optimizer", "learning_rate", "schedule", "augmentation"} & CHANGEABLE_ON_RESUME


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model", {"model_type": "large"}, "another model: model_type 'small'; this run has 'large'"),
        ("model", {"model_type": "small", "members": ["a"]}, "another model: members None; this run has ['a']"),
        ("class list", ["cat", "cow"], "another class list: entry 1 is 'dog'; this run has 'cow'"),
        ("class list", ["cat"], "another class list: 2 entries; this run has 1"),
        ("data set", "ff00", "another data set: 'ab12'; this run has 'ff00'"),
        ("global batch", 32, "another global batch: 16; this run has 32"),
    ],
)
def test_another_identity_is_named(key, value, told):
    assert told in refusal(found(), identity=IDENTITY | {key: value})


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("key", ["model", "class_list", "data_set"])
def test_strange_identities_are_shown_in_one_line(key, strange):
    refusal(found(**{key: STRANGE[strange]}))


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("name", ["seed", "optimizer"])
def test_strange_configurations_are_shown_in_one_line(name, strange):
    assert FLAG_OF[name] in refusal(found(config={name: STRANGE[strange]}))


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (1, 3), (4, STEPS_PER_EPOCH), (5, 0)])
def test_positions_of_the_run_fit(epoch, step):
    check_fit(found(Progress(epoch, step)), CONFIG, IDENTITY, STEPS_PER_EPOCH)


@pytest.mark.parametrize(("epoch", "step"), [(6, 0), (2**62, 0), (0, STEPS_PER_EPOCH + 1), (0, 2**62)])
def test_positions_beyond_the_run_do_not(epoch, step):
    line = refusal(found(Progress(epoch, step)))
    assert f"epoch {epoch}, step {step}" in line
    assert "5 epochs of 7 steps." in line
    assert (f"Use --epochs {epoch} or more, or another --run-name." in line) == (epoch > 5)


# The global batch.


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 8), (2, 8), (2, 4), (4, 4), (16, 1), (1, 16)])
def test_accumulation_keeps_the_global_batch(ranks, batch_size):
    config = dataclasses.replace(CONFIG, batch_size=batch_size, gradient_accumulation_steps=3)
    held = keep_global_batch(config, found(), ranks)
    assert held.gradient_accumulation_steps * ranks * batch_size == IDENTITY["global batch"]
    assert dataclasses.replace(held, gradient_accumulation_steps=3) == config


@pytest.mark.parametrize(
    ("ranks", "batch_size", "told"),
    [
        (3, 8, "use 1, 2, 4, 8 or 16 ranks."),
        (32, 1, "use 1, 2, 4, 8 or 16 ranks."),
        (2, 3, "use --batch-size 1, 2, 4 or 8."),
        (4, 8, "use --batch-size 1, 2 or 4."),
        (16, 2, "use --batch-size 1."),
    ],
)
def test_a_remainder_is_refused_with_what_is_allowed(ranks, batch_size, told):
    with pytest.raises(UserError) as caught:
        keep_global_batch(dataclasses.replace(CONFIG, batch_size=batch_size), found(), ranks)
    assert str(caught.value).endswith(told)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "global_batch", [None, 0, -16, 16.0, True, "16", [16], math.nan, 10**4000, BOTTOMLESS, 2**62, 2**61 + 1, 720_720**2]
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_strange_global_batches_get_one_line_at_once(global_batch, ranks):
    with pytest.raises(UserError) as caught:
        keep_global_batch(CONFIG, found(global_batch=global_batch), ranks)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_accumulation_has_an_end():
    most = FIELDS["gradient_accumulation_steps"].metadata["high"]
    config = dataclasses.replace(CONFIG, batch_size=1)
    assert keep_global_batch(config, found(global_batch=most), 1).gradient_accumulation_steps == most
    with pytest.raises(UserError, match=f"{2 * most} accumulation steps .* use a larger --batch-size"):
        keep_global_batch(config, found(global_batch=2 * most), 1)


@pytest.mark.parametrize(
    ("ranks", "batch_size", "steps"),
    [(1, 96, 32), (8, 96, 4), (4, 96, 8), (32, 96, 1), (24, 64, 2), (96, 32, 1), (128, 24, 1), (512, 6, 1)],
)
def test_a_resume_keeps_what_these_ranks_can_share(ranks, batch_size, steps):
    checkpoint = found(config={"batch_size": 96}, global_batch=3072)
    kept = keep_global_batch(dataclasses.replace(CONFIG, batch_size="auto"), checkpoint, ranks)
    assert (kept.batch_size, kept.gradient_accumulation_steps) == (batch_size, steps)
    assert batch_size == largest_divisor(3072 // ranks, 96)


@pytest.mark.parametrize("batch_size", [None, "auto", 0, 2.5, 2**60])
def test_a_strange_batch_size_in_a_checkpoint_is_one_line(batch_size):
    given = dataclasses.replace(CONFIG, batch_size="auto")
    with pytest.raises(UserError, match=r"its --batch-size .* is not a whole number"):
        found(config={"batch_size": batch_size}, given=given, global_batch=2**60)


def test_the_global_batch_gives_the_accumulation_steps():
    config = dataclasses.replace(CONFIG, global_batch=96)
    held = keep_global_batch(config, None, 4)
    assert held == dataclasses.replace(config, gradient_accumulation_steps=3)
    assert keep_global_batch(held, None, 4) == held
    assert keep_global_batch(CONFIG, None, 1) is CONFIG


@pytest.mark.parametrize(
    ("changes", "ranks", "told"),
    [
        ({"global_batch": 100}, 8, "use 1, 2, 4, 5, 10, 20, 25, 50 or 100 ranks, or --global-batch 64 or 128."),
        ({"global_batch": 32}, 8, "8 x 8 ranks does not divide --global-batch 32: use --batch-size 1, 2 or 4."),
        (
            {"global_batch": 64, "gradient_accumulation_steps": 3},
            4,
            "--global-batch 64 needs 2 at this --batch-size: leave it out.",
        ),
    ],
)
def test_a_global_batch_that_cannot_be_is_refused_with_the_nearest(changes, ranks, told):
    with pytest.raises(UserError) as caught:
        keep_global_batch(dataclasses.replace(CONFIG, **changes), None, ranks)
    assert str(caught.value).endswith(told)


def test_another_global_batch_than_the_checkpoints_is_refused():
    with pytest.raises(UserError, match=r"--global-batch 32: the checkpoint was made with 16\."):
        keep_global_batch(dataclasses.replace(CONFIG, global_batch=32), found(), 2)


# The threads of a rank, and the leaves.


ADVICE = "; --threads-per-rank changes this and the last bits"


@pytest.mark.parametrize(
    ("saved", "given", "threads", "told"),
    [
        (None, 0, 4, []),  # of a version without the flag
        (0, 0, 4, []),
        (4, 0, 4, []),
        (1, 0, 1, [f"1 thread x 1 rank on 4 cores: 3 idle{ADVICE}"]),
        (8, 0, 8, [f"8 threads x 1 rank on 4 cores: slower (OMP_WAIT_POLICY=passive helps){ADVICE}"]),
        (1, 4, 4, ["--threads-per-rank 4 instead of 1: the bytes will differ from those of the run so far"]),
    ],
)
def test_a_run_keeps_its_threads_unless_told_otherwise(saved, given, threads, told, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    checkpoint = found(config={} if saved is None else {"threads_per_rank": saved})
    if saved is None:
        del checkpoint.settings["threads_per_rank"]
    config, notes = own_threads(dataclasses.replace(CONFIG, threads_per_rank=given or saved or 0), ALONE)
    assert (config.threads_per_rank, notes + note_other_bytes(config, checkpoint.settings)) == (threads, told)


@pytest.mark.parametrize(
    ("before", "meant", "ranks", "per_machine", "islands", "told"),
    [
        (4, 4, 4, 4, 4, ""),  # on one machine, as a run began on four
        (4, 4, 3, 1, 3, "3 islands in place of the checkpoint's 4 (4 intended): the others' weights are"),
        (3, 4, 4, 1, 4, "4 islands in place of the checkpoint's 3 (4 intended): new ones begin with"),
        (8, 8, 56, 8, 7, "7 islands in place of the checkpoint's 8"),  # 8 of 7 ranks would lie across machines
        (2, 2, 1, 1, 1, "1 island in place of the checkpoint's 2"),
    ],
)
def test_as_many_islands_train_as_the_machines_that_are_left_can_be(
    before, meant, ranks, per_machine, islands, told, monkeypatch
):
    monkeypatch.setattr("zerovision.training.world.collectives.gather_objects", lambda *_: [per_machine] * ranks)
    names = [f"island {number}/head.bias" if number else "head.bias" for number in range(before)]
    config = dataclasses.replace(CONFIG, local_steps=5, islands=meant)
    kept, now, notes = keep_groups(config, names, world_of(ranks))
    assert (kept.islands, now, len(notes)) == (meant, islands, bool(told))
    assert told in "".join(notes)
    if islands < meant:  # as a new run, it is refused
        with pytest.raises(UserError, match=f"--local-steps 5:{meant}: .* cannot be divided into {meant} equal groups"):
            keep_groups(config, None, world_of(ranks))


def test_another_batch_size_is_noted_since_the_bytes_change():
    assert note_other_bytes(CONFIG, {}) == note_other_bytes(CONFIG, found().settings) == []
    (line,) = note_other_bytes(dataclasses.replace(CONFIG, batch_size=4), found().settings)
    assert line == "--batch-size 4 instead of 8: the bytes will differ from those of the run so far"
