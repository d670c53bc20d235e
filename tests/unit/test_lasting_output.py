"""Standard output that nobody reads any more or that is full: a training goes on, a script says so or ends."""

import contextlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerovision.training.config.command_line import run_script

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
SCRIPT = """
import sys
from zerovision.training.base.lasting_output import outlast_readers

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
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
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


PAUSED_SCRIPT = """
import sys
from zerovision.training.base.lasting_output import finish_output, outlast_readers

outlast_readers()
print("read")
sys.stdin.readline()
for number in range(int(sys.argv[1])):
    print(number, "x" * 1000)
open(sys.argv[2], "w").close()
finish_output(float(sys.argv[3]))
print("the end", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("place", ["pipe", "terminal"])
@pytest.mark.parametrize("lines", [300, 20_000])
def test_a_process_does_not_wait_for_a_paused_reader(place, lines, tmp_path):
    """It keeps what was printed until somebody reads it, the last 16 MB."""
    ours, theirs = pty.openpty() if place == "terminal" else os.pipe()
    command = [sys.executable, "-c", PAUSED_SCRIPT, str(lines), str(tmp_path / "said"), "60" if lines == 300 else "0"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=theirs) as process:
        os.close(theirs)
        printed = os.read(ours, 6)
        if place == "terminal":
            os.write(ours, b"\x13")  # Ctrl-S
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not (tmp_path / "said").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / "said").exists()
        assert process.poll() is None  # the rest is still to be read
        if place == "terminal":
            os.write(ours, b"\x11")  # Ctrl-Q
        with contextlib.suppress(OSError):  # a terminal whose other end is closed
            while read := os.read(ours, 2**16):
                printed += read
        process.communicate()
    os.close(ours)
    said = printed.decode().splitlines()
    assert process.returncode == 7
    assert (said[0], said[-1]) == ("read", "the end")
    numbers = [int(line.split()[0]) for line in said if line.endswith("x") and line[0] != "x"]
    assert numbers == sorted(set(numbers))
    if lines == 300:
        assert len(numbers) == lines
    else:
        assert 16_000 < len(numbers) < lines
        assert numbers[-1] == lines - 1
        assert sum(line.endswith(" bytes were dropped: nobody read them ...") for line in said) == 1


def test_a_process_that_ends_waits_for_a_paused_reader_only_so_long(tmp_path):
    reader, writer = os.pipe()
    script = PAUSED_SCRIPT.replace("sys.exit(7)", "import os; os._exit(7)")  # as a rank ends
    command = [sys.executable, "-c", script, "300", str(tmp_path / "said"), "0.2"]
    done = subprocess.run(command, env=ENVIRONMENT, input=b"\n", stdout=writer, check=False, timeout=60)
    assert done.returncode == 7
    os.close(reader)
    os.close(writer)


def test_a_signal_ends_a_process_that_waits_for_a_paused_reader_at_its_end(tmp_path):
    """Also one that handles them, as launchers do."""
    reader, writer = os.pipe()
    start = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)" + PAUSED_SCRIPT
    command = [sys.executable, "-c", start, "300", str(tmp_path / "said"), "0"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=writer) as process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        while not (tmp_path / "said").exists():
            time.sleep(0.05)
        for _ in range(100):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                break
    assert process.returncode == -15
    os.close(reader)
    os.close(writer)


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
            ("/dev/full", product, (2, "script: cannot write to standard output (No space left on device).\n"))
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
