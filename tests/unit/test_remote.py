"""Data behind URLs: the same bytes of the model, whatever the server does; or one line. The hub's cache."""

from __future__ import annotations

import pickle
import shutil
import sys
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from made_data import KINDS, SPLIT, make_photos
from PIL import Image, ImageColor
from range_server import RangeServer

from tests.kit import train
from zerovision.delivery.evaluation_files import leave_files
from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.base.files import sha256_of
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading import remote, remote_files
from zerovision.training.data.reading.remote_files import Copies
from zerovision.training.data.sampler import build_plan

OVER_HTTP = ("tar", "parquet", "photos/table.csv")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A folder of photographs, and what else has them, in one folder."""
    root = tmp_path_factory.mktemp("kinds")
    make_photos(root / "photos")
    for name, kind in KINDS.items():
        kind(root / "photos", root / name)
    shutil.move(root / "table.csv", root / "photos" / "table.csv")
    return root


@pytest.fixture
def server(kinds):
    pytest.importorskip("aiohttp", reason="http:// is read by aiohttp")
    server = RangeServer(kinds)
    yield server
    server.change, server.delay_s, server.status = bytes, 0.0, 0
    server.stop()


@pytest.fixture
def impatient(monkeypatch):
    """Tries follow each other at once, and end after a second."""
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.2)))
    monkeypatch.setattr(remote, "REQUEST_SECONDS", 1.0)


def options(data: str | Path, root: Path, **values) -> DataOptions:
    return DataOptions(data=str(data), image_size=16, data_root=str(root), **SPLIT, **values)


def empty(folder: Path) -> None:
    """Remove the copies of remote files."""
    for path in folder.iterdir():
        path.unlink()


def seen(dataset) -> list[tuple]:
    source, images = dataset.source, dataset.source.images
    source.expect(range(len(dataset)))
    facts = zip(images.paths(), images["size"].tolist(), source.labels.tolist(), strict=True)
    return [(*known, images.content(n)) for n, known in enumerate(facts)]


def trained(data: str | Path, root: Path) -> str:
    """Train two epochs and return the sha256 of the weights."""
    config = {"data": str(data), "image_size": 16, "batch_size": 8, "epochs": 2, "cache": "off", **SPLIT}
    folder = train(root, "r", None, leave_files, data_root=str(root / "cache"), **config)
    return sha256_of(folder / "model.safetensors")


@pytest.fixture(scope="module")
def expected(kinds, tmp_path_factory):
    """The sha256 of the weights of the undisturbed training from the folder."""
    return trained(kinds / "photos", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_files_are_fetched_whole_and_once_before_they_are_read(server, kinds, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(remote_files, "BLOCK_BYTES", 2**12)
    source = load_data(options(server.url(kind), tmp_path)).train.source
    empty(tmp_path / "remote")
    server.requests.clear()
    source.expect(range(len(source.labels)))
    used = {Path(source.name(n)).parts[3] for n in range(len(source.labels))}
    blocks = sum(-(-path.stat().st_size // 2**12) for path in (kinds / kind).iterdir() if path.name in used)
    deadline = time.monotonic() + 20
    while len(server.requests) < blocks and time.monotonic() < deadline:
        time.sleep(0.01)
    source.images.content(0)
    assert len({*server.requests}) == len(server.requests) == blocks


@pytest.mark.parametrize("kind", ["tar", "parquet", *(f"http://{kind}" for kind in OVER_HTTP)])
def test_the_same_images_train_the_same_bytes_wherever_they_are(kinds, request, expected, kind, tmp_path):
    data = kinds / kind
    if kind.startswith("http"):
        data = request.getfixturevalue("server").url(kind.removeprefix("http://"))
    assert trained(data, tmp_path) == expected


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_server_that_is_killed_and_corrupt_in_mid_run_changes_nothing(
    server, expected, kind, tmp_path, monkeypatch, impatient
):
    """Every range comes wrong, then cut off, then right; and once the server is gone for a moment."""
    of_range: Counter[bytes] = Counter()

    def restart() -> None:
        server.stop()
        time.sleep(0.1)
        server.start()

    def change(body: bytes) -> bytes:
        of_range[body] += 1
        if of_range[body] == 1:
            return bytes(len(body))
        if of_range[body] == 2 and len(of_range) == 1:
            threading.Thread(target=restart).start()
        return body[: len(body) // 2] if of_range[body] == 2 else body

    load_data(options(server.url(kind), tmp_path / "cache"))  # makes the index of what has none
    empty(tmp_path / "cache/remote")
    server.change = change
    assert trained(server.url(kind), tmp_path) == expected
    assert min(of_range.values()) > 2


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ({"change": lambda body: bytes(len(body))}, UserError, "its bytes differ from those that its index"),
        ({"change": cut}, FileServerError, "cannot be read: "),
        ({"status": 503}, FileServerError, "cannot be read: HTTP 503, even after 7 s"),
        ({"status": 403}, UserError, "HTTP 403. Restore it and start again."),
        ({"status": 404}, UserError, "there is no such file. Restore it"),
        ({"delay_s": 1.3}, FileServerError, "cannot be read: no answer within 1 s"),
        ({"other": True}, UserError, "it has changed since the run began. Restore it"),
        ({"has_ranges": False}, UserError, "its server does not support byte ranges: copy it to this machine"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_stays_broken_ends_with_one_line_that_names_the_shard(
    server, kinds, tmp_path, impatient, fault, error, words, monkeypatch
):
    monkeypatch.setattr(remote_files, "BLOCK_BYTES", 2**12)
    server.root = Path(shutil.copytree(kinds / "tar", tmp_path / "tar"))
    for index in server.root.glob("*.json"):
        index.unlink()
    pair = pickle.loads(pickle.dumps(load_data(options(server.url(), tmp_path / "cache"))))
    empty(tmp_path / "cache/remote")
    if fault.pop("other", False):
        shutil.copyfile(kinds / "tar/train-000001.tar", server.root / "train-000000.tar")
    for name, value in fault.items():
        setattr(server, name, value)
    with pytest.raises(error, match=r"^'http://127.0.0.1:\d+/train-000000.tar' ?:?") as problem:
        pair.train.source.read(0)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)
    assert pair.train.source.images.archive._copies._pool is None, "nothing is waited for"


def test_an_index_beside_saves_reading_all_and_tells_damage_from_the_first_byte(server, kinds, tmp_path, impatient):
    pair = load_data(options(server.url("tar"), tmp_path))
    assert not any(bounds for _, bounds in server.requests)
    assert pair.fingerprint == load_data(options(kinds / "photos", tmp_path)).fingerprint
    server.change = lambda body: body[:-1] + b"x"
    with pytest.raises(UserError, match="those that its index describes"):
        pair.train.source.read(0)


def test_a_first_reading_that_fails_is_not_kept(server, tmp_path, impatient):
    server.change = lambda body: bytes(len(body))
    with pytest.raises(UserError, match=r"'http://[\d.:]+/parquet/all-00000-of-00001.parquet' is not a readable"):
        load_data(options(server.url("parquet"), tmp_path))
    server.change = bytes
    assert len(load_data(options(server.url("parquet"), tmp_path)).train)


def test_by_shards_a_cache_that_is_smaller_suffices_to_fetch_each_byte_once_an_epoch(server, kinds, tmp_path):
    """But for the shards that an epoch begins and ends with; in a random order such data are refused."""
    size = sum(file.stat().st_size for file in (kinds / "tar").glob("*.tar"))
    half = {"remote_cache_gb": 0.5 * size / 1e9}
    with pytest.raises(UserError, match=r"more than --remote-cache-gb .* keeps: use --order shards"):
        load_data(options(server.url("tar"), tmp_path, **half))
    values = {"order": "shards", "shuffle_window": 3}
    pair = load_data(options(server.url("tar"), tmp_path, **values, **half))
    plan = build_plan(TrainConfig(**values, batch_size=4), pair.train.source, 1)
    empty(tmp_path / "remote")
    server.requests.clear()
    assert len([*Loader(pair.train, plan, 0).epoch(1)]) == plan.steps_per_epoch
    ranges = [request for request in server.requests if request[1]]
    assert len(ranges) - len(set(ranges)) <= 2
    assert any("one shard after another" in note for note in pair.notes)
    tiny = {"remote_cache_gb": 1000 / 1e9}
    with pytest.raises(UserError, match=r"the images of the validation part are in .* GB of files"):
        load_data(options(server.url("tar"), tmp_path, **values, **tiny))


def copies_of(server: RangeServer, folder: Path, names: list[str], max_bytes: int) -> Copies:
    files = [remote.RemotePath(server.url(name)) for name in names]
    return Copies(folder, max_bytes, files, [remote.state_of(file) for file in files])


def test_the_folder_is_bounded_and_what_was_not_used_for_longest_goes_first(server, tmp_path):
    server.root, folder = tmp_path, tmp_path / "copies"
    folder.mkdir()
    for number in range(13):
        (tmp_path / f"{number}.tar").write_bytes(bytes(10))
    copies = copies_of(server, folder, [f"{number}.tar" for number in range(13)], 100)
    for number in range(12):
        assert copies.fetch(number).read_bytes() == bytes(10)
        copies.fetch(0)
    kept = {number for number, path in enumerate(copies.paths) if path.exists()}
    assert (0 in kept, 11 in kept, 1 in kept, len(kept) <= 10) == (True, True, False, True)
    (folder / ".added").write_bytes(b"damaged and long")
    assert copies.fetch(12).read_bytes() == bytes(10)
    assert copies_of(server, folder, ["12.tar"], 5).fetch(0).exists(), "one that is larger than the folder may be"


def test_all_processes_together_keep_to_the_bound(server, tmp_path):
    """Each has an object of its own."""
    server.root, folder = tmp_path, tmp_path / "copies"
    folder.mkdir()
    for number in range(120):
        (tmp_path / f"{number}.tar").write_bytes(bytes(20))
    names = [f"{number}.tar" for number in range(120)]
    everyone = [copies_of(server, folder, names[:1], 1000) for _ in range(20)]
    whole = copies_of(server, folder, names, 1000)
    for copies in everyone:
        for name in ("files", "states", "paths", "checksums"):
            setattr(copies, name, getattr(whole, name))
    for number in range(120):
        everyone[number % 20].fetch(number)
        assert sum(path.stat().st_size for path in whole.paths if path.exists()) <= 1000 * 1.02 + 20


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"^gs:// needs fsspec and gcsfs: pip install fsspec gcsfs\.$"):
        load_data(options("gs://bucket/set", tmp_path))


@pytest.mark.parametrize("kind", ["tar", "list"])
def test_content_decides_where_a_server_tells_no_change(server, kinds, tmp_path, kind):
    """Of two files of a size, without ETag and Last-Modified, labels and pixels are those of the one that is there."""
    server.root, server.has_marks = tmp_path / "set", False
    server.root.mkdir()
    for first, second in (("ab", "red"), ("xy", "blue")):
        for n in range(8):
            Image.new("RGB", (8, 8), second).save(server.root / f"{n}.bmp")
        rows = [f"{n}.bmp,{first[n % 2]}\n" for n in range(8)]
        (server.root / "list.csv").write_text("".join(["path,label\n", *rows]))
        if kind == "tar":
            with tarfile.open(server.root / "data.tar", "w") as tar:
                for n in range(8):
                    (server.root / f"{n}.cls").write_text(first[n % 2])
                    tar.add(server.root / f"{n}.cls", f"{n}.cls")
                    tar.add(server.root / f"{n}.bmp", f"{n}.bmp")
        pair = load_data(options(server.url("data.tar" if kind == "tar" else "list.csv"), tmp_path))
        assert pair.class_names == [*first]
        image = pair.train.source.read(0)
        assert image[:, 0, 0].tolist() == [*ImageColor.getrgb(second)]


def test_a_table_behind_a_url_names_images_below_its_folder(server, kinds, tmp_path):
    server.root = tmp_path / "set"
    server.root.mkdir()
    for row, words in {
        "../secret.png,a": "1 of 2 images are outside 'http://",
        "/x.png,a": "1 of 2 images are outside",
        "none.png,a": "2 images of 2, such as 'b.png', cannot be found under 'http://",
    }.items():
        (server.root / "list.csv").write_text(f"path,label\nb.png,b\n{row}\n")
        with pytest.raises(UserError) as problem:
            load_data(options(server.url("list.csv"), tmp_path))
        assert words in str(problem.value)
    for name in ("100%.png", "a#1.png", "b?x=1.png", "50%20off.png", "blank .png"):
        shutil.copyfile(next((kinds / "photos").rglob("*.png")), server.root / name)
    names = ["100%.png", "a#1.png", "b?x=1.png", "50%20off.png", " blank .png "]
    rows = [f"{name},{'ab'[n % 2]}\n" for n, name in enumerate(names)]
    (server.root / "list.csv").write_text("".join(["path,label\n", *rows]))
    pair = load_data(options(server.url("list.csv"), tmp_path))
    assert {row[0] for row in seen(pair.train) + seen(pair.val)} == {name.strip() for name in names}
    for name, words in {"": "no tar or Parquet file is listed there", "/none": "there is no such file"}.items():
        with pytest.raises(UserError, match=words):
            load_data(options(server.url() + name, tmp_path))


@pytest.fixture
def hub(kinds, tmp_path, monkeypatch):
    """The hub's cache with a data set of two splits, as huggingface_hub lays it out."""
    pytest.importorskip("pyarrow")
    folder = tmp_path / "hub/datasets--org--name"
    inside = folder / "snapshots/0123456789abcdef0123456789abcdef01234567/data"
    inside.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(inside.parent.name)
    for number, part in enumerate(("train", "test")):
        shutil.copyfile(kinds / "parquet/all-00000-of-00001.parquet", folder / f"blobs/{number}")
        (inside / f"{part}-00000-of-00001.parquet").symlink_to(f"../../../blobs/{number}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return inside


def test_a_data_set_of_the_hub_is_read_from_its_cache(hub, kinds, expected, tmp_path):
    before = sorted((tmp_path / "hub").rglob("*"))
    pair = load_data(options("hf:org/name", tmp_path))
    assert (len(pair.train) + len(pair.val), len(pair.test)) == (36, 36)
    assert trained("hf:org/name:train", tmp_path) == expected
    with pytest.raises(UserError, match="hf:org/name has no split dev, only test, train"):
        load_data(options("hf:org/name:dev", tmp_path))
    with pytest.raises(UserError, match=r"hf:org/other is not in .*/hub: add --download, or use ORG/NAME"):
        load_data(options("hf:org/other", tmp_path))
    assert sorted((tmp_path / "hub").rglob("*")) == before, "nothing is written there"
    shutil.copytree(hub, hub.parent / "more", symlinks=True)
    with pytest.raises(UserError, match=r"hf:org/name has data, more: use hf:org/name/data\."):
        load_data(options("hf:org/name", tmp_path))
    assert len(load_data(options("hf:org/name/more", tmp_path)).test) == 36


@pytest.mark.slow
def test_a_bucket_of_s3_trains_the_same_bytes(kinds, expected, tmp_path, monkeypatch, capsys):
    pytest.importorskip("s3fs", reason="s3:// is read by s3fs")
    server = pytest.importorskip("moto.server", reason="an S3 of the tests' own").ThreadedMotoServer(port=0)
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for path in (path for path in kinds.rglob("*.*") if path.is_file()):
            client.upload_file(str(path), "bucket", f"sets/{path.relative_to(kinds)}")
        for kind in OVER_HTTP:
            assert trained(f"s3://bucket/sets/{kind}", tmp_path / kind) == expected
        with pytest.raises(UserError, match=r"--data s3://bucket/none: no tar|cannot be read: there is no such file"):
            load_data(options("s3://bucket/none", tmp_path))
    finally:
        server.stop()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hunter" not in written + "".join(capsys.readouterr()).encode()
