"""`outlast_readers`: a process goes on whose standard output and error nobody reads any more."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from training.base.lasting_output import outlast_readers

if sys.argv[1:]:
    outlast_readers()
print("read", flush=True)
sys.stdin.readline()
for _ in range(3):
    print("unread")
    print("unread", file=sys.stderr)
sys.stdout.flush()
sys.exit(7)
"""


def exit_code_after_the_reader_has_gone(place: str, *words: str) -> int:
    ours, theirs = pty.openpty() if place == "terminal" else os.pipe()
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], env=environment, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        assert os.read(ours, 4) == b"read"
        os.close(ours)
        process.communicate(b"go on\n")
    return process.returncode


@pytest.mark.parametrize("place", ["pipe", "terminal"])
def test_a_process_outlasts_its_readers(place):
    assert exit_code_after_the_reader_has_gone(place) != 7
    assert exit_code_after_the_reader_has_gone(place, "outlast") == 7
