"""Tar and Parquet files of images, and their packing: foreign ones, their indexes, and crafted ones."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kit import png, write_parquet, write_tar
from tests.unit.made_data import KINDS, make_photos
from zerovision.delivery.pack import pack
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, archives, load_data
from zerovision.training.data.archives import index_of
from zerovision.training.data.reading.remote_files import checksum_of
from zerovision.training.data.sampler import build_plan
from zerovision.training.data.tar_shards import TAR


def load(data: Path, **values):
    return load_data(DataOptions(data=str(data), data_root=str(data.parent / "root"), image_size=16, **values))


def labelled(key: str, label: str = "a", suffix: str = ".png", colour: str = "red") -> dict[str, bytes]:
    return {f"{key}.cls": label.encode(), f"{key}{suffix}": png(colour)}


def samples(labels: str) -> dict[str, bytes]:
    """Return the members of a tar file of red images with these labels."""
    return {name: one for n, label in enumerate(labels) for name, one in labelled(f"{n:02}", label).items()}


def named(dataset) -> dict[str, int]:
    return {dataset.source.images.path(index): int(dataset.source.labels[index]) for index in range(len(dataset))}


def test_foreign_shards_of_parts_numbers_and_names_of_classes(tmp_path):
    """As WebDataset, CLIP's data sets and img2dataset write them."""
    for part, shard in (("train", 0), ("train", 1), ("val", 0)):
        members = {"./readme.txt": b"", "lone.json": b"{}"}
        for number in range(4):
            key = f"./{part}{shard}/{number:06}.a"
            members |= {f"{key}.seg.png": png("blue"), f"{key[:-2]}.cls": f"{number % 3}\n".encode()}
            members |= {f"{key[:-2]}.JPG": png(), f"{key[:-2]}.txt": b"a caption"}
        write_tar(tmp_path / "set" / f"{part}-{shard:05}-of-00002.tar", members, format=tarfile.GNU_FORMAT)
    pair = load(tmp_path / "set")
    assert pair.class_names == ["0", "1", "2"]
    assert named(pair.val) == {f"./val0/{number:06}.JPG": number % 3 for number in range(4)}
    assert len(pair.train) == 8
    assert pair.notes == [
        "skipped 6 samples without an image or label",
        "skipped 12 images such as './train0/000000.a.seg.png', because a key ends at the first dot of a name: "
        "remove the other dots from the names",
    ]
    assert pair.train.source.name(0) == f"{tmp_path}/set/train-00000-of-00002.tar/./train0/000000.JPG"
    torch.testing.assert_close(pair.train.source.read(0)[:, 0, 0], torch.tensor([255, 0, 0], dtype=torch.uint8))
    (tmp_path / "set" / "classnames.txt").write_text("cat\ndog\nfish\n")
    assert load(tmp_path / "set").class_names == ["cat", "dog", "fish"]


@pytest.mark.parametrize("place", ["set/train/0.tar set/val/0.tar", "set/data/train-0.tar set/data/val-0.tar"])
def test_folders_of_parts_are_looked_into(tmp_path, place):
    for file, count in zip(place.split(), (3, 2), strict=True):
        facts = {f"{n}.json": json.dumps({"label": f"c{n % 2}"}).encode() for n in range(count)}
        write_tar(tmp_path / file, dict(sorted((facts | {f"{n}.png": png() for n in range(count)}).items())))
    pair = load(tmp_path / "set")
    assert (len(pair.train), len(pair.val), pair.class_names) == (3, 2, ["c0", "c1"])


def test_one_file_is_divided_and_a_folder_with_classes_beside_a_tar_file_stays_a_folder(tmp_path):
    file = write_tar(tmp_path / "all.tar", samples("01" * 10))
    pair = load(file)
    assert (len(pair.train) + len(pair.val), sum(pair.val_counts) in range(2, 7)) == (20, True)
    assert len(load_data(DataOptions(data=str(file)), "all").val) == 20
    photos = make_photos(tmp_path / "photos", 4)
    file.rename(photos / "all.tar")
    assert load(photos).class_names == ["ant", "bee", "cat"]


def facts(index: archives.Index) -> list:
    """All that an index says, as what can be compared."""
    images = index.images
    columns = [images[name].tolist() for name in images.columns]
    return [index[1:], images.words, columns, bytes(images.text.numpy())]


def test_an_index_is_beside_its_tar_file_or_below_the_root_and_made_anew_when_that_has_changed(tmp_path, monkeypatch):
    file = write_tar(tmp_path / "all.tar", samples("ab"))
    scans, plain = [], TAR
    kind = plain._replace(scan=lambda path: scans.append(path) or plain.scan(path))
    cache = tmp_path / "cache"
    indexes = [archives.open_index(kind, file, cache) for _ in range(2)]
    assert facts(indexes[0]) == facts(indexes[1])
    assert (len(scans), index_of(file).is_file(), cache.exists()) == (1, True, False)
    sound = index_of(file).read_bytes()
    with np.load(io.BytesIO(sound)) as content:
        arrays = dict(content)
    changed = (
        arrays | {"of_place": arrays["of_place"][:1]},
        arrays | {"of_start": arrays["of_start"] + 3},
        arrays | {"of_label": arrays["of_label"] + 1},
        arrays | {"of_weight": -arrays["of_weight"]},
        arrays | {"of_size": arrays["of_size"].astype(object)},
        arrays | {"facts": np.frombuffer(b"[" * 100_000, dtype=np.uint8)},
        arrays | {"facts": np.frombuffer(bytes(arrays["facts"]).replace(b'"b"', b"[1]"), dtype=np.uint8)},
        {name: array for name, array in arrays.items() if name != "text"},
    )
    for number, damage in enumerate((b"", b"{}", sound[:-40], sound[:200] + bytes(20) + sound[220:], *changed)):
        if isinstance(damage, dict):
            np.savez(tmp_path / "damaged.npz", **damage)
            damage = (tmp_path / "damaged.npz").read_bytes()
        index_of(file).write_bytes(damage)
        assert facts(archives.open_index(kind, file, cache)) == facts(indexes[0])
        assert len(scans) == number + 2
    write_tar(file, samples("cb"))
    os.utime(file, ns=(0, 1))
    index_of(file).unlink()
    index_of(file).mkdir()  # nothing can be written there, not even by root
    assert archives.open_index(kind, file, cache).images.words["label"][0] == "c"
    assert archives.open_index(kind, file, cache).state[1] == 1
    assert (len(scans), len([*cache.iterdir()])) == (14, 1)
    source = load_data(DataOptions(data=str(file), data_root=str(tmp_path / "root")), "all").train.source
    os.utime(file, ns=(0, 2))
    with pytest.raises(UserError, match=r"all.tar' has changed since the run began"):
        source.read(0)
    file.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        source.read(0)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = max(size, 0), kind
    member.pax_headers = pax or {}
    block = member.tobuf(tarfile.PAX_FORMAT)
    if size < 0:  # in the base-256 form
        block = block[:124] + b"\xff" * 4 + size.to_bytes(8, "big", signed=True) + block[136:]
        total = tarfile.calc_chksums(block)[0]
        block = block[:148] + b"%06o\0 " % total + block[156:]
    return block


def block(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


END = bytes(1024)
IMAGE = header("1.png", len(png())) + block(png())
SOUND = header("1.cls", 1) + block(b"a") + IMAGE
CRAFTED = {
    "empty": (b"", "is not an uncompressed tar file"),
    "no tar": (b"PK" + bytes(2000), "is not an uncompressed tar file"),
    "gzip": (b"\x1f\x8b" + bytes(2000), "is not an uncompressed tar file"),
    "cut off": (SOUND[:-100], "is not an uncompressed tar file"),
    "without an end": (SOUND, "cut off, or damaged at"),
    "damaged header": (SOUND + b"x" * 512 + SOUND + END, "cut off, or damaged at"),
    "huge": (SOUND + header("2.png", 10**15) + END, "is not an uncompressed tar file"),
    "negative": (SOUND + header("2.png", -2048) + END, "is not an uncompressed tar file"),
    "negative in pax": (SOUND + header("2.png", 0, pax={"size": "-1024"}) + END, "is not an uncompressed tar file"),
    "long label": (header("1.cls", 2**21) + block(bytes(2**21)) + IMAGE + END, "is not a label"),
    "no label": (IMAGE + END, "the sample '1' has no label"),
    "deep label": (header("1.json", 99999) + block(b"[" * 99999) + IMAGE + END, "no label"),
    "nothing": (END, "no image in 1 .tar file"),
    "links": (header("1.png", 0, tarfile.SYMTYPE) + header("1.cls", 0, tarfile.LNKTYPE) + END, "no image in"),
    # Members of files that lie one behind the other, as `cat a.tar b.tar` makes them.
    "a photo and a mask": (
        [labelled("1") | {"1.jpg": png()}],
        r"the sample '1' has several images, \.png and \.jpg: choose one with --path-column png",
    ),
    "one key twice in a row": (
        [[*labelled("1").items()] * 2],
        r"the key '1' occurs more than once: all files",
    ),
    "one key appended": (
        [[*labelled("1").items(), *labelled("2").items(), *labelled("1").items()]],
        r"the key '1' occurs more than once.*tar --sort=name",
    ),
    "files by kind": (
        [{"1.png": png(), "2.png": png(), "1.cls": b"a", "2.cls": b"b"}],
        r"the sample '1' has no label.*tar --sort=name",
    ),
    "two archives": ([labelled("1"), labelled("2")], r"continues after its end.*tar --concatenate"),
    "names with dots": (
        [labelled("IMG.1.a") | labelled("IMG.2.b")],
        r"no image in 1 \.tar file \(skipped 2 images such as 'IMG.1.a.png', because a key ends at the first",
    ),
    "an empty label": ([{"1.cls": b"\n", "1.png": png()}], r"the sample '1': the label is empty"),
    "a weight that is none": (
        [{"1.json": b'{"label": "a", "weight": "heavy"}', "1.png": png()}],
        r"the sample '1': weight is 'heavy'; expected a number",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_tar_file_gets_one_line_and_writes_nothing_but_its_index(tmp_path, name):
    content, words = CRAFTED[name]
    file = tmp_path / "all.tar"
    if isinstance(content, list):
        content = b"".join(write_tar(file, members).read_bytes() for members in content)
    file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load(file)
    assert {path.name for path in tmp_path.rglob("*")} <= {"all.tar", "all.tar.index.npz"}


def test_names_that_lead_out_are_names_alone(tmp_path):
    """They are shown, and never opened."""
    members = {"../../1.cls": b"x", "../../1.png": png(), "/etc/2.cls": b"y", "/etc/2.png": png("lime")}
    index = TAR.scan(write_tar(tmp_path / "all.tar", members))
    assert [*index.images.paths()] == ["../../1.png", "/etc/2.png"]
    whole = load_data(DataOptions(data=str(tmp_path / "all.tar"), image_size=16), "all").train.source
    assert [whole.read(index)[:, 0, 0].tolist() for index in range(2)] == [[255, 0, 0], [0, 255, 0]]


def test_packing_refuses_what_it_cannot_keep_and_leaves_nothing(tmp_path, monkeypatch):
    photos, output = make_photos(tmp_path / "photos", 4), tmp_path / "packed"
    (output / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        pack(DataOptions(data=str(photos)), output, 10**6)
    numbers = itertools.count()
    monkeypatch.setattr("zerovision.delivery.pack.digest_of", lambda content: next(numbers))
    with pytest.raises(UserError, match="does not contain what was written to it"):
        pack(DataOptions(data=str(photos)), tmp_path / "other", 10**6)
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "packed"}


def test_arrays_are_packed_as_png(tmp_path):
    done = pack(DataOptions(data="digits", image_size=16), tmp_path / "digits", 10**9)
    assert (done.images, done.shards) == (1797, 2)
    packed = load(tmp_path / "digits", image_channels=1)
    digits = load_data(DataOptions(image_size=16, image_channels=1))
    order = torch.argsort(digits.val.source.labels, stable=True)
    assert torch.equal(packed.val.source.labels, digits.val.source.labels[order])
    for index in (0, 100, 359):
        assert torch.equal(packed.val.source.read(index), digits.val.source.read(int(order[index])))


def test_only_what_is_in_several_shards_has_an_order_by_shards(tmp_path):
    photos = make_photos(tmp_path / "photos")
    for kind, make in KINDS.items():
        data = DataOptions(data=str(make(photos, tmp_path / kind)), data_root=str(photos), image_size=16)
        source = load_data(data).train.source
        config = TrainConfig(data=kind, order="shards", shuffle_window=4)
        if kind == "table":
            said = r"^--order shards: --data table does not consist of several shards: use"
            with pytest.raises(UserError, match=said):
                build_plan(config, source, 1)
            continue
        shards = source.images.shards()[build_plan(config, source, 1).draw_keys(0), 0]
        assert len(np.unique(shards)) > 2
        assert max(len(np.unique(shards[start : start + 4])) for start in range(len(shards) - 4)) < 5
    with pytest.raises(UserError, match="--data digits does not consist of several shards"):
        build_plan(TrainConfig(order="shards"), load_data(DataOptions(image_size=16)).train.source, 1)


def test_parquet_with_bytes_of_any_column_and_without_paths_and_labels(tmp_path):
    images = [{"bytes": png(), "path": None}] * 9 + [{"bytes": None, "path": "elsewhere.png"}]
    file = write_parquet(tmp_path / "a.parquet", {"img": images, "fine": [*"xyxyxyxy", None, "x"]})
    pair = load(file, label_column="fine")
    assert (len(pair.train) + len(pair.val), pair.class_names) == (8, ["x", "y"])
    assert pair.notes[0] == "skipped 2 samples without an image or label"
    assert {*named(pair.train), *named(pair.val)} == {f"a-{number:09}" for number in range(8)}
    with pytest.raises(UserError, match="has the columns img, fine: use --label-column NAME"):
        load(file)
    plain = write_parquet(tmp_path / "b.parquet", {"jpg": [png()] * 8, "fine": [*"xyxyxyxy"], "label": [0, 1] * 4})
    assert load(plain).class_names == ["0", "1"]
    assert load(plain, label_column="fine").class_names == ["x", "y"], "not what the index has of the other column"


def test_a_parquet_table_of_paths_is_read_as_a_csv_table(tmp_path):
    photos = make_photos(tmp_path / "photos")
    paths = sorted(photos.rglob("*.*"))
    columns = {"path": [str(path) for path in paths], "label": [path.parent.name for path in paths]}
    listed = load_data(DataOptions(data=str(write_parquet(tmp_path / "a.parquet", columns)), data_root=str(photos)))
    assert listed.fingerprint == load_data(DataOptions(data=str(photos))).fingerprint


def test_row_groups_are_kept_within_a_bound(tmp_path, monkeypatch):
    images = [{"bytes": png(size=(number + 1, 1)), "path": f"{number:02}.png"} for number in range(40)]
    file = write_parquet(tmp_path / "a.parquet", {"image": images, "label": [0, 1] * 20}, ["no", "yes"])
    monkeypatch.setattr("zerovision.training.data.parquet.CACHE_BYTES", 3 * 4 * len(png()))
    source = load_data(DataOptions(data=str(file)), "all").train.source
    assert [source.read(index).shape[2] for index in range(40)] == [*range(1, 41, 2), *range(2, 41, 2)]
    assert 1 <= len(source.images.archive._groups) <= 3
    copy = pickle.loads(pickle.dumps(source))
    assert (len(copy.images.archive._groups), copy.read(3).shape) == (0, source.read(3).shape)
    os.utime(file, ns=(0, 1))
    with pytest.raises(UserError, match="has changed since the run began"):
        copy.read(20)


def test_a_crafted_parquet_file_gets_one_line(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"image": [png()] * 8, "label": [0, 1] * 4})
    content = file.read_bytes()
    for damaged in (b"", b"PAR1", content[:-50], content[:100] + bytes(60) + content[160:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"is not a readable Parquet file|is damaged in row group"):
            load(file)


def test_parquet_without_pyarrow_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="Parquet files need pyarrow: pip install pyarrow"):
        load(tmp_path / "a.parquet")


def test_one_of_several_images_is_chosen_by_its_extension_and_files_of_macos_are_passed_over(tmp_path):
    members = []
    for n in range(8):
        sample = labelled(f"{n}", "ab"[n % 2], ".jpg") | {f"{n}.mask.png": png("blue"), f"{n}.webp": png("lime")}
        for name, content in sample.items():
            members += [(f"./._{name}", b"Mac OS X"), (f"./{name}", content)]
    file = write_tar(tmp_path / "all.tar", members)
    for extension, colour in (("jpg", [255, 0, 0]), (".WebP", [0, 255, 0]), ("mask.png", [0, 0, 255])):
        pair = load(file, path_column=extension)
        assert len(pair.train) + len(pair.val) == 8
        assert pair.train.source.read(0)[:, 0, 0].tolist() == colour
        assert pair.notes == []
    with pytest.raises(UserError, match=r"has several images, \.jpg and \.webp"):
        load(file)


def test_an_index_is_of_this_file_alone(tmp_path):
    """Of equal size and time, but another file, or the same one written anew: `cp -p`, `tar --mtime`, `mv`."""
    file, other = (tmp_path / name for name in ("all.tar", "other.tar"))
    for place, labels in ((file, "ab"), (other, "xy")):
        write_tar(place, samples(labels * 4))
        os.utime(place, ns=(10**18, 10**18))
    assert load(file).class_names == ["a", "b"]
    shutil.copy2(other, file)
    assert load(file).class_names == ["x", "y"]
    shutil.copy2(write_tar(other, samples("pq" * 4)), tmp_path / "c")
    os.utime(tmp_path / "c", ns=(10**18, 10**18))
    (tmp_path / "c").replace(file)
    assert load(file).class_names == ["p", "q"]


def test_each_row_of_parquet_and_each_sample_of_a_tar_is_an_image_whatever_it_is_called(tmp_path):
    """60 ants and 10 bees of one base name, as the hub's writer leaves it, and shards that count from 0 each."""
    labels = ["ant"] * 60 + ["bee"] * 10
    images = [{"bytes": png(), "path": "image.jpg"} for _ in labels]
    pair = load(write_parquet(tmp_path / "a.parquet", {"image": images, "label": labels}))
    assert [a + b for a, b in zip(pair.train_counts, pair.val_counts, strict=True)] == [60, 10]
    assert min(*pair.train_counts, *pair.val_counts) > 0
    for shard, label in enumerate("ab"):
        write_tar(tmp_path / f"set/{shard}.tar", samples(label * 5))
    pair = load(tmp_path / "set")
    assert (pair.train_counts, pair.val_counts) == ([4, 4], [1, 1])


def test_a_copy_of_packed_files_keeps_the_checksum_of_its_index(tmp_path):
    shutil.copytree(KINDS["tar"](make_photos(tmp_path / "photos"), tmp_path / "packed"), tmp_path / "copy")
    load(tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*.tar"):
        index = archives.index_from(index_of(file).read_bytes)
        assert index.file == (file.stat().st_ino, file.stat().st_ctime_ns), "made anew"
        assert index.checksum == checksum_of(file)
