"""The doctor's command line, its look at data and model, and one whole examination of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image

from launch.cluster.remote_shell import srun_command
from models.build import build_model
from planning.doctor import workload
from planning.doctor.assess import assess_dataset
from planning.doctor.collect import HERE, Request, dataset_options
from planning.doctor.doctor_command import parse, request_of
from planning.doctor.probe import local_command
from planning.doctor.workload import _step_seconds, dataset_fingerprint, measure_dataset, measure_model
from scripts import doctor
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(8):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 0, 0)).save(path)
    return tmp_path / "photos"


def request(*arguments: str) -> Request:
    return request_of(parse(list(arguments), None))


def test_the_training_s_words_and_the_doctors_flags_become_one_request(photos: Path) -> None:
    whole = request(
        *("--here", "--gpus-per-node", "3", "--port", "29511", "--data", str(photos)),
        *("--", "--model-type=vgg", "--strategy=fsdp_stage3", "--data", "digits", "--keep-last", "7"),
    )
    assert (whole.slots, whole.is_alone, whole.port) == ({HERE: 3}, True, 29511)
    assert (whole.config.model_type, whole.config.strategy, whole.config.keep_last) == ("vgg", "fsdp_stage3", 7)
    assert dataset_options(whole.config)["data"] == str(photos)
    assert (whole.with_dataset, whole.with_model) == (True, True)
    bare = request()
    assert (bare.slots, bare.with_dataset, bare.with_model, bare.command) == ({HERE: 0}, False, False, local_command)


def test_hosts_come_from_a_hostfile_a_list_or_slurms_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("a slots=8\nb slots=4\nc slots=8\n")
    assert request("--hostfile", str(hostfile)).slots == {"a": 8, "b": 4, "c": 8}
    assert request("--hostfile", str(hostfile), "--nodes", "2", "--gpus-per-node", "4").slots == {"a": 4, "b": 4}
    assert request("--hosts", "x,y").slots == {"x": 0, "y": 0}
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    job = request("--gpus-per-node", "8")
    assert (job.slots, job.command) == ({"n1": 8, "n2": 8}, srun_command)
    assert request("--here").is_alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "a,-oProxyCommand=reboot"), "'-oProxyCommand=reboot' is no host name"),
        (("--hosts", "a,$(reboot)"), "is no host name"),
        (("--hosts", "a,a"), "given twice"),
        (("--hosts", "a", "--nodes", "2"), "2 nodes asked for, 1 named"),
        (("--hostfile", "no/such/file"), "no/such/file"),
        (("--nodes", "2"), "--hostfile or --hosts"),
        (("--port", "70000"), "expected a whole number from 0 to 65535"),
        (("--gpus-per-node", "0"), "expected a whole number from 1 to 1024"),
        (("--hosts", "a", "--here"), "not allowed with"),
        (("--model-type", "mobilnet"), "Did you mean 'mobilenet'?"),
        (("--strategy", "zero"), "unknown strategy"),
        (("--", "--nope"), "--nope"),
        (("--check-data", "digits", "--nope"), "--nope"),
        (("--check-data", "no/such/folder"), "'no/such/folder' is not a data set"),
        (("--check-data", "digits", "--val-fraction", "2"), "--val-fraction 2.0: expected a number above 0 up to 0.9"),
        (("--check-data", "digits", "--val-fraction", "half"), "--val-fraction 'half': expected a number"),
    ],
)
def test_a_mistake_gets_one_line(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words])
    code = doctor.main()
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err


def test_the_data_set_is_examined(photos: Path) -> None:
    found = measure_dataset({"data": str(photos), "image_size": 32})
    counts = [found[name] for name in ("classes", "decoded", "unreadable", "image_size")]
    assert (found["train"] + found["val"], counts) == (8, [2, 8, [], 32])
    assert found["images_per_second"] > 10
    assert [row.verdict for row in assess_dataset("photos", found | {"host": "a"}, {}, 2)] == ["ok", "ok"]
    (photos / "a" / "0.png").write_text("text")
    row = assess_dataset("photos", measure_dataset({"data": str(photos)}) | {"host": "a"}, {}, 2)[0]
    assert row.verdict == "wrong"
    assert "a/0.png" in row.found
    with pytest.raises(UserError):
        measure_dataset({"data": str(photos / "a")})


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((9, 0), torch.bfloat16)])
def test_a_gpu_is_timed_in_the_precision_of_a_training(monkeypatch, capability, dtype):
    """PyTorch calls bf16 supported where it is only emulated, on GPUs that train in fp16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch, "rand", mock.Mock())
    autocast = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch, "autocast", autocast)
    with pytest.raises(InterruptedError):
        _step_seconds(torch.nn.Identity(), 2, 8, 3, torch.device("cuda"))
    autocast.assert_called_once_with("cuda", dtype=dtype)


def test_a_step_is_timed_in_the_layout_of_a_training(monkeypatch):
    """Kernels for convolutions would otherwise convert images and weights in every step."""
    monkeypatch.setattr(workload, "TIMED_STEPS", 1)
    module, seen = torch.nn.Conv2d(3, 4, 3), set()
    module.register_forward_pre_hook(
        lambda module, inputs: seen.update(
            (tensor.is_contiguous(memory_format=torch.channels_last), tensor.is_contiguous())
            for tensor in (*inputs, module.weight)
        )
    )
    assert _step_seconds(module, 2, 8, 3, torch.device("cpu")) > 0
    assert seen == {(True, False)}


@pytest.mark.parametrize(("workers_rate", "verdict"), [(600.0, "ok"), (500.0, "warning")])
def test_gpus_that_wait_for_data_are_foreseen(workers_rate: float, verdict: str) -> None:
    """16 cores for 4 ranks leave 3 workers a rank."""
    data = {"host": "a", "classes": 2, "train": 6, "val": 2, "decoded": 8, "unreadable": [], "in_memory": False}
    model = {"images_per_second": 1700.0, "device": "H100", "cores": 16}
    assert assess_dataset("photos", data | {"images_per_second": workers_rate}, model, 4)[1].verdict == verdict


def test_the_cheap_fingerprint_tells_copies_apart(photos: Path, tmp_path: Path) -> None:
    options = {"data": str(photos)}
    before = dataset_fingerprint(options)
    assert before["covers"] == "10 entries"
    (photos / ".hidden").write_text("")
    assert dataset_fingerprint(options) == before
    photos.rename(tmp_path / "moved")
    assert dataset_fingerprint({"data": str(tmp_path / "moved")}) == before
    (tmp_path / "moved" / "a" / "0.png").write_bytes(b"other")
    assert dataset_fingerprint({"data": str(tmp_path / "moved")})["hash"] != before["hash"]
    with pytest.raises(UserError, match="no folder"):
        dataset_fingerprint(options)


def test_the_models_size_is_the_built_models() -> None:
    found = measure_model("mobilenet", ["mobilenet"], 10, 32, 4)
    built = build_model("mobilenet", num_classes=10, image_size=32).module
    assert found["parameters"] == sum(parameter.numel() for parameter in built.parameters())


def test_this_machine_is_examined_as_a_whole(tmp_path: Path) -> None:
    words = ["--here", "--gpus-per-node", "2", "--json", "--log-dir", str(tmp_path)]
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    found = json.loads(result.stdout)
    rows = {row["check"]: row for row in found["rows"]}
    assert (found["all_reduce"]["ranks"], found["all_reduce"]["machines"]) == (2, 1)
    assert result.returncode == (1 if any(row["verdict"] == "wrong" for row in rows.values()) else 0)
    assert set(rows) >= {"packages", "GPUs", "memory", "/dev/shm", "open files", "log folder", "port", "all-reduce"}
    assert str(tmp_path) in rows["log folder"]["found"]
    assert "2 ranks" in rows["all-reduce"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_preflight_stops_a_start_where_something_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    launch = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), "basic_cnn", "ddp", "1", "16", "1"]
    flags = ["--preflight", "--log-dir", str(tmp_path / "logs")]
    result = subprocess.run([*launch, *flags], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    assert "log folder" in result.stdout
    assert "run " not in result.stdout + result.stderr


@pytest.mark.parametrize("words", ["doctor.py", "plan.py --help", "find_learning_rate.py basic_cnn ddp 1 16 1"])
def test_a_python_without_the_packages_is_told_so_in_one_line(words: str) -> None:
    script, *flags = words.split()
    command = [sys.executable, "-S", str(ROOT / "scripts" / script), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "has no module" in line
    assert "make setup" in line


def test_a_list_of_nodes_that_scontrol_cannot_read_gets_one_line(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho scontrol: fatal >&2\necho and more >&2\nexit 1\n")
    scontrol.chmod(0o755)
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="n[1")
    command = [sys.executable, str(ROOT / "scripts/doctor.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "'n[1'" in line
    assert "--hosts" in line
