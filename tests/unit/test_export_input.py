"""What a user gets wrong in an export: one line, exit code 2, nothing half-written."""

from __future__ import annotations

import errno
import json
import os

import pytest
from exports import IMAGE_SIZE, save_new_run

from tests.kit import call
from zerovision.delivery.export.output_folder import unfinished_files
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return save_new_run(tmp_path_factory.mktemp("runs") / "digits", load_data(DataOptions(image_size=IMAGE_SIZE)))


def files_below(folder):
    return sorted(path for path in folder.rglob("*"))


def one_line(folder, *words):
    """Run the command, see that it is refused and leaves `folder` as it was, and return the line."""
    before = files_below(folder)
    code, out, err = call("export", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("export: ")
    assert files_below(folder) == before
    return err


def test_files_that_are_no_model(run_folder, tmp_path):
    words = ("--format", "onnx")
    content = (run_folder / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[: len(content) // 2])
    assert "cannot be read" in one_line(tmp_path, tmp_path / "cut.safetensors", *words)
    (tmp_path / "whole.safetensors").write_bytes(content)
    assert "add --data" in one_line(tmp_path, tmp_path / "whole.safetensors", *words)


def test_a_folder_with_another_models_preprocessing(run_folder, tmp_path):
    words = (run_folder, "--format", "safetensors", "--output", tmp_path, "--max-accuracy-loss", "100")
    assert call("export", *words)[0] == 0
    use = json.loads((tmp_path / "preprocessing.json").read_text())
    (tmp_path / "preprocessing.json").write_text(json.dumps({**use, "class_names": ["cat", "dog"]}))
    assert "use another --output" in one_line(tmp_path, *words)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("safetensors", "fp32"), pytest.param("torch-export", "fp32", marks=pytest.mark.slow), ("onnx", "int8")],
)
def test_a_full_disk(name, precision, run_folder, small_disk):
    words = ("--format", name, "--precision", precision, "--output", small_disk / "new", "--check-images", "4")
    line = one_line(small_disk, run_folder, *words)
    assert "cannot write to" in line
    assert "No space left on device" in line
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize(
    ("file", "is_written"),
    [
        (None, True),  # as of a full disk
        ("out/export/model.onnx", True),
        ("out", True),
        ("", True),  # a folder above it
        (".out.host+1+2+3.new/val-000000.tar", True),  # where `replacing_folder` writes
        ("photos/cat.jpg", False),
        ("out2/cat.jpg", False),
        ("/nowhere/cat.jpg", False),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_not_the_output(file, is_written, tmp_path):
    file = None if file is None else str(tmp_path / file)
    with pytest.raises(UserError) as raised, unfinished_files(tmp_path / "out"):
        raise OSError(errno.EACCES, "Permission denied", file)
    place = f"cannot write to '{tmp_path / 'out'}'" if is_written else f"cannot use '{file}'"
    assert str(raised.value) == f"{place}: Permission denied."
