"""A column, a part or a group is used, or said not to be, by every source; a part alone can be evaluated."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from made_data import write_csv

from tests.kit import png, write_parquet, write_tar
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, list_images, load_data
from zerovision.training.data.division import parts_there
from zerovision.training.data.images import FactColumns, find_column

pytest.importorskip("pyarrow.parquet")


def make_table(root: Path, rows: Sequence[dict]) -> Path:
    root.mkdir()
    for row in rows:
        (root / row["path"]).write_bytes(png((0, 9, 9)))
    return write_csv(root / "list.csv", [*rows])


def columns_of(rows: Sequence[dict]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def make_table_of_parquet(root: Path, rows: Sequence[dict]) -> Path:
    make_table(root, rows)
    return write_parquet(root / "list.parquet", columns_of(rows))


def make_parquet(root: Path, rows: Sequence[dict]) -> Path:
    columns = columns_of(rows)
    columns["image"] = [{"bytes": png((n, 9, 9)), "path": path} for n, path in enumerate(columns.pop("path"))]
    return write_parquet(root / "all.parquet", columns).parent


def make_json(root: Path, rows: Sequence[dict]) -> Path:
    members = {}
    for n, row in enumerate(rows):
        members |= {f"{n:03}.png": png((n, 9, 9)), f"{n:03}.json": json.dumps(row).encode()}
    return write_tar(root / "all.tar", members).parent


SOURCES: dict[str, Callable] = {
    "table": make_table,
    "table in Parquet": make_table_of_parquet,
    "Parquet with images": make_parquet,
    "tar with JSON": make_json,
}


def rows(**more: Sequence) -> list[dict]:
    """Return 24 images of two classes, with more columns whose values are repeated."""
    return [
        {"path": f"{n:03}.png", "label": "ab"[n % 2]} | {name: values[n % len(values)] for name, values in more.items()}
        for n in range(24)
    ]


def load(data: Path, **options):
    return load_data(DataOptions(data=str(data), image_size=16, **options))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("split", ["train", "train", "val", "val", "test", "test"]),
        ("Split", ["train", "train", "Validation", "Validation", "holdout", "holdout"]),
        ("SUBSET ", ["training", "training", "valid", "dev", "test", "test"]),
    ],
)
def test_parts_are_those_of_the_column_in_any_case(source, column, values, tmp_path):
    pair = load(SOURCES[source](tmp_path / "set", rows(**{column: values})))
    assert {name: len(part) for name, part in pair.parts.items()} == {"train": 8, "val": 8, "test": 8}
    assert pair.notes == []


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "values", [[False, False, True, True], ["0", "0", "1", "1"], ["False", "false", "TRUE", "true"]]
)
def test_is_valid_tells_what_is_validated_on(source, values, tmp_path):
    pair = load(SOURCES[source](tmp_path / "set", rows(Is_Valid=values)))
    assert (pair.train_counts, pair.val_counts) == ([6, 6], [6, 6])


@pytest.mark.parametrize("source", SOURCES)
def test_groups_stay_together_and_weights_weigh(source, tmp_path):
    data = rows(GROUP=[*(["p1"] * 8), *(["p2"] * 8), *(["p3"] * 8)], Weight=[1, 1, 3, 3])
    pair = load(SOURCES[source](tmp_path / "set", data))
    assert sorted((len(pair.train), len(pair.val))) == [8, 16], "one of three patients is held out"
    weights = pair.train.source.loss_weights
    assert sorted(set(weights.tolist())) == [0.5, 1.5]
    assert pair.notes == []


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("more", "whole"), [({"split": ["test"]}, "test"), ({}, "all")])
def test_weights_of_what_is_evaluated_may_all_be_0(source, more, whole, tmp_path):
    """They count in training only."""
    options = DataOptions(data=str(SOURCES[source](tmp_path / "set", rows(weight=[0], **more))), image_size=16)
    assert len(load_data(options, whole).val) == 24
    with pytest.raises(UserError, match=r"all training images have weight 0|has no training images"):
        load_data(options)
    with pytest.raises(UserError, match=f"--data {options.data}: the part val is empty: at least one labeled image"):
        load_data(options, "val")


def test_weights_whose_sum_no_number_holds_are_refused(tmp_path):
    """The largest that is taken may occur in every row, beside the smallest."""
    with pytest.raises(UserError, match="weight is '1e308'; expected a number from 0 to 1e"):
        load(make_table(tmp_path / "large", rows(weight=[1, "1e308"])))
    pair = load(make_table(tmp_path / "set", rows(weight=[1e100, 5e-324])))  # of class a, of class b
    large = pytest.approx(sum(pair.train_counts) / pair.train_counts[0])
    assert [*pair.train.source.loss_weights] == [large] * pair.train_counts[0] + [0] * pair.train_counts[1]


@pytest.mark.parametrize("fold", [1, 2])
def test_one_group_cannot_be_divided_into_folds(fold, tmp_path):
    left = "training" if fold == 1 else "validation"
    with pytest.raises(UserError, match=f"fewer images or groups than --folds, so none is left for {left}"):
        load(make_table(tmp_path / "set", rows(group=["p1"])), folds=2, fold=fold)


@pytest.mark.parametrize("source", SOURCES)
def test_columns_that_are_not_used_are_named_in_one_note(source, tmp_path):
    data = rows(patient=["p1"], is_valid=[True, True, False, False], split=["train", "train", "val", "val"], url=["x"])
    pair = load(SOURCES[source](tmp_path / "set", data))
    assert pair.notes == ["columns that are not used: 'patient', 'is_valid', 'url'"]
    assert (pair.train_counts, pair.val_counts) == ([6, 6], [6, 6]), "split goes before is_valid"


@pytest.mark.parametrize("source", SOURCES)
def test_a_class_that_validation_lacks_is_named(source, tmp_path):
    data = [
        row | {"label": "c" if n < 2 else row["label"]} for n, row in enumerate(rows(split=["train"] * 4 + ["val"] * 2))
    ]
    assert "no validation image for 'c'" in load(SOURCES[source](tmp_path / "set", data)).notes


def make_folders(root: Path, names: Sequence[str]) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        for n in range(3):
            (root / name / f"{n}.png").write_bytes(png((n, 9, 9)))
    return root


@pytest.mark.parametrize("source", [*SOURCES, "folder", "test-000.tar"])
def test_a_test_part_alone_can_be_loaded_as_a_whole_and_is_no_training(source, tmp_path):
    if source == "folder":
        data = make_folders(tmp_path / "set", ["test/a", "test/b"])
    elif source == "test-000.tar":
        data = make_json(tmp_path / "set", rows())
        (data / "all.tar").rename(data / "test-000.tar")
    else:
        data = SOURCES[source](tmp_path / "set", rows(split=["test"]))
    options = DataOptions(data=str(data), image_size=16)
    assert parts_there(list_images(options)) == ["test"]
    assert len(load_data(options, "test").val) == (6 if source == "folder" else 24)
    with pytest.raises(UserError, match="has no training images: add a folder or a split named train;"):
        load_data(options)


@pytest.mark.parametrize("names", [["train", "test", "unlabeled"], ["train", "test"], ["val", "testing", "cat", "dog"]])
def test_flat_folders_named_as_parts_are_no_classes(names, tmp_path):
    with pytest.raises(UserError, match=r"has the parts .*, but there are no class folders in them.*--val-part none"):
        load(make_folders(tmp_path / "set", names))
    assert load(tmp_path / "set", val_part="none").class_names == sorted(names)


def test_one_folder_named_as_a_part_is_a_class_and_said_to_be(tmp_path):
    pair = load(make_folders(tmp_path / "set", ["train", "bus", "car"]))
    assert pair.class_names == ["bus", "car", "train"]
    assert pair.notes == ["'train' counts as a class, because no other folder has the name of a part"]


MULTILABEL = {"task": "multilabel", "label_column": "labels"}
LISTS = {
    "semicolons": ["a;b", "b | c", "c", ""],
    "commas": ["a, b", "b,c", "c", "a", "b", ""],
    "blanks": ["a b", "b  c", "c", "a", "b", ""],
    "Python": ["['a', 'b']", "['b', 'c']", "('c',)", "[]"],
    "JSON": ['["a", "b"]', '["c", "b"]', '["c"]', "[]"],
    "without quotes": ["[a, b]", "[b c]", "a", "b", "c", ""],
}


@pytest.mark.parametrize("spelling", LISTS)
def test_several_labels_in_a_cell_are_those_that_others_have_alone(spelling, tmp_path):
    pair = load(make_table(tmp_path / "set", rows(labels=LISTS[spelling])), **MULTILABEL)
    assert pair.class_names == ["a", "b", "c"]
    assert {"a;b", "b;c", "c", ""} <= {*pair.sets.names}


@pytest.mark.parametrize(
    ("cells", "names", "options"),
    [
        (["(1)", "b", "(1);b"], ["(1)", "b"], {}),
        (["a\tb", "a", "b"], ["a", "b"], {}),
        (["New York;Rome", "Rome", "New York", ""], ["New York", "Rome"], {}),
        (["['x;y', 'a']", "a"], "contains ; or", {}),
        (["x;y,a", "a"], "contains ; or", {"label_separator": ","}),
    ],
)
def test_odd_cells_of_several_labels(cells, names, options, tmp_path):
    data = make_table(tmp_path / "set", rows(labels=cells))
    if isinstance(names, list):
        assert load(data, **MULTILABEL, **options).class_names == names
    else:
        with pytest.raises(UserError, match=names):
            load(data, **MULTILABEL, **options)


@pytest.mark.parametrize(
    ("cells", "separator", "names"),
    [
        (["a, b", "c, d"], ",", ["a", "b", "c", "d"]),
        (["a b", "c"], " ", ["a", "b", "c"]),
        (["a b", "c"], ";", ["a b", "c"]),
    ],
)
def test_what_cannot_be_told_is_refused_until_the_separator_is_said(cells, separator, names, tmp_path):
    data = make_table(tmp_path / "set", rows(labels=cells))
    with pytest.raises(UserError, match=r"column labels: '.*' may be one label or several, .*use --task"):
        load(data, **MULTILABEL)
    assert load(data, **MULTILABEL, label_separator=separator).class_names == names


def test_the_column_of_a_name():
    assert find_column(["Label", "label"], "label") == "label"
    assert find_column(["x", " LABEL"], "label") == " LABEL"
    assert find_column(["x"], "label") is None
    columns = FactColumns(["path", "Set", "weight"], ["path"])
    assert (columns.of_facts, columns.unused) == ({"weight": "weight"}, ["Set"])


def test_columns_that_are_classes_have_names_in_the_form_nfc(tmp_path):
    composed, parts = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    data = make_table(tmp_path / "set", rows(**{parts: ["1", "0"], "b": ["0", "1"]}))
    for given in (composed, parts):
        assert load(data, task="multilabel", label_column=f"{given}, b").class_names == [composed, "b"]
