"""Standard output that nobody reads any more or that is full: a training goes on, a script says so or ends."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from training.config.command_line import run_script

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


def three_lines(_: object) -> int:
    for number in range(3):
        print(number)
    return 7


@pytest.mark.parametrize(
    ("place", "writes_product", "expected"),
    [
        ("pipe", True, (0, "")),  # as of `predict.py ... | head`
        ("pipe", False, (7, "")),
        *(
            ("/dev/full", product, (2, "script: standard output cannot be written (No space left on device).\n"))
            for product in (True, False)
        ),
    ],
)
def test_a_script_whose_output_cannot_be_written(place, writes_product, expected, monkeypatch, capsys):
    """Whole scripts in a shell: tests/unit/test_evaluate_predict.py."""
    if place == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(place, os.O_WRONLY)
    with os.fdopen(writer, "w") as stream, monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", stream)
        changed.setattr(sys, "__stdout__", stream)
        changed.setattr(sys, "argv", ["script"])
        code = run_script("script", list, three_lines, writes_product=writes_product)
    assert (code, capsys.readouterr().err) == expected
