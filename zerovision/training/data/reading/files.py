"""Image files: the supported formats, reading bytes, and the reasons why a file cannot be used.

Pillow rejects PNG files with large or damaged text chunks or color profiles. These chunks do not affect the pixels, so
they are removed before decoding. Only `read_file` reads the bytes of image files.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from PIL import features

from zerovision.training.base.errors import UserError
from zerovision.training.data.reading.retry import patiently

_HEIF_READER = "pillow_heif"  # of the package pillow-heif


class _Optional(NamedTuple):
    """A format that needs an optional library."""

    pillow_name: str
    extensions: tuple[str, ...]  # in lower case
    brands: tuple[bytes, ...]  # at the start of the format's files, after "ftyp" (ISO/IEC 14496-12)
    is_here: bool  # whether the library is installed
    cure: str  # what to do if the library is not installed


_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")
_OPTIONAL = (
    _Optional("AVIF", (".avif",), (b"avif", b"avis"), bool(features.check("avif")), "pip install --upgrade pillow"),
    _Optional("HEIF", (".heic", ".heif"), _HEIC_BRANDS, find_spec(_HEIF_READER) is not None, "pip install pillow-heif"),
)
_JPEG_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif")
_OTHER_EXTENSIONS = (".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_FOUND = [each for each in _OPTIONAL if each.is_here]
_MISSING = [each for each in _OPTIONAL if not each.is_here]

IMAGE_EXTENSIONS = (*_JPEG_EXTENSIONS, *_OTHER_EXTENSIONS, *(name for each in _FOUND for name in each.extensions))
ARRAY_EXTENSION = ".npy"
CURES: Mapping[str, str] = {name: each.cure for each in _MISSING for name in each.extensions}  # by extension


class Refused(Exception):
    """Raised if an image cannot be used; the message is the reason, to which `named` adds the image's name."""


_PNG_SIGNATURE, _ARRAY_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\x93NUMPY"
_ANCILLARY = 0x20  # bit of a chunk type's first letter, set in lower case
_PNG_PIXELS = (b"tRNS", b"acTL", b"fcTL", b"fdAT")
_PNG_ORIENTATION = b"eXIf"


@cache
def pillow_formats() -> tuple[str, ...]:
    """Return Pillow's names for the allowed formats, which exclude those that start external programs, such as EPS."""
    if "HEIF" in (names := tuple(each.pillow_name for each in _FOUND)):
        import_module(_HEIF_READER).register_heif_opener()
    return ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", *names)


def is_array(content: bytes) -> bool:
    """Return whether these are the contents of a NumPy file with one array."""
    return content.startswith(_ARRAY_SIGNATURE)


def unknown_format(content: bytes) -> str:
    """Describe a file in an unknown format, with a remedy for formats that an optional library supports."""
    brand = content[8:12] if content[4:8] == b"ftyp" else b""
    found = next((f"a file of {each.pillow_name}: {each.cure}" for each in _MISSING if brand in each.brands), None)
    return found or "not an image of a known format"


def without_metadata(content: bytes) -> bytes:
    """Return a PNG file without the chunks that its pixels and orientation do not need.

    If there are no such chunks, or the file is not a PNG file, `content` itself is returned.
    """
    if not content.startswith(_PNG_SIGNATURE):
        return content
    kept: list[bytes] = []
    start = position = len(_PNG_SIGNATURE)
    # A chunk consists of length, type, data and checksum: PNG specification (third edition), 5.3.
    while position + 12 <= len(content):
        end = position + 12 + int.from_bytes(content[position : position + 4], "big")
        kind, checksum = content[position + 4 : position + 8], content[end - 4 : end]
        is_sound = zlib.crc32(content[position + 4 : end - 4]).to_bytes(4, "big") == checksum
        if kind[0] & _ANCILLARY and kind not in _PNG_PIXELS and not (kind == _PNG_ORIENTATION and is_sound):
            kept.append(content[start:position])
            start = end
        position = end
    return b"".join([_PNG_SIGNATURE, *kept, content[start:]]) if kept else content


MAX_FILE_BYTES = 1_500_000_000  # more than MAX_PIXELS uncompressed pixels with 4 channels of 16 bits
MAX_NOTE = 300  # characters


class ImageError(UserError):
    """An image that cannot be used.

    Attributes:
        path: The file, or the image's position in a data set without files.
        reason: The reason, in one line.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = " ".join(reason.split())
        super().__init__(
            f"cannot use image {self.path!r}: {self.reason}. Repair or remove it, or add --bad-images skip."
        )


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the contents of a regular file, without waiting for a FIFO or reading a device.

    Raises:
        ImageError: If the file is missing, not a regular file, or larger than `max_bytes`.
        FileServerError: If the file is temporarily unreadable; see `patiently`.
    """
    try:
        return patiently(lambda: _content(path, max_bytes), path)
    except OSError as error:
        raise ImageError(path, error.strerror or str(error)) from None
    except ValueError as error:  # a null character in the name
        raise ImageError(path, str(error)) from None


def _content(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    # without O_NONBLOCK, opening a FIFO without a writer blocks forever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ImageError(path, "a directory, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(path, "not a regular file, but a device, a FIFO or a socket")
        if status.st_size > max_bytes:
            raise ImageError(path, f"{status.st_size / 1e6:.0f} MB, more than the {max_bytes / 1e6:g} MB allowed")
        data = file.read(status.st_size + 1)
    if len(data) > status.st_size:  # such as files under /proc, whose reported size is 0
        raise ImageError(path, f"contains more than {status.st_size} bytes, the size that the file system reports")
    return data


@contextmanager
def named(path: str | os.PathLike[str], found: dict[str, str] | None = None) -> Iterator[list[str]]:
    """Raise ImageError with an image's path if the block, which decodes the image, raises Refused.

    The yielded list is for the block's notes on the image, which are added to `found` by path, as one line.
    """
    notes: list[str] = []
    try:
        yield notes
    except Refused as refused:
        raise ImageError(path, str(refused)) from None
    if notes and found is not None:
        found[os.fspath(path)] = " ".join("; ".join(dict.fromkeys(notes)).split())[:MAX_NOTE]
