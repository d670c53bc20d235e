"""The hostfile parser: what it accepts, and the line each mistake gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerovision.launch.hosts import read_hostfile
from zerovision.training.base.errors import UserError
from zerovision.training.engines.deepspeed import read_strategy_json

REPO_ROOT = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    return path


def test_comments_and_blank_lines_are_skipped_and_order_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "# lab\n\nnode-b slots=8\n  10.0.0.7\tslots=4 # old\na.example.org slots=16\n")
    hosts = read_hostfile(path, nodes=3, slots=4)
    assert list(hosts.items()) == [("node-b", 8), ("10.0.0.7", 4), ("a.example.org", 16)]


def test_the_example_suits_the_guides_command() -> None:
    hosts = read_hostfile(REPO_ROOT / "hostfile_example.txt", nodes=4, slots=8)
    assert hosts == {f"gpu-node-0{number}": 8 for number in range(1, 5)}


def test_only_the_hosts_that_are_used_need_the_slots(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=8\nb slots=8\nc slots=1\n")
    assert read_hostfile(path, nodes=2, slots=8)["c"] == 1


def test_a_file_that_never_ends_or_never_answers_is_one_line(tmp_path: Path) -> None:
    """As a hostfile, and as the JSON of a strategy."""
    pipe, endless, large = (tmp_path / name for name in ("pipe", "endless", "large"))
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    large.touch()
    os.truncate(large, 2**20 + 1)
    for path, reason in (
        (pipe, "not a regular file"),
        (endless, "not a regular file"),
        (large, "larger than 1024 KiB"),
    ):
        for read in (read_hostfile, lambda path: read_strategy_json("ddp", str(path))):
            with pytest.raises(UserError, match=reason) as caught:
                read(path)
            assert str(path) in str(caught.value)


def test_nested_brackets_without_end_and_a_binary_file_are_one_line(tmp_path: Path) -> None:
    """Other mistakes are in tests/references/errors.txt."""
    path = write(tmp_path, "[" * 100_000)
    with pytest.raises(UserError, match="cannot be read"):
        read_strategy_json("ddp", str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=f"hostfile '{path}'"):
        read_hostfile(path)
