"""For the inputs that a case makes: `from lib import *`. Pictures, files, tar and Parquet files."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import sys
import tarfile

from PIL import Image

__all__ = ["Image", "csv", "io", "json", "os", "parquet", "pic", "put", "random", "sys", "tar"]

NOISE = random.Random(3)
NO_PYARROW = 77  # the exit code of an input that cannot be made here


def pic(colour=0, side=40, kind="PNG"):
    """The bytes of a picture of dark noise in which one of three colours is bright."""
    pixels, file = bytearray(level // 3 for level in NOISE.randbytes(side * side * 3)), io.BytesIO()
    pixels[colour % 3 :: 3] = bytes([200]) * (side * side)
    Image.frombytes("RGB", (side, side), bytes(pixels)).save(file, kind)
    return file.getvalue()


def put(path, data):
    """Write text or bytes, and make the folders."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def tar(path, members):
    """Write a tar file of (name, text or bytes), also of names that come twice."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            content, member = data.encode() if isinstance(data, str) else data, tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def parquet(path, images, labels, kind=None, paths=None, names=None):
    """Write a Parquet file as the hub has it; `names` makes the labels a ClassLabel."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        print("ok: no pyarrow here")
        sys.exit(NO_PYARROW)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    rows = [{"bytes": image, "path": name} for image, name in zip(images, paths or [None] * len(images), strict=False)]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(rows, image_type), "label": pa.array(labels, kind)})
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})
    pq.write_table(table, path)
