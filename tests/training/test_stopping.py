"""Signals, through both launchers: every rank stops at the same step, the checkpoint is good, the run goes on."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest
from commands import ROOT, assert_user_error, environment, launch, read_metrics, train_alone

FLAGS = ["--data", "fake", "--log-every-steps", "2"]
# No BatchNorm: its per-rank statistics are averaged at a stop, so only models without it go on bit for bit.
MODEL = "timm:convnext_atto"
EPOCHS = "2"


def start(logs, name, **changes):
    words = [MODEL, "fsdp_stage2", "2", "32", EPOCHS, *FLAGS, "--run-name", name, "--log-dir", str(logs)]
    return subprocess.Popen(
        ["bash", "scripts/launch_distributed.sh", *words],
        cwd=ROOT,
        env=environment() | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell inherits SIGINT ignored, and the launcher rightly leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_step(folder, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and any(m["step"] >= step for m in read_metrics(folder, "step")):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def ranks_of(run_name):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if run_name in (process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    logs = tmp_path_factory.mktemp("whole")
    words = [MODEL, "fsdp_stage2", "2", "32", EPOCHS, *FLAGS, "--run-name", "whole", "--log-dir", str(logs)]
    result = launch(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    return (logs / "runs" / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("number", "launcher", "exit_code"), [(signal.SIGTERM, "deepspeed", 143), (signal.SIGINT, "torchrun", 130)]
)
def test_a_signal_saves_and_the_run_goes_on(number, launcher, exit_code, tmp_path, uninterrupted):
    name = f"stopped-{launcher}"
    folder = tmp_path / "runs" / name
    process = start(tmp_path, name, LAUNCHER=launcher)
    wait_for_step(folder, 4, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == exit_code, output + errors
    assert f"stopped by {number.name} in epoch 1 after" in output
    assert "Traceback" not in output + errors
    assert ranks_of(name) == []
    assert (folder / "checkpoints" / "last").read_text().startswith("step-00000-")

    words = [MODEL, "fsdp_stage2", "2", "32", EPOCHS, *FLAGS, "--run-name", name, "--log-dir", str(tmp_path)]
    again = launch(*words, "--resume", "must")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from" in again.stdout
    assert (folder / "model.safetensors").read_bytes() == uninterrupted


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    flags = [
        "--data",
        "fake",
        "--run-name",
        "first",
        "--log-dir",
        str(tmp_path),
        "--epochs",
        "1",
        "--batch-size",
        "100",
    ]
    assert train_alone(*flags, "--model-type", "basic_cnn").returncode == 0
    other = train_alone(*flags, "--model-type", "mobilenet", "--resume", "auto")
    assert_user_error(other, "was made with model")


def test_resume_must_needs_a_checkpoint(tmp_path):
    result = train_alone("--data", "fake", "--model-type", "basic_cnn", "--resume", "must", "--log-dir", str(tmp_path))
    assert_user_error(result, "--resume must: no checkpoint in")
