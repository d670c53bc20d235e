"""Nothing in an argument, a variable or a hostfile is run: a hundred random cases; tests/cluster has a thousand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.cluster.remote_shell import ssh_command
from tests.unit.launcher_fuzz import CANARY, cases, check_dry_run, fuzz_settings, hostfile_text, value
from tests.unit.launching import WORDS
from training.errors import UserError
from training.hostfile import read_hostfile

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@pytest.mark.parametrize("script", WORDS)
@settings(fuzz_settings, max_examples=25)
@given(data=st.data())
def test_launchers_run_nothing_of_what_they_are_given(script: str, data: st.DataObject) -> None:
    check_dry_run(script, data.draw(cases(script)))


@settings(fuzz_settings, max_examples=250)
@given(text=hostfile_text)
def test_a_hostfile_is_read_or_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text, newline="")
    refusal = ""
    try:
        hosts = read_hostfile(path)
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert refusal.isprintable()
        return
    meant = [line.split("#")[0].split() for line in text.splitlines()]
    assert [[host, f"slots={slots}"] for host, slots in hosts.items()] == [line for line in meant if line]
    for host in hosts:
        assert set(host) <= set(f"{LETTERS}.-")
        assert {host[0], host[-1]} <= set(LETTERS)


def test_the_words_for_another_machine_come_through_its_shell_whole(tmp_path: Path) -> None:
    @settings(fuzz_settings, max_examples=40)
    @given(words=st.lists(value, max_size=4))
    def check(words):
        command, _ = ssh_command("node-1", ["printf", r"%s\0", "first", *words])
        assert command[command.index("--") + 1 : -1] == ["node-1"]
        remote = subprocess.run(["sh", "-c", command[-1]], cwd=tmp_path, capture_output=True, check=True)
        assert remote.stdout == "".join(f"{word}\0" for word in ["first", *words]).encode()
        assert not (tmp_path / CANARY).exists()

    check()
