"""Going on with another number of epochs: what a longer run goes back to, and what the log says of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import ALONE, newest, write_checkpoint

from tests.kit import new_model, train
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import WEIGHTS, RunFolder
from zerovision.training.checkpoint.manifest import MANIFEST_FILE, read_manifest
from zerovision.training.checkpoint.weights import save_weights
from zerovision.training.config import TrainConfig
from zerovision.training.observe.best_weights import keep_finished
from zerovision.training.resume import before_decay, resumed

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
