"""A training that diverged: when an epoch counts so, and where the best weights are in a run that goes on elsewhere."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.kit import new_model, save_built, train
from tests.training.commands import read_metrics
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import EVALUATION, TEST_EVALUATION, RunFolder
from zerovision.training.config import TrainConfig
from zerovision.training.epoch import find_divergence
from zerovision.training.messages import _result
from zerovision.training.observe.best_weights import bring_along, epoch_of
from zerovision.training.observe.evaluation import read_scores, write_scores
from zerovision.training.run import _deliver

PREPROCESSING = Preprocessing(32, None, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize(
    ("train_loss", "val_loss", "classes", "why"),
    [
        (2.3, 2.3, 10, None),
        (2.3, 22.9, 10, None),
        (2.3, 23.1, 10, "the validation loss is 23.1; a uniform guess has 2.3"),
        (194.0, 3.07, 10, "the training loss is 194; a uniform guess has 2.3"),
        (7.0, 69.0, 1000, None),
        (0.0, 6.9, 1, None),
        (1.0, math.nan, 10, "the validation loss is nan"),
        (math.inf, 1.0, 10, "the training loss is inf"),
    ],
)
def test_an_epoch_has_diverged_beyond_ten_times_the_loss_of_a_guess(train_loss, val_loss, classes, why):
    assert find_divergence(train_loss, val_loss, classes) == why


@pytest.fixture
def folders(tmp_path):
    """(a run whose best epoch is 2, the folder of a run that goes on from it)."""
    old, new = RunFolder(tmp_path, "old"), RunFolder(tmp_path, "new")
    for folder in (old, new):
        folder.checkpoints.mkdir(parents=True)
    built = new_model("basic_cnn", num_classes=2, image_size=32)
    save_built(old.weights, built, class_names=["a", "b"], preprocessing=PREPROCESSING, extra={"epoch": 2})
    write_scores(old.path / EVALUATION, {"epoch": 2, "top1": 0.5})
    return old, new


def result(folder, schedule="cosine", head_epochs=0, **progress):
    world = SimpleNamespace(is_main=True)
    state = SimpleNamespace(progress=Progress(epoch=4, best_score=0.5, **progress))
    run_of = {"config": TrainConfig(schedule=schedule), "folder": folder, "data": SimpleNamespace(val=range(9))}
    run_of["model"] = SimpleNamespace(head_epochs=head_epochs)
    return _result(SimpleNamespace(world=world, state=state, **run_of))


def test_the_best_weights_come_along_to_a_run_that_goes_on_elsewhere(folders):
    old, new = folders
    (missing,) = result(new, best_epoch=2)
    assert missing == "top-1 50.00 % on 9 held-out images (best epoch: 2; its weights are not in this run's folder)"
    write_scores(new.path / TEST_EVALUATION, {"epoch": 2, "top1": 0.25})  # of the weights that are replaced
    said = bring_along(old.checkpoints / "step-00003-0000000", new, best_epoch=2)
    assert said == f"the weights of the best epoch so far, epoch 2, are copied from {old.weights}"
    assert new.weights.read_bytes() == old.weights.read_bytes()
    assert read_scores(new.path / EVALUATION) == {"epoch": 2, "top1": 0.5}
    expected = {"checkpoints", "evaluation", "model.safetensors", "class_map.txt"}
    assert {path.name for path in new.path.iterdir()} == expected
    assert result(new, best_epoch=2) == [
        "top-1 50.00 % on 9 held-out images (best epoch: 2; its weights are saved)",
        f"weights      {new.weights}",
    ]


def test_a_run_that_is_all_head_epochs_says_so_at_its_end(folders):
    epochs = TrainConfig().epochs
    (said, _) = result(folders[1], best_epoch=2, head_epochs=epochs)
    assert said.startswith(f"only the head was trained, for its {epochs} epochs; to train the backbone")
    assert len(result(folders[1], best_epoch=2, head_epochs=epochs - 1)) == 1


def test_other_weights_stay_where_they_are(folders, monkeypatch):
    old, new = folders
    checkpoint = old.checkpoints / "step-00003-0000000"
    assert bring_along(checkpoint, new, best_epoch=0) is None
    assert bring_along(checkpoint, old, best_epoch=2) is None
    assert bring_along(checkpoint, new, best_epoch=1) == (
        f"note: {old.weights} does not contain the weights of the best epoch so far, epoch 1"
    )

    def full_disk(source, target):
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("zerovision.training.observe.best_weights.shutil.copyfile", full_disk)
    assert "could not be copied" in bring_along(checkpoint, new, best_epoch=2)
    assert [path.name for path in new.path.iterdir()] == ["checkpoints"]
    assert epoch_of(new.weights) is None


@pytest.mark.parametrize(("best_epoch", "has_card"), [(2, True), (1, False), (0, False)])
def test_a_card_is_of_the_runs_own_weights(folders, best_epoch, has_card):
    """Not of those of epoch 2 of the run before, if this one went back to epoch 1 and found nothing better."""
    state = SimpleNamespace(progress=Progress(epoch=4, best_epoch=best_epoch))
    data = SimpleNamespace(parts={"val": SimpleNamespace(source=None)})
    settings, loggers = SimpleNamespace(report=True), SimpleNamespace(delivered=lambda: None)
    context = SimpleNamespace(folder=folders[0], state=state, data=data, config=settings, loggers=loggers)
    cards = []
    _deliver(context, lambda *_, with_card, **_others: cards.append(with_card) or [], has_finished=True)
    assert cards == [has_card]


def test_the_last_lines_name_divergence(folders):
    old, _ = folders
    first, *rest = result(old, best_epoch=2, diverged_epochs_in_row=2)
    assert first.startswith("the training diverged in epoch 3: start a new run with a lower --learning-rate")
    assert rest == result(old, best_epoch=2)
    assert result(old, diverged_epochs_in_row=1)[1:] == ["no weights are saved: every epoch diverged"]
    assert result(old) == ["no weights are saved: no epoch has a finite top-1"]


def test_an_epoch_of_which_no_step_was_applied_has_no_training_loss_and_has_not_diverged(tmp_path, monkeypatch):
    broken = lambda logits, batch: logits.float().sum(1) * math.nan  # noqa: E731
    monkeypatch.setattr("zerovision.training.tasks.labels.build_loss", lambda *_, **__: broken)
    for count in ("FAKE_TRAIN_IMAGES", "FAKE_VAL_IMAGES"):
        monkeypatch.setattr(f"zerovision.training.data.arrays.{count}", 16)
    folder = train(tmp_path, data="fake", image_size=8, batch_size=8, max_bad_steps=0)
    (epoch,) = read_metrics(folder, "epoch")
    assert epoch["train_loss"] is epoch["train_top1"] is None  # as JSON has it
    assert math.isfinite(epoch["val_loss"])
