"""Another number of epochs: what a longer run goes back to, what the log says, and what `--minutes` shortens."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import ALONE, newest, write_checkpoint

from tests.kit import new_model, train
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training import trial
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import WEIGHTS, RunFolder
from zerovision.training.checkpoint.manifest import MANIFEST_FILE, read_manifest
from zerovision.training.checkpoint.weights import save_weights
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.config.saved import IN_EPOCHS
from zerovision.training.data.augmentations import size_ramp
from zerovision.training.observe.best_weights import keep_finished
from zerovision.training.recipe.schedule import build_schedule, schedule_notes
from zerovision.training.resume import before_decay, resumed
from zerovision.training.steps.carrier import Origin, Start
from zerovision.training.trial import in_proportion

pytestmark = pytest.mark.usefixtures("no_sync")
CONFIG = TrainConfig(schedule="wsd", epochs=20, warmup_epochs=0.5, resume="auto")  # stable for 16 epochs
SHORT = dataclasses.replace(CONFIG, epochs=10)  # stable for 8
BACK = "--epochs 20 instead of 10: going back to epoch 8, the last before the learning rate decayed"
GOES_ON = "from now on, learning rate and mixing are those of a run of"


@pytest.fixture
def finished(tmp_path):
    """The checkpoints of a run of 10 epochs that kept the last one, and the last one before the decay."""
    for epoch in range(1, 11):
        write_checkpoint(
            tmp_path, Progress(epoch), keep_last=1, kept="step-00008-0000000", config=dataclasses.asdict(SHORT)
        )
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_last_checkpoint_before_the_decay_is_kept(finished):
    assert names(finished) == ["step-00008-0000000", "step-00010-0000000"]
    # A run that went back further keeps nothing of the later one.
    write_checkpoint(finished, Progress(7), keep_last=1, kept="step-00008-0000000")
    assert names(finished) == ["step-00007-0000000"]


def test_a_longer_run_goes_back_to_where_the_decay_began(finished):
    found = resumed(newest(finished)[0], CONFIG)
    earlier, notes = before_decay(CONFIG, found, ALONE)
    assert earlier.path.name == "step-00008-0000000"
    assert notes == [BACK]


@pytest.mark.parametrize("epoch", [5, 9, None])
def test_the_best_weights_are_those_of_the_epochs_that_stay(epoch, tmp_path):
    """Those of an epoch of the decay, or none, are not the best of the run that goes on."""
    folder = tmp_path / "checkpoints"
    for progress in (Progress(8, best_epoch=5, best_score=0.7), Progress(10, best_epoch=9, best_score=0.8)):
        write_checkpoint(folder, progress, keep_last=9, config=dataclasses.asdict(SHORT))
    if epoch is not None:
        save_weights_of(epoch, tmp_path / WEIGHTS)
    found = resumed(newest(folder)[0], CONFIG)
    earlier, notes = before_decay(CONFIG, found, ALONE)
    kept = (earlier.progress.best_epoch, earlier.progress.best_score)
    assert kept == ((5, 0.7) if epoch == 5 else (0, -1.0))
    told = "; model.safetensors will contain the best epoch from then on: epoch 5's weights are gone"
    assert notes == [BACK if epoch == 5 else BACK + told]


def save_weights_of(epoch, path):
    built = new_model("basic_cnn", num_classes=2, image_size=8)
    preprocessing = Preprocessing(8, None, mean=(0.5,) * 3, std=(0.5,) * 3)
    facts = {"class_names": ["a", "b"], "preprocessing": preprocessing}
    weights = {"w": torch.full((1,), float(epoch))}
    save_weights(path, weights, description=built.description, **facts, extra={"epoch": epoch})


@pytest.mark.parametrize(("epoch", "epochs", "kept"), [(10, 20, [10.0]), (8, 20, []), (10, 10, []), (None, 20, [])])
def test_weights_behind_which_a_longer_run_goes_back_are_kept(epoch, epochs, kept, tmp_path):
    folder = RunFolder(tmp_path, "waves")
    write_checkpoint(folder.checkpoints, Progress(8), config=dataclasses.asdict(SHORT))
    found = resumed(newest(folder.checkpoints)[0], CONFIG)
    before = (found.epochs, found.progress.epoch)
    if epoch is not None:
        save_weights_of(epoch, folder.weights)
    line = keep_finished(folder, *before, epochs)
    told = "the weights of epoch 10, of the run of 10 epochs, are kept as model-10-epochs.safetensors"
    assert line == (told if kept else None)
    if kept:
        save_weights_of(9, folder.weights)  # the first epoch of the longer run, which is killed then
        assert keep_finished(folder, *before, epochs) is None
    assert [load_file(file)["w"].item() for file in folder.path.glob("model-*.safetensors")] == kept


def test_other_runs_go_on_from_the_newest(finished):
    found = resumed(newest(finished)[0], CONFIG)
    for changes in (
        {"epochs": 10},
        {"epochs": 10, "schedule": "cosine"},
        {"schedule": "cosine"},
        {"epochs": 9},
        {"resume": f"{finished}/step-00010-0000000"},
    ):
        config = dataclasses.replace(CONFIG, **changes)
        told = f"--epochs {config.epochs} instead of 10: {GOES_ON} {config.epochs} epochs"
        assert before_decay(config, found, ALONE) == (found, [told] * (config.epochs != 10)), changes


def test_a_run_that_is_still_stable_goes_on_where_it_is(tmp_path):
    write_checkpoint(tmp_path, Progress(7, 3), config=dataclasses.asdict(SHORT))
    found = resumed(newest(tmp_path)[0], CONFIG)
    assert before_decay(CONFIG, found, ALONE) == (found, [f"--epochs 20 instead of 10: {GOES_ON} 20 epochs"])


def test_a_damaged_one_is_told_and_the_newest_taken(finished):
    (finished / "step-00008-0000000" / MANIFEST_FILE).unlink()
    found = resumed(newest(finished)[0], CONFIG)
    same, (note,) = before_decay(CONFIG, found, ALONE)
    assert same is found
    told = "; the checkpoint of epoch 8, before the decay, cannot be used: it has no manifest.json"
    assert note.startswith(f"--epochs 20 instead of 10: {GOES_ON} 20 epochs{told}")


@pytest.mark.parametrize("epochs", [None, 0, -3, True, "10", 10**30, [10]])
def test_strange_epochs_of_a_checkpoint_are_none(tmp_path, epochs):
    write_checkpoint(tmp_path, Progress(4), config=dataclasses.asdict(SHORT) | {"epochs": epochs})
    found = resumed(newest(tmp_path)[0], CONFIG)
    assert before_decay(CONFIG, found, ALONE) == (found, [])


def test_an_extended_run_has_the_bytes_of_one_that_began_with_more_epochs(tmp_path, capsys):
    fixed = {"data": "fake", "image_size": 8, "batch_size": 250, "workers": "0", "progress": "lines"}
    fixed |= {"schedule": "wsd", "warmup_epochs": 0.5, "optimizer": "muon", "keep_last": 1, "resume": "auto"}
    train(tmp_path, "extended", **fixed, epochs=2)
    extended = train(tmp_path, "extended", **fixed, epochs=3) / "checkpoints"
    assert "going back to epoch 1, the last before the learning rate decayed" in capsys.readouterr().out
    whole = train(tmp_path, "whole", **fixed, epochs=3) / "checkpoints"
    found, expected = (read_manifest(folder / "step-00003-0000000") for folder in (extended, whole))
    assert found.shards == expected.shards
    assert (found.progress, found.applied_steps) == (expected.progress, expected.applied_steps)
    assert (extended / "step-00002-0000000").is_dir(), "before the decay of the longer run"


@pytest.mark.parametrize(
    ("settings", "epochs", "shorter", "expected"),
    [
        ({"warmup_epochs": 2.0}, 40, 4, {"warmup_epochs": 0.2}),
        ({"cooldown_epochs": 50.0}, 300, 1, {"cooldown_epochs": 0.166667}),
        ({"mixup_off_epochs": 35}, 40, 2, {"mixup_off_epochs": 1}),
        ({"progressive_size": "16:100:180"}, 200, 12, {"progressive_size": "16:6:11"}),
        ({"progressive_size": "16:100:180"}, 200, 2, {"progressive_size": "16:0:1"}),
        ({"progressive_size": "16:100:180"}, 200, 1, {"progressive_size": ""}),
        ({"model_type": "mobilenet_finetuned", "head_epochs": 10}, 30, 6, {"head_epochs": 2}),
        ({"head_epochs": 10}, 30, 6, {}),
        ({"schedule": "wsd:50:linear"}, 300, 30, {"schedule": "wsd:5:linear"}),
        ({"schedule": "wsd:50:linear", "warmup_epochs": 9.0}, 300, 1, {"schedule": "wsd:auto:linear"}),
        ({"schedule": "wsd:50", "cooldown_epochs": 10.0}, 300, 7, {"schedule": "wsd:1.766667"}),
        ({"schedule": "step:30,60:0.2"}, 90, 9, {"schedule": "step:3,6:0.2"}),
        ({"schedule": "step:30"}, 90, 10, {"schedule": "step:3.33333333"}),
        ({"schedule": "step:auto:0.2"}, 90, 10, {}),
        ({"schedule": "polynomial:2", "early_stopping_patience": 9}, 90, 10, {}),
    ],
)
def test_what_is_counted_in_epochs_keeps_its_share_of_a_shorter_run(settings, epochs, shorter, expected):
    found = in_proportion(TrainConfig(epochs=epochs, **settings), shorter)
    assert {name: found.get(name) for name in expected} == expected
    assert found.keys() <= expected.keys() | settings.keys()
    assert found.keys() < IN_EPOCHS


PHASES = itertools.product(
    ("auto", 0.0, 1.0, 2.5),  # epochs of warm-up
    (0.0, 4.0, 6.5),  # of the final rate
    ("cosine", "wsd:3:linear", "wsd:3.5", "wsd", "step:2.4:0.9", "step:1,5,"),
)


def test_a_shorter_run_has_the_same_rates_and_may_be_started():
    """With warm-up, decay and cooldown at the same shares of the run, if these are not rounded to whole epochs."""
    for warmup, cooldown, schedule in PHASES:
        whole = TrainConfig(
            epochs=20, warmup_epochs=warmup, cooldown_epochs=cooldown, schedule=schedule, mixup_off_epochs=7
        )
        if schedule.startswith("wsd:") and (cooldown + float(schedule.split(":")[1])) % 1:
            continue  # is refused
        check_config(whole, FLAG_OF)
        long = build_schedule(whole, 600, 16, 0)
        for epochs in range(1, 20):
            short = dataclasses.replace(whole, epochs=epochs, **in_proportion(whole, epochs))
            check_config(short, FLAG_OF)
            found = build_schedule(short, 600, 16, 0)
            assert schedule_notes(found) == schedule_notes(long), (whole, epochs)
            if schedule in ("cosine", "step:1,5,") and warmup != "auto" and epochs > 2:
                places = range(0, found.total_steps, 97)
                expected = [long.learning_rate(step * 20 // epochs) for step in places]
                assert [found.learning_rate(step) for step in places] == pytest.approx(expected, abs=0.02 * long.peak)


def test_a_shorter_run_ends_with_images_of_full_size_if_the_whole_one_does():
    for first, last in itertools.combinations_with_replacement(range(12), 2):
        whole = TrainConfig(epochs=10, progressive_size=f"16:{first}:{last}")
        full = [size_ramp(whole.progressive_size).size(epoch, 64) for epoch in range(10)]
        for epochs in range(1, 10):
            value = in_proportion(whole, epochs).get("progressive_size", whole.progressive_size)
            sizes = [size_ramp(value).size(epoch, 64) if value else 64 for epoch in range(epochs)]
            assert sizes[-1] == 64 or full[-1] != 64, (first, last, epochs)
            assert sizes == sorted(sizes)
            if epochs > 1 or full[0] == full[-1]:
                assert sizes[0] == full[0], (first, last, epochs)


LIMITED = {"data": "fake", "image_size": 16, "batch_size": 64, "workers": "0", "progress": "lines"}


def test_a_run_of_some_minutes_is_one_of_fewer_epochs_in_all_settings_and_goes_on_by_the_same_command(
    tmp_path, monkeypatch, few_images, capsys
):
    monkeypatch.setattr("zerovision.training.trial._epoch_seconds", lambda _run: (0.0, 60_000 / 3.5))
    typed = {"epochs": 8, "warmup_epochs": 1.0, "schedule": "wsd:2", "cooldown_epochs": 2.0, "mixup": 0.2}
    typed |= {"mixup_off_epochs": 4, "progressive_size": "8:1:4", "minutes": 1000.0} | LIMITED
    shorter = {"epochs": 4, "warmup_epochs": 0.5, "schedule": "wsd:1", "cooldown_epochs": 1.0, "minutes": 0.0}
    shorter |= {"mixup_off_epochs": 2, "progressive_size": "8:0:2"}
    folder = train(tmp_path, "limited", **typed)
    said = capsys.readouterr().out
    assert "shortened to 4 of 8 epochs" in said
    for name in shorter.keys() - {"epochs", "minutes"}:
        assert f"; {FLAG_OF[name]} {shorter[name]!r} in proportion" in said
    assert "training images have 8 pixels up to epoch 1, 16 from epoch 3" in said
    saved = json.loads((folder / "config.json").read_text())
    assert {name: saved[name] for name in shorter} == shorter
    same = train(tmp_path, "same", **typed | shorter)
    found, expected = (read_manifest(one / "checkpoints/step-00004-0000000") for one in (folder, same))
    assert found.shards == expected.shards
    train(tmp_path, "limited", **typed, resume="auto")
    train(tmp_path, "limited", Start(Origin(restarts=1)), **typed)
    assert capsys.readouterr().out.count("all epochs are trained") == 2
    assert json.loads((folder / "config.json").read_text()) == saved | {"resume": "never"}


@pytest.mark.parametrize(("images", "per_step", "trained"), [(18, 32, 5), (64, 32, 6), (128, 8, 5)])
def test_the_time_of_some_steps_is_measured_in_epochs_of_any_length(
    tmp_path, monkeypatch, few_images, images, per_step, trained
):
    """By a clock that goes on by 0.5 s a step, with the images of the last epoch, twice; 20 images are evaluated."""
    seen, measured, epoch_seconds = [], [], trial._epoch_seconds

    class Counted(trial.KeptSteps):
        def steps(self, point):
            super().steps(point)
            seen.append(len(self.times))
            self.times[-1] = 0.5 * len(self.times)

    monkeypatch.setattr(trial, "KeptSteps", Counted)
    monkeypatch.setattr(trial, "_epoch_seconds", lambda run: measured.append(epoch_seconds(run)) or measured[0])
    monkeypatch.setattr("zerovision.training.data.arrays.FAKE_TRAIN_IMAGES", images)
    numbers, train_shortly = [], trial.train_shortly
    monkeypatch.setattr(
        trial, "train_shortly", lambda run, epochs: numbers.append({*epochs}) or train_shortly(run, epochs)
    )
    train(tmp_path, "timed", **LIMITED | {"batch_size": per_step}, minutes=0.001, epochs=3, progressive_size="8:0:2")
    assert seen == [*range(1, trained + 1)] * 2
    assert numbers == [{2}] * 2
    seconds = 0.5 * (math.ceil(images / per_step) + 0.5 * 20 / per_step)
    assert measured == [(pytest.approx(seconds), pytest.approx(seconds))]
