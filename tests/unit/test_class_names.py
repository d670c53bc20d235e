"""A label is what was written: every source gives the same class names, or the same refusal, for each spelling."""

from __future__ import annotations

import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from made_data import write_csv
from range_server import RangeServer

from tests.kit import png, write_parquet, write_tar
from zerovision.planning.data_check import check_data
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.class_names import label_of, notes_on_names, number_classes, read_class_names

pytest.importorskip("pyarrow.parquet")
EACH = 3  # images of each label


def rows(labels: Sequence) -> list[tuple[str, bytes, object]]:
    """Return name, content and label of each image."""
    return [
        (f"{n:03}.png", png((n % 256, 9, 9)), label)
        for n, label in enumerate(label for label in labels for _ in range(EACH))
    ]


def make_folder(root: Path, labels: Sequence[str]) -> Path:
    for name, content, label in rows(labels):
        folder = Path(os.fsdecode(os.fsencode(root) + b"/" + encoded(label)))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return root


def encoded(label: object) -> bytes:
    return str(label).encode("utf-8", "surrogateescape")


def make_csv(root: Path, labels: Sequence[str]) -> Path:
    root.mkdir(exist_ok=True)
    for name, content, _ in rows(labels):
        (root / name).write_bytes(content)
    file = write_csv(root / "list.csv", [{"path": "p", "label": "l"}])
    lines = [b"path,label", *(name.encode() + b',"' + encoded(label) + b'"' for name, _, label in rows(labels))]
    file.write_bytes(b"\n".join([*lines, b""]))
    return file


def make_tar(root: Path, suffix: str, facts: Callable[[object], bytes], labels: Sequence) -> Path:
    members = {}
    for name, content, label in rows(labels):
        members |= {name: content, name[:-4] + suffix: facts(label)}
    return write_tar(root / "data.tar", members).parent


def make_cls(root: Path, labels: Sequence) -> Path:
    return make_tar(root, ".cls", encoded, labels)


def make_json(root: Path, labels: Sequence) -> Path:
    return make_tar(root, ".json", lambda label: encoded(json.dumps({"label": label}, ensure_ascii=False)), labels)


def label_column(labels: Sequence) -> dict[str, list]:
    if any("\udc80" <= mark <= "\udcff" for label in labels if isinstance(label, str) for mark in label):
        labels = [encoded(label) for label in labels]
    return {"label": [label for label in labels for _ in range(EACH)]}


def make_parquet(root: Path, labels: Sequence, names: Sequence[str] = ()) -> Path:
    images = [{"bytes": content, "path": name} for name, content, _ in rows(labels)]
    return write_parquet(root / "all.parquet", {"image": images} | label_column(labels), names).parent


def make_parquet_of_paths(root: Path, labels: Sequence) -> Path:
    make_csv(root, ["x"] * len(labels))
    return write_parquet(root / "list.parquet", {"path": [name for name, *_ in rows(labels)]} | label_column(labels))


def make_npz(root: Path, kind: str, labels: Sequence, **more) -> Path:
    y = np.array([encoded(label) if kind == "S" else label for label in labels for _ in range(EACH)])
    y = y.astype("S") if kind == "S" else y
    x = np.arange(len(y) * 64, dtype=np.uint8).reshape(-1, 8, 8)
    np.savez(root.with_suffix(".npz"), x_train=x, y_train=y, x_test=x, y_test=y, **more)
    return f"npz:{root}.npz"


TEXT_SOURCES: dict[str, Callable] = {
    "folder": make_folder,
    "table": make_csv,
    "tar with .cls": make_cls,
    "tar with .json": make_json,
    "Parquet": make_parquet,
    "Parquet of bytes": lambda root, labels: make_parquet(root, [encoded(label) for label in labels]),
    "Parquet of paths": make_parquet_of_paths,
    "npz of U": lambda root, labels: make_npz(root, "U", labels),
    "npz of S": lambda root, labels: make_npz(root, "S", labels),
}
NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
# The labels as written; the names, in any order; what the one note on them says, if there is one.
SPELLINGS: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "zeros in front": (["001", "002", "010"], ["001", "002", "010"], ""),
    "post codes": (["10001", "94105"], ["10001", "94105"], ""),
    "one to ten": ([*map(str, range(1, 11))], [*map(str, range(1, 11))], ""),
    "years": (["1990", "2001"], ["1990", "2001"], ""),
    "twenty digits": (["12345678901234567890", "2"], ["12345678901234567890", "2"], ""),
    "fractions": (["1.0", "2.0"], ["1.0", "2.0"], "all are numbers such as 1.0"),
    "measurements": (["0.37", "1.25"], ["0.37", "1.25"], "if they are measurements, use another --label-column"),
    "truth": (["True", "False"], ["True", "False"], ""),
    "blanks at the ends": (["cat", "cat ", " cat", "dog\t"], ["cat", "dog"], ""),
    "blanks of other kinds": (["cat\N{NO-BREAK SPACE}", "\N{IDEOGRAPHIC SPACE}dog"], ["cat", "dog"], ""),
    "a byte-order mark": (["\ufeffcat", "dog"], ["cat", "dog"], ""),
    "Unicode forms": ([NFC, NFD, "tea"], [NFC, "tea"], ""),
    "nothing": (["nan", "None", "x"], ["nan", "None", "x"], "'None', 'nan' may mean no label"),
    "case": (["Cat", "cat", "dog"], ["Cat", "cat", "dog"], "'Cat' and 'cat' differ only in case, blanks or digits"),
    "inner blanks": (["ice cream", "icecream"], ["ice cream", "icecream"], "'ice cream' and 'icecream' differ"),
    "one and a fraction": (["1", "1.0"], ["1", "1.0"], "'1' and '1.0' differ"),
    "one and zeros": (["1", "01", "2"], ["1", "01", "2"], "'01' and '1' differ"),
    "several": (["a;b", "c"], ["a;b", "c"], "'a;b' may be several labels"),
    "a list": (["[0, 1]", "[1]"], ["[0, 1]", "[1]"], "'[0, 1]', '[1]' may be several labels"),
    "a comma": (["a, b", "c"], ["a, b", "c"], ""),
    "minus one": (["-1", "1"], ["-1", "1"], "'-1' may mean no label"),
    "line separators": (["cat\u2028big", "dog"], ["cat\u2028big", "dog"], ""),
    "another script": (["猫", "собака"], ["猫", "собака"], ""),
    "a formula": (["'=x", "y"], ["=x", "y"], ""),
}
REFUSED = {
    "no UTF-8": (["caf\udce9", "dog"], r".* is not encoded as UTF-8"),
    "blanks alone": (["  ", "dog"], r".* is empty"),
}


def outcome(data: Path | str, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Return the class names and the notes on them; training and `doctor --check-data` say the same."""
    options = DataOptions(data=str(data), image_size=16)
    options = replace(options, data_root=str(tmp_path / "root")) if "://" in str(data) else options
    try:
        pair = load_data(options)
    except UserError as error:
        with pytest.raises(UserError, match=re.escape(str(error))):
            check_data(options, workers=0)
        raise
    checked = check_data(options, workers=0).datasets
    notes = [note for note in pair.notes if note.startswith("check these class names")]
    assert checked.class_names == pair.class_names
    assert notes == [note for note in checked.notes if note.startswith("check these class names")]
    assert sum(pair.train_counts) + sum(pair.val_counts) >= EACH * len(pair.class_names)
    assert min(pair.train_counts) > 0, "no class is invented"
    return pair.class_names, notes


@pytest.mark.parametrize("source", TEXT_SOURCES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_is_the_same_classes_from_every_source(source, spelling, tmp_path):
    labels, names, note = SPELLINGS[spelling]
    is_plain = source in ("table",) or spelling != "a formula"  # a quote before a formula is a table's
    found, notes = outcome(TEXT_SOURCES[source](tmp_path / "set", labels), tmp_path)
    assert sorted(found) == sorted(names if is_plain else labels)
    assert (len(notes), bool(notes) and note in notes[0]) == ((1, True) if note else (0, False))


@pytest.mark.parametrize("source", TEXT_SOURCES)
@pytest.mark.parametrize("spelling", REFUSED)
def test_a_spelling_is_refused_by_every_source(source, spelling, tmp_path):
    labels, words = REFUSED[spelling]
    with pytest.raises(UserError, match=f"the sample '000': {words}" if source.startswith("tar") else words):
        outcome(TEXT_SOURCES[source](tmp_path / "set", labels), tmp_path)


NUMBER_SOURCES: dict[str, Callable] = {
    "tar with .cls": make_cls,
    "tar with .json": make_json,
    "Parquet": make_parquet,
    "Parquet of paths": make_parquet_of_paths,
    "npz": lambda root, labels: make_npz(root, "i", labels),
}


@pytest.mark.parametrize("source", NUMBER_SOURCES)
@pytest.mark.parametrize("numbers", [[0, 1, 2], [*range(1, 12)], [94105, 10001], [10**17, 5]], ids=str)
def test_numbers_without_names_are_the_distinct_values_in_numeric_order(source, numbers, tmp_path):
    found, notes = outcome(NUMBER_SOURCES[source](tmp_path / "set", numbers), tmp_path)
    assert (found, notes) == ([*map(str, sorted(numbers))], [])


def make_named_tar(root: Path, labels: Sequence, names: Sequence[str]) -> Path:
    (make_cls(root, labels) / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    return root


NAMED_SOURCES: dict[str, Callable] = {
    "classnames.txt": make_named_tar,
    "ClassLabel": make_parquet,
    "class_names": lambda root, labels, names: make_npz(root, "i", labels, class_names=names),
    "class_names of bytes": lambda root, labels, names: make_npz(
        root, "i", labels, class_names=[encoded(name) for name in names]
    ),
}


@pytest.mark.parametrize("source", NAMED_SOURCES)
def test_numbers_index_the_names_that_are_given(source, tmp_path):
    make = NAMED_SOURCES[source]
    found, _ = outcome(make(tmp_path / "set", [0, 2, 1], ["wren ", NFD, "ant"]), tmp_path)
    assert found == ["wren", NFC, "ant"], "in the order of their numbers"
    with pytest.raises(UserError, match=r"has 2 class names and the label 2; expected a number below 2"):
        outcome(make(tmp_path / "few", [0, 2, 1], ["wren", "ant"]), tmp_path)
    with pytest.raises(UserError, match=r" 1 repeated class names, such as 'crane'"):
        outcome(make(tmp_path / "twice", [0, 2, 1], ["crane", "ant", "crane"]), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfcat \r\ndog\r\nfox\r\n",
        b"cat\rdog\rfox",
        b"cat\x0b\ndog\x0c\nfox\n\n",
        "cat\N{NO-BREAK SPACE}\n dog\nfox\u2028\n".encode(),
    ],
)
def test_ends_of_lines_in_classnames_move_no_name(content):
    assert read_class_names(content, "classnames.txt") == ["cat", "dog", "fox"]


def test_names_that_no_line_can_give_are_refused():
    assert read_class_names("big\u2028cat\ndog\n".encode(), "f") == ["big\u2028cat", "dog"]
    for content, words in {
        b"caf\xe9\ndog\n": "'f' is not encoded as UTF-8",
        b"cat\n\ndog\n": "'f': line 2 is empty",
    }.items():
        with pytest.raises(UserError, match=words):
            read_class_names(content, "f")


@pytest.mark.parametrize("value", [0.5, 1.0, Decimal("1.5"), np.float32(2), [0], [], (1,), {"a": 1}, np.arange(3), -2])
def test_what_is_no_label_is_refused(value):
    with pytest.raises(ValueError, match="the label is"):
        label_of(value)


def test_labels_of_types():
    values = [3, np.int8(3), True, np.bool_(False), b"cat ", np.bytes_(b"cat"), np.str_("cat"), None, -1]
    assert [label_of(value) for value in values] == [3, 3, "True", "False", "cat", "cat", "cat", None, None]


def test_names_beside_numbers_are_sorted_as_text_and_names_may_be_labels():
    assert number_classes({1, "b", 10, 2}, (), "set") == (["1", "10", "2", "b"], {1: 0, "b": 3, 10: 1, 2: 2})
    assert number_classes({"b", "a"}, ["b", "c", "a"], "set") == (["b", "c", "a"], {"b": 0, "a": 2})
    with pytest.raises(UserError, match=r"set has the label 'x', which is not one of the 2 class names: 'a', 'b'"):
        number_classes({"a", "x"}, ["a", "b"], "set")


def test_many_doubtful_names_are_one_line():
    (note,) = notes_on_names([f"{letter}{n}" for n in range(9) for letter in "aA"])
    assert note.count(" and ") == 6
    assert "and 4 more differ" in note


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("Parquet", "the label is a list"),
        ("tar with .json", "the sample '000': the label is a list"),
        ("npz", r"y_train is int64 \[6, 2\]"),
    ],
)
def test_lists_as_labels_are_refused(source, words, tmp_path):
    make = TEXT_SOURCES | NUMBER_SOURCES
    with pytest.raises(UserError, match=words):
        outcome(make[source](tmp_path / "set", [[0, 1], [1, 1]]), tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_json, "the label is 0.5, a number with a fraction"),
        (make_parquet, "column label has numbers with a fraction"),
        (make_parquet_of_paths, "the label is 0.5, a number with a fraction"),
    ],
)
def test_numbers_with_a_fraction_are_refused_by_type(make, words, tmp_path):
    with pytest.raises(UserError, match=words):
        outcome(make(tmp_path / "set", [0.5, 1.5]), tmp_path)


def test_a_table_and_a_tar_behind_a_url_have_the_same_names(tmp_path):
    pytest.importorskip("aiohttp")
    labels = ["001", "cat ", NFD]
    (tmp_path / "served").mkdir()
    make_csv(tmp_path / "served/csv", labels)
    make_json(tmp_path / "served/tar", labels)
    server = RangeServer(tmp_path / "served")
    try:
        for path in ("csv/list.csv", "tar"):
            assert outcome(server.url(path), tmp_path) == (["001", NFC, "cat"], [])
    finally:
        server.stop()
        shutil.rmtree(tmp_path / "served")
