"""The same bytes of the model on any number of ranks, in an order by shards, of images of any shape, of several labels.

That a folder and what lists or packs its images are the same data: tests/unit/test_sources.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.made_data import KINDS, SPLIT, make_photos, write_csv

CASE = {"image_size": 16, "batch_size": 4, "epochs": 2, "save_every_steps": 1, "keep_last": 99, "augmentation": "auto"}


@pytest.fixture(scope="module")
def train(train_on_ranks, tmp_path_factory):
    """Train on a data set with so many ranks; return the run's folder."""

    def train(data: Path, root: Path, ranks: int, **changes: object) -> Path:
        case = {"data": str(data), "data_root": str(root), "gradient_accumulation_steps": 2 // ranks}
        return train_on_ranks(ranks, tmp_path_factory.mktemp("logs"), **CASE | SPLIT | case | changes)

    return train


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("data") / "photos")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_by_shards_any_number_of_ranks_and_a_killed_run_give_the_same_bytes(train, photos, tmp_path, ranks):
    data = KINDS["tar"](photos, tmp_path / "data")
    by_shards = {"order": "shards", "shuffle_window": 6, "batch_size": 2}
    one = train(data, photos, 1, **by_shards, gradient_accumulation_steps=4)
    killed = one / "checkpoints" / f"step-00000-{2:07}"
    for resume in ({}, {"resume": str(killed)}):
        several = train(data, photos, ranks, **by_shards, gradient_accumulation_steps=4 // ranks, **resume)
        assert (several / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()


def test_images_of_another_shape_give_the_same_bytes_on_any_number_of_ranks(train, photos):
    shaped = {"image_size": "16x32", "eval_image_size": "20x32", "random_erasing": 0.5, "cutmix": 0.5}
    one, two = (train(photos, photos, ranks, **shaped) for ranks in (1, 2))
    resumed = train(photos, photos, 2, resume=str(one / "checkpoints" / f"step-00000-{3:07}"), **shaped)
    for file in ("model.safetensors", "evaluation/scores.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes() == (resumed / file).read_bytes(), file


@pytest.mark.slow
def test_several_labels_give_the_same_bytes_and_scores_on_any_number_of_ranks(train, photos, tmp_path):
    paths = sorted(photos.rglob("*.*"))
    rows = [{"path": str(path), "labels": f"{path.parent.name};{path.suffix[1:]}"} for path in paths]
    rows[0]["labels"] = ""
    table = write_csv(tmp_path / "several.csv", rows)
    several = {"task": "multilabel", "label_column": "labels", "best_by": "map", "mixup": 0.3, "loss": "bce"}
    one, two = (train(table, photos, ranks, **several) for ranks in (1, 2))
    resumed = train(table, photos, 1, resume=str(two / "checkpoints" / f"step-00000-{3:07}"), **several)
    for file in ("model.safetensors", "evaluation/scores.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes() == (resumed / file).read_bytes(), file
