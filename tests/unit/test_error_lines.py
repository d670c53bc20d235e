"""What users get wrong, and the line that each mistake gets: tests/references/errors.txt.

Each pair of lines is a command and all that it prints: one line, on standard error, with exit code 2. Before the script
stand files that it finds in its folder and variables of its environment, NAME.EXT=TEXT and NAME=VALUE, as bash has
them: {a,b}/1.png=red is two files, red images, folder/= an empty folder, a/b=->TARGET a link. In the folder lie `run`,
a run of basic_cnn on the digits, and `empty`. After a change of the lines, write the file anew and read its diff; a new
command is added as `$ COMMAND`:

    .venv/bin/python -m tests.unit.test_error_lines
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from tests.kit import png
from tests.unit.exports import IMAGE_SIZE, save_new_run
from tests.unit.launching import environment
from zerovision.commands import COMMANDS
from zerovision.commands.train_distributed import train
from zerovision.launch import launch, slurm
from zerovision.launch.arguments import LAUNCHERS
from zerovision.training.base.errors import USER_ERROR_EXIT_CODE
from zerovision.training.base.plugins import loaded
from zerovision.training.config.command_line import OneLineParser, run_script, training_parser
from zerovision.training.data import DataOptions, load_data

REFERENCE = Path(__file__).resolve().parents[1] / "references" / "errors.txt"
ASSIGNMENT = re.compile(r"([\w./{},]+)=(.*)", re.DOTALL)
NOTES = ("no GPU found", "No CUDA runtime is found")  # ours, and one of PyTorch's, on machines without a GPU
NOT_ASKED = {"bisect_runs", "pack", "replay", "serve"}  # whose own tests have their mistakes


def make_folder(folder: Path) -> None:
    """Write the run, of random weights, and the empty folder."""
    (folder / "empty").mkdir()
    save_new_run(folder / "run", load_data(DataOptions(image_size=IMAGE_SIZE)))


def run_words(script: str, words: list[str]) -> int:
    """Run a script in this process, as its file does; return the exit code."""
    with mock.patch.object(sys, "argv", [script, *words]):
        if script in COMMANDS:
            command = COMMANDS[script]
            return run_script(script, command.parse, command.run, writes_product=command.writes_product)
        if script == "train_distributed":
            return run_script("error", list, train)
        main = slurm.main if script == "slurm_distributed.sh" else launch.main
        return run_script("error", lambda given: [script, *given], main)


def each_of(name: str) -> list[str]:
    """Return the paths of a name with {alternatives}."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def put(name: str, text: str) -> None:
    """Write a file: a link, an image of a colour, or text; a name that ends in a slash is a folder."""
    path = Path(name)
    (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if text.startswith("->"):
        path.symlink_to(text[2:])
    elif text in ("red", "blue"):
        path.write_bytes(png(text))
    elif not name.endswith("/"):
        path.write_text(text)


def answer(command: str) -> str:
    """Run a command in the current folder; return its line, or what else came of it."""
    words, variables, made = shlex.split(command), {}, set()
    while found := ASSIGNMENT.fullmatch(words[0]):
        name, text = found.groups()
        if "." in name or "/" in name:
            for path in each_of(name):
                put(path, text.replace("\\n", "\n"))
                made.add(path.split("/")[0])
        else:
            variables[name] = text
        words.pop(0)
    output, errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch("zerovision.training.run.train", side_effect=AssertionError("it trains")),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = run_words(words[0], words[1:])
    for name in made:
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    printed = output.buffer.getvalue().decode()
    lines = [line for line in errors.getvalue().splitlines() if not any(note in line for note in NOTES)]
    if code != USER_ERROR_EXIT_CODE or len(lines) != 1 or printed:
        return f"exit code {code}, output {printed!r}, errors {errors.getvalue()!r}"
    return lines[0].replace(str(Path.cwd()), "HERE")


def one_parser() -> Callable[..., OneLineParser]:
    """Return what makes the trainer's parser once for all commands between which no plug-in was loaded."""
    made = functools.cache(lambda _plugins, hides_rare: training_parser(hides_rare=hides_rare))
    return lambda *, hides_rare=False: made(loaded(), hides_rare)


def lines_now(reference: list[str]) -> Iterator[str]:
    """Yield the lines of the reference, with the answers that the commands get now."""
    variables = environment(DRY_RUN="1")
    variables = {name: value for name, value in variables.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    here = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch("zerovision.training.config.command_line.training_parser", one_parser()),
        mock.patch("torch.cuda.is_available", return_value=False),
    ):
        make_folder(Path(folder))
        os.chdir(folder)
        try:
            for line in reference:
                if line.startswith("$ "):
                    yield line
                    yield answer(line[2:])
                elif not line or line.startswith("#"):
                    yield line
        finally:
            os.chdir(here)


def test_every_mistake_gets_the_line_of_the_reference() -> None:
    expected = REFERENCE.read_text(encoding="utf-8").splitlines()
    found = list(lines_now(expected))
    asked = {script_of(line) for line in found} - {None}
    assert asked == {*COMMANDS, *LAUNCHERS, "train_distributed"} - NOT_ASKED
    assert found == expected
    assert not [line for line in found if line.startswith("exit code ")], "it is no mistake, or gets no line"


def script_of(line: str) -> str | None:
    words = shlex.split(line)[1:] if line.startswith("$ ") else []
    return next((word for word in words if not ASSIGNMENT.fullmatch(word)), None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = "\n".join(lines_now(REFERENCE.read_text(encoding="utf-8").splitlines())) + "\n"
    REFERENCE.write_text(text, encoding="utf-8")
