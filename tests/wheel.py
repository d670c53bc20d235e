"""What `pip install .` installs, for the tests of an installed copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_PACKAGE = ("zerovision", "models", "deepspeed_configs")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


def tracked(*folders: str) -> list[str]:
    """Return the files of folders that git tracks or would, without links."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def build_wheel(copy: Path) -> Path:
    """Copy the package into an empty folder and build its wheel there; return the file."""
    for name in [*tracked(*OF_PACKAGE), "pyproject.toml", "LICENSE", "requirements.txt"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for link in (path for path in (ROOT / "zerovision").iterdir() if path.is_symlink()):
        (copy / "zerovision" / link.name).symlink_to(os.readlink(link))
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    (built,) = (copy / "dist").glob("*.whl")
    return built
