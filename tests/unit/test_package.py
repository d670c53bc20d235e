"""The wheel that `pip install .` builds has what git has, and works outside of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_PACKAGE = ("zerovision", "models", "deepspeed_configs")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"
COMMANDS = ("plan", "evaluate")


def tracked(*folders: str) -> list[str]:
    """Return the files of folders that git tracks or would, without links."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("copy")  # setuptools leaves a folder there
    for name in [*tracked(*OF_PACKAGE), "pyproject.toml", "LICENSE", "requirements.txt"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for link in (path for path in (ROOT / "zerovision").iterdir() if path.is_symlink()):
        (copy / "zerovision" / link.name).symlink_to(os.readlink(link))
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_the_wheel_has_the_files_of_git(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {name if name.startswith("zerovision/") else f"zerovision/{name}" for name in tracked(*OF_PACKAGE)}
    assert inside == expected | {"zerovision/requirements.txt"}


def test_an_installed_copy_finds_what_belongs_to_it(wheel, tmp_path):
    packages, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(packages)
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(packages)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", *words]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)

    for command in COMMANDS:
        result = run("-m", "zerovision.commands", command, "--help")
        assert result.returncode == 0, result.stderr
    words = ["--preset", "digits", "--data", "digits", "--epochs", "1", "--image-size", "8", "--report", "false"]
    result = run("-m", "zerovision.commands.train_distributed", *words, "--run-name", "there", "--tensorboard", "false")
    assert result.returncode == 0, result.stderr
    assert (elsewhere / "logs" / "runs" / "there" / "model.safetensors").is_file()
