"""Folds: groups and equal files in one, as even as scikit-learn's, and those of before where each image is alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_data import write_csv
from PIL import Image
from sklearn.model_selection import StratifiedGroupKFold

from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.division import folds_of, join_copies, unit_hashes
from zerovision.training.data.reading.files import ImageError


def folds(units: list[str], labels: list[str], count: int, seed: int = 0) -> np.ndarray:
    """The fold of each image, after a check that each unit is in one."""
    numbers = [sorted({*labels}).index(label) for label in labels]
    found = folds_of(unit_hashes(units, seed), np.array(numbers), count)
    assert len({*zip(units, found.tolist(), strict=True)}) == len({*units})
    return found


@pytest.mark.parametrize("seed", [0, 3])
def test_where_each_image_is_alone_a_fold_is_a_piece_of_the_order_of_hashes(seed):
    paths = [f"{label}/{number}.png" for label, count in (("a", 23), ("b", 11)) for number in range(count)]
    found = folds(paths, [path[0] for path in paths], 4, seed)
    for label in "ab":
        own = [path for path in paths if path[0] == label]
        ranked = sorted(zip(unit_hashes(own, seed).tolist(), own, strict=True))
        for fold in range(4):
            piece = ranked[len(ranked) * fold // 4 : len(ranked) * (fold + 1) // 4]
            assert {path for _, path in piece} == {
                p for p, at in zip(paths, found, strict=True) if at == fold and p[0] == label
            }


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("draw", range(6))
def test_groups_are_divided_as_evenly_as_by_scikit_learn(draw, mixed):
    """Patients with 1 to 40 images, of one class or of several, and some images of nobody."""
    random = np.random.default_rng(draw)
    groups, labels = [], []
    for patient in range(40):
        own = random.choice(3, p=[0.6, 0.3, 0.1])
        for _ in range(int(random.geometric(0.1))):
            groups.append(f"patient {patient}")
            labels.append(random.choice(3) if mixed else own)
    for image in range(30):
        groups.append(f"{image}.png")
        labels.append(random.choice(3))
    found = folds(groups, list(map(str, labels)), 5)
    theirs = np.zeros(len(groups), dtype=int)
    splitter = StratifiedGroupKFold(5, shuffle=True, random_state=0)
    for fold, (_, test) in enumerate(splitter.split(groups, labels, groups)):
        theirs[test] = fold

    def unevenness(folds: np.ndarray) -> float:
        counts = np.array(
            [[np.sum((folds == fold) & (np.array(labels) == label)) for label in range(3)] for fold in range(5)]
        )
        return float((counts / counts.sum(0)).std(0).sum())

    assert unevenness(found) <= 1.25 * unevenness(theirs) + 0.01


def test_equal_files_are_in_one_fold_whatever_they_are_called(tmp_path):
    """In a folder and in its table, also with another label, and with the group of one; only equal sizes are read."""
    random, rows = np.random.default_rng(0), []
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(24):
            path = tmp_path / label / f"{number}.bmp"
            Image.fromarray(random.integers(0, 255, (4 + number // 12, 4, 3), dtype=np.uint8)).save(path)
            rows.append({"path": f"{label}/{number}.bmp", "label": label, "group": "g" if number < 2 else ""})
    for copy, original in (("a/0.bmp", "a/9.bmp"), ("b/4.bmp", "a/9.bmp"), ("b/13.bmp", "b/20.bmp")):
        (tmp_path / copy).write_bytes((tmp_path / original).read_bytes())
    table = write_csv(tmp_path / "list.csv", [{"path": row["path"], "label": row["label"]} for row in rows])

    def held_out_names(data: Path, count: int, fold: int) -> set[str]:
        val = load_data(DataOptions(data=str(data), folds=count, fold=fold, image_size=8, cache="off")).val
        return {Path(val.source.name(index)).relative_to(tmp_path).as_posix() for index in range(len(val))}

    for count in (2, 3, 5):
        held_out = {}
        for data in (tmp_path, table):
            for fold in range(1, count + 1):
                names = held_out_names(data, count, fold)
                assert held_out.setdefault(fold, names) == names, "the folder and the table have the same folds"
                for together in ({"a/0.bmp", "a/9.bmp", "b/4.bmp"}, {"b/13.bmp", "b/20.bmp"}):
                    assert len(names & together) in (0, len(together))
        sizes = Counter(name[0] for names in held_out.values() for name in names)
        assert sizes == {"a": 24, "b": 24}
        assert max(map(len, held_out.values())) - min(map(len, held_out.values())) <= 2
    names = held_out_names(write_csv(table, rows), 3, 1)
    together = {"a/0.bmp", "a/1.bmp", "b/0.bmp", "b/1.bmp", "a/9.bmp", "b/4.bmp"}
    assert len(names & together) in (0, 6)


def test_an_unreadable_file_is_no_copy():
    def missing() -> bytes:
        raise ImageError("x.png", "no such file")

    units = unit_hashes([f"{number}.png" for number in range(4)], 0)
    names = "{}.png".format
    joined = join_copies(units, np.full(4, 7), names, lambda place: missing() if place < 2 else b"same")
    assert joined.tolist() == [*units[:2].tolist(), units[2], units[2]]
    found = folds_of(joined, np.zeros(4, dtype=np.int64), 3)
    assert found[2] == found[3]
    assert sorted(Counter(found.tolist()).values()) == [1, 1, 2]


def test_only_files_of_equal_size_are_read():
    units = unit_hashes(["a", "b", "c"], 0)
    unread = join_copies(units, np.array([1, 2, 3]), str, lambda place: pytest.fail("read without need"))
    assert unread.tolist() == units.tolist()
