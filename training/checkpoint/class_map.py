"""class_map.txt beside weights: the classes in the order of the logits, a name a line, as timm's --class-map takes it.

Without it timm numbers folders in natural order (1, 2, 10), and here they are numbered as text is sorted (1, 10, 2).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from training.base.atomic_write import replacing

CLASS_MAP = "class_map.txt"


def class_map(class_names: Sequence[str]) -> bytes | None:
    """Return the content of the file, None if timm would read other names: it strips lines, and takes UTF-8 alone."""
    content = "".join(f"{name}\n" for name in class_names)
    if [line.strip() for line in io.StringIO(content, newline=None)] != [*class_names]:
        return None
    try:
        return content.encode()
    except UnicodeEncodeError:  # bytes of a folder's name that are no text
        return None


def write_class_map(folder: Path, class_names: Sequence[str]) -> None:
    """Write the file into a folder, or remove that of other classes if there can be none."""
    content, path = class_map(class_names), folder / CLASS_MAP
    if content is None:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(content)
