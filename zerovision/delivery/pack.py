"""Packs a data set into tar files that WebDataset can read, each with an index, and checks the result."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track
from torchvision.transforms.v2.functional import to_pil_image

from zerovision.delivery.settings import PackSettings
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import errors_of_writing, replacing_folder
from zerovision.training.base.units import format_bytes, plural
from zerovision.training.config.command_line import parse_args
from zerovision.training.data import DataOptions, archives, data_options, load_data
from zerovision.training.data.archives import CLASS_NAMES, identity_of, index_of, write_index
from zerovision.training.data.class_names import read_class_names
from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.parts import TRAIN
from zerovision.training.data.reading.files import IMAGE_EXTENSIONS
from zerovision.training.data.reading.image_numbers import BYTES
from zerovision.training.data.reading.remote_files import checksum_of
from zerovision.training.data.reading.sources import FileSource, Source, digest_of
from zerovision.training.data.tar_shards import FACTS, LABEL, TAR
from zerovision.training.observe.loggers.text import open_console

PNG_CHANNELS = (1, 3)


class Packed(NamedTuple):
    """The number of images and of tar files that were written, and the total size of the tar files in bytes."""

    images: int
    shards: int
    bytes: int


def run(settings: PackSettings) -> int:
    """Run the command and return its exit code."""
    config, _ = parse_args([*settings.training_words, f"--data={settings.data}"], settings.parser().flags)
    output = Path(os.path.expanduser(settings.output))
    done = pack(data_options(config), output, settings.shard_mb * 10**6)
    print(f"packed {done.images} images, {format_bytes(done.bytes)} in {plural(done.shards, 'tar file')}: {output}")
    return 0


def pack(options: DataOptions, output: Path, shard_bytes: int) -> Packed:
    """Write the images of all parts, unchanged, into tar files of about `shard_bytes` each in a new folder.

    Image files are copied byte for byte; images in memory become PNG files. Training images are shuffled for
    `--order shards`; this affects nothing else, because a data set is sorted when it is loaded. Every tar file is read
    back and compared with the packed images; the folder receives its final name only if everything matches. Otherwise,
    or if the folder or the data cannot be used, a UserError is raised.
    """
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"OUT '{output}' exists and is not an empty folder: use a new one.")
    data = load_data(options)
    if data.sets is not None:
        raise UserError(f"--task {options.task}: tar files have one label for each image: train on the table itself.")
    done = Packed(0, 0, 0)
    with errors_of_writing(output), replacing_folder(output) as folder:
        names = "".join(f"{name}\n" for name in data.class_names).encode("utf-8", "surrogateescape")
        if read_class_names(names, CLASS_NAMES) != data.class_names:
            raise UserError(f"a class of '{options.data}' has a line break in its name: rename it.")
        (folder / CLASS_NAMES).write_bytes(names)
        for part, dataset in data.parts.items():
            for file, count in _write_part(folder, part, dataset, shard_bytes):
                done = Packed(done.images + count, done.shards + 1, done.bytes + file.stat().st_size)
        repeated = archives.read(TAR, DataOptions(data=str(folder)))
        if len(repeated) != done.images:
            raise UserError(f"only {len(repeated)} of {done.images} images are in the tar files: pack them again.")
    return done


def _write_part(folder: Path, part: str, dataset: ImageDataset, shard_bytes: int) -> Iterator[tuple[Path, int]]:
    """Write and check the tar files of a part, and yield each file with its number of images."""
    source = dataset.source
    console, every = open_console(stderr=True), np.arange(len(dataset))
    if part == TRAIN:
        every = np.argsort(np.random.Philox(key=0).random_raw(len(dataset)), kind="stable")
    bar = track(every.tolist(), f"packing {part}", console=console, transient=True, disable=not console.is_terminal)
    indices = iter(bar)
    for number in itertools.count():
        index = next(indices, None)
        if index is None:
            return
        file, digests = folder / f"{part}-{number:06}.tar", []
        with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
            while index is not None:
                path, suffix, content = _sample(source, index)
                weights = source.loss_weights
                facts = {"path": path, "weight": 1.0 if weights is None else float(weights[index])}
                for kind, data in (
                    (LABEL, str(int(source.labels[index])).encode()),
                    (suffix, content),
                    (FACTS, json.dumps(facts).encode()),
                ):
                    member = tarfile.TarInfo(f"{index:09}{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                digests.append(digest_of(content))
                index = next(indices, None) if tar.offset < shard_bytes else None
        _check(file, digests)
        yield file, len(digests)


def _sample(source: Source, index: int) -> tuple[str, str, bytes]:
    """Return an image's path, the suffix of its format, and its bytes."""
    if isinstance(source, FileSource):
        path = source.images.path(index)
        suffix = os.path.splitext(path)[1].lower()
        content = source.images.content(index)
        return path, suffix if suffix in IMAGE_EXTENSIONS else ".jpg", content  # readers detect the format
    image = source.read(index)
    if source.values != BYTES or image.shape[0] not in PNG_CHANNELS:
        raise UserError(f"{image.shape[0]}-channel images of {source.values} cannot be packed: keep the arrays.")
    stream = io.BytesIO()
    to_pil_image(image).save(stream, "PNG")
    return f"{index:09}.png", ".png", stream.getvalue()


def _check(file: Path, digests: list[int]) -> None:
    """Compare the images in a tar file with the digests of what was packed, and write the file's index."""
    index, (state, inode) = TAR.scan(file), identity_of(file.stat())
    index = index._replace(columns=TAR.columns, state=state, file=inode, checksum=checksum_of(file))
    reader, images = TAR.open([file], [index.state]), index.images
    places = zip(images["place"].tolist(), images["size"].tolist(), strict=True)
    if [digest_of(reader.read(0, place, size)) for place, size in places] != digests:
        raise UserError(f"'{file}' does not contain what was written to it: the disk may be failing; pack it again.")
    write_index(index, index_of(file))
