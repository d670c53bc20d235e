"""The doctor's command line, and one whole examination of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT, png
from zerovision.delivery.settings import PackSettings
from zerovision.launch import doctor
from zerovision.launch.assess import Row
from zerovision.launch.doctor import DoctorSettings, Request, data_fields, request_of
from zerovision.launch.hosts import HERE
from zerovision.launch.machine_facts import data_facts
from zerovision.launch.nodes import Nodes
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import TYPED


def request(*arguments: str) -> Request:
    return request_of(DoctorSettings.read(arguments))


def test_the_training_s_words_and_the_doctors_flags_become_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ("--model-type=vgg", "--strategy=fsdp_stage3", "--data", "digits", "--val-fraction", "0.3")
    whole = request("--here", "--gpus-per-node", "3", "--data", "photos", "--log-dir", "new", "--", *words)
    assert (whole.slots, whole.is_alone, whole.log_dir) == ({HERE: 3}, True, str(tmp_path / "new"))
    data = data_fields(whole.config)
    assert (whole.has_data, data["data"], data["val_fraction"]) == (True, str(tmp_path / "photos"), 0.3)
    bare = request()
    assert (bare.slots, bare.has_data, bare.shell) == ({HERE: 0}, False, "local")
    assert bare.log_dir == str(ROOT / "logs")


def test_the_trainers_flags_are_taken_with_the_command_s_own_or_behind_two_dashes() -> None:
    words = ["--task", "multilabel", "--label-column=tags"]
    among = DoctorSettings.read([*words, "--check-data", "digits", "--pretrained"])
    behind = DoctorSettings.read(["--check-data", "digits", "--", *words, "--pretrained"])
    assert among == behind
    assert behind.config().label_column == "tags"
    packed = PackSettings.read(["digits", "new", *words, "--shard-mb", "9"])
    assert packed == PackSettings.read(["digits", "new", "--shard-mb", "9", "--", *words])
    with pytest.raises(UserError, match="'--task' comes before DATA OUT: put DATA OUT first"):
        PackSettings.read([*words, "digits", "new"])
    with pytest.raises(UserError, match="Did you mean '--label-column'"):
        DoctorSettings.read(["--labels-column", "tags"]).config()


def test_images_of_several_labels_are_counted_once(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(png("red"))
    rows = [f"{number}.png,{('a;b', 'b', 'a')[number % 3]},{'train' if number < 8 else 'val'}" for number in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(["path,tags,split", *rows]))
    given = request("--data", str(tmp_path / "t.csv"), "--task", "multilabel", "--label-column", "tags")
    assert data_facts(data_fields(given.config), None)["holds"].endswith("t.csv: 2 classes, 8 + 2 images")


def test_hosts_come_from_a_hostfile_a_list_or_slurms_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("a slots=8\nb slots=4\nc slots=8\n")
    assert request("--hostfile", str(hostfile)).slots == {"a": 8, "b": 4, "c": 8}
    assert request("--hostfile", str(hostfile), "--nodes", "2", "--gpus-per-node", "4").slots == {"a": 4, "b": 4}
    assert request("--hosts", "x,y").slots == {"x": 0, "y": 0}
    lines = [
        '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n" && exit',
        "echo fatal >&2; echo more >&2; exit 1",
    ]
    (tmp_path / "scontrol").write_text("\n".join(["#!/bin/sh", *lines]))
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    job = request("--gpus-per-node", "8")
    assert (job.slots, job.shell) == ({"n1": 8, "n2": 8}, "srun")
    assert request("--here").is_alone
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1")
    with pytest.raises(UserError, match=r"^.*'n\[1'.*--hosts.*$") as refusal:
        request()
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == "", "not what scontrol says"


@pytest.mark.slow  # by a launch: the next one
def test_this_machine_is_examined_as_a_whole(tmp_path: Path) -> None:
    words = ["--here", "--gpus-per-node", "2", "--json", "--log-dir", str(tmp_path), "--data", "digits"]
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    found = json.loads(result.stdout)
    rows = {row["check"]: row for row in found["rows"]}
    assert result.returncode == (1 if any(row["verdict"] == "wrong" for row in rows.values()) else 0)
    assert set(rows) == {"packages", "GPUs", "memory", "/dev/shm", "open files", "log folder", "data", "all-reduce"}
    assert str(tmp_path) in rows["log folder"]["found"]
    assert "2 ranks" in rows["all-reduce"]["found"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_cure_names_the_command_as_it_is_typed(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("JPEG", "warning", "files are decoded whole", "scripts/doctor.py --compile")
    monkeypatch.setattr(doctor, "examine", lambda *_: [row])
    monkeypatch.setenv(TYPED, "doctor")
    assert doctor.print_examination(request("--here"), Nodes("local"), as_json=as_json) == 0
    out = capsys.readouterr().out
    assert "zerovision doctor --compile" in out
    assert "scripts/" not in out


def test_preflight_stops_a_start_where_something_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    launch = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), "basic_cnn", "ddp", "2", "16", "1"]
    flags = ["--preflight", "--data", "digits", "--log-dir", str(tmp_path / "logs")]
    result = subprocess.run([*launch, *flags], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    for check in ("packages", "GPUs", "memory", "/dev/shm", "open files", "log folder", "data", "all-reduce"):
        assert f"{check} " in result.stdout, result.stdout
    assert "run " not in result.stdout + result.stderr


@pytest.mark.parametrize("words", ["doctor.py", "plan.py --model-type mobilenet"])
def test_a_python_without_the_packages_is_told_so_in_one_line(words: str) -> None:
    script, *flags = words.split()
    command = [sys.executable, "-S", str(ROOT / "scripts" / script), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "has no module" in line
    assert "make setup" in line
