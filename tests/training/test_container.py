"""What the Dockerfile promises, in namespaces of this machine: any user id, a read-only root, a quota, no passwd entry.

Building the image needs Docker and a network, and is not tried here; its commands are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zerovision.training.config import REPO_ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOCKERFILE = (REPO_ROOT / "deploy" / "Dockerfile").read_text()
IMAGE_FOLDER = "/opt/zerovision"
# $1: the interpreter's installation, which an ordinary user may not reach; $2: the volume; then variables and command.
CONTAINER = """
set -eu
mkdir "$2/python"
mount --bind "$1" "$2/python"
case $1 in /root/*) mount -t tmpfs -o mode=755 none /root && mkdir -p "$1" && mount --bind "$2/python" "$1" ;; esac
mount --bind "$2" /mnt
mount -o remount,bind,ro /
mount -t tmpfs -o mode=1777 none /tmp
mount -t tmpfs -o mode=1777,size=64m none /dev/shm
exec setpriv --reuid 12345 --regid 12345 --clear-groups env -i "${@:3}"
"""


def test_any_user_trains_on_a_read_only_root(tmp_path: Path) -> None:
    namespaces = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode if _is_root() else 1
    if namespaces:
        pytest.skip("needs root, unshare and setpriv")
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    variables = [word.replace(IMAGE_FOLDER, str(REPO_ROOT)) for word in re.findall(r"^ENV (\S+)$", DOCKERFILE, re.M)]
    assert [word.partition("=")[0] for word in variables] == ["HOME", "USER", "TORCH_EXTENSIONS_DIR", "PATH"]
    words = ["basic_cnn", "ddp", "2", "16", "1", "--data", "digits", "--image-size", "32", "--workers", "1"]
    train = ["bash", "scripts/launch_distributed.sh", *words, "--log-dir", "/mnt/logs", "--run-name", "run"]
    command = ["unshare", "--mount", "bash", "-c", CONTAINER, "container", sys.base_prefix, str(volume)]
    result = subprocess.run([*command, *variables, *train], cwd=REPO_ROOT, capture_output=True, text=True, timeout=850)
    assert result.returncode == 0, result.stdout + result.stderr
    run = volume / "logs/runs/run"
    assert (run / "model.safetensors").stat().st_uid == 12345
    assert (run / "report.html").is_file()


def test_the_image_has_what_its_commands_name() -> None:
    """Paths of COPY and CMD, the packages that set-up looks for, and nothing of this machine's environment and logs."""
    assert re.search(r"^RUN make setup ", DOCKERFILE, re.M)
    assert f"WORKDIR {IMAGE_FOLDER}\nCOPY . .\n" in DOCKERFILE
    script = re.search(r'^CMD \["bash", "(\S+)", "--help"\]$', DOCKERFILE, re.M)
    assert script is not None
    help_text = subprocess.run(["bash", script[1], "--help"], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    assert "Exit codes" in help_text.stdout
    assert {".git", ".venv", "logs"} <= set((REPO_ROOT / ".dockerignore").read_text().split())
    for folder in re.search(r"compileall -q (.*)$", DOCKERFILE, re.M)[1].split():  # type: ignore[index]
        assert (REPO_ROOT / folder).is_dir()


def _is_root() -> bool:
    return os.geteuid() == 0 and shutil.which("unshare") is not None and shutil.which("setpriv") is not None
