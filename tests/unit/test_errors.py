"""The one line that a foreign death gets, and the traceback that everything else keeps."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from zerovision.delivery.trained_model import TrainedModel, find_model, find_run
from zerovision.models.weights_file import read_weights_file
from zerovision.planning.doctor.doctor_command import data_fields
from zerovision.training.base.errors import RunEnded, UserError, known_failure, printable
from zerovision.training.base.run_logger import Loggers
from zerovision.training.checkpoint.weights import read_metadata
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.folder import layout_of


class DeadlyData(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)


def test_the_death_of_a_real_worker_is_one_line():
    with pytest.raises(RuntimeError) as caught:
        list(DataLoader(DeadlyData(), num_workers=1))
    line = known_failure(caught.value, 3)
    assert line is not None
    assert line.startswith("a data worker of rank 3 died: DataLoader worker")
    assert "\n" not in line


def test_a_lost_peer_is_one_line():
    gloo = "[/pytorch/gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:20395.\nCheck the logs"
    assert known_failure(RuntimeError(gloo), 0) == "rank 0 lost the connection to another rank"


def test_a_bug_keeps_its_traceback():
    assert known_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0) is None


def test_what_a_terminal_would_obey_is_escaped_in_mistakes_and_in_the_log():
    name = "\x1b]0;x\x07\x9b2J a\r\nb \u202e\u2028 \ud83d 📷 é می\u200cخواهم"
    shown = r"\x1b]0;x\x07\x9b2J a\r\nb \u202e\u2028 \ud83d 📷 é می" + "\u200cخواهم"
    assert printable(name) == shown
    assert str(UserError(f"class '{name}'")) == f"class '{shown}'"
    assert str(RunEnded(name, 65, 3)) == shown
    lines = []
    logger = SimpleNamespace(message=lines.append)
    Loggers([logger]).message(f"note: {name}")
    assert lines == [f"note: {shown}"]


def test_a_run_is_found_from_other_folders(tmp_path, monkeypatch):
    """By its name, and as the documentation writes its folder and weights; a file of the current folder comes first."""
    run, other = tmp_path / "repository" / "logs" / "runs" / "digits", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    weights = run / "model.safetensors"
    weights.write_bytes(bytes(8) + b"{}")
    monkeypatch.setattr("zerovision.delivery.trained_model.log_folder", lambda: tmp_path / "repository" / "logs")
    monkeypatch.chdir(other)
    for word in ("digits", "logs/runs/digits", "logs/runs/digits/", "logs/runs/digits/model.safetensors"):
        assert find_model(word) == TrainedModel(weights, run)
    assert find_run("logs/runs/digits") == run
    own = other / "logs" / "runs" / "digits"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert find_run("logs/runs/digits") == own


@pytest.mark.parametrize("word", ["~nobody.of.this.name/x", "n" * 300])
@pytest.mark.parametrize(
    "use",
    [
        find_model,
        find_run,
        lambda word: read_weights_file(word, []),
        read_metadata,
        lambda word: load_data(DataOptions(data=word)),
    ],
)
def test_a_path_that_no_file_can_have_is_one_line(use, word):
    with pytest.raises(UserError, match=r"does not exist|neither a file|no folder of that name exists"):
        use(word)
    with pytest.raises(UserError, match="no folder of that name exists"):
        layout_of(DataOptions(data=word))
    assert data_fields(TrainConfig(data=word))["data"].endswith(word)
