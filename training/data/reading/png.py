"""Takes out of a PNG file what its pixels do not need: Pillow refuses large and damaged texts and colour profiles."""

from __future__ import annotations

import zlib

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ANCILLARY = 0x20  # bit of a kind's first letter: a small one
_OF_THE_PIXELS = (b"tRNS", b"acTL", b"fcTL", b"fdAT")
_ORIENTATION = b"eXIf"


def without_metadata(content: bytes) -> bytes:
    """Return a PNG file without the chunks that its pixels and their orientation do not need.

    A file without such chunks, or of another format, is returned as it is, the same object. Chunks are those of the
    PNG specification (third edition), 5.3: length, kind, data, checksum.
    """
    if not content.startswith(_SIGNATURE):
        return content
    kept: list[bytes] = []
    start = position = len(_SIGNATURE)
    while position + 12 <= len(content):
        end = position + 12 + int.from_bytes(content[position : position + 4], "big")
        kind, checksum = content[position + 4 : position + 8], content[end - 4 : end]
        is_sound = zlib.crc32(content[position + 4 : end - 4]).to_bytes(4, "big") == checksum
        if kind[0] & _ANCILLARY and kind not in _OF_THE_PIXELS and not (kind == _ORIENTATION and is_sound):
            kept.append(content[start:position])
            start = end
        position = end
    return b"".join([_SIGNATURE, *kept, content[start:]]) if kept else content
