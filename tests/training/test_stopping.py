"""Signals, through the launcher: every rank stops at the same step, the checkpoint is good, the run goes on.

And a run that gives up by itself says why, on the console and in its report.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from commands import ROOT, assert_success, environment, launch, read_metrics, train_here

import zerovision
from zerovision.launch.local_ranks import RANK_NAME
from zerovision.training.base.errors import TOO_MANY_BAD_STEPS_EXIT_CODE, UserError
from zerovision.training.observe.new_run import LOCK, Origin, lock_run

MODEL = "basic_cnn"  # BatchNorm and dropout
WORDS = (MODEL, "fsdp_stage2", "2", "16", "2")
FLAGS = ("--image-size", "16", "--log-every-steps", "2", "--tensorboard", "false", "--workers", "0")
STEPS_PER_EPOCH = 45  # 1,437 digits, 32 at a time


def start(logs, name, *flags):
    own = ("--run-name", name, "--log-dir", str(logs))
    return begin(["bash", "scripts/launch_distributed.sh", *WORDS, *FLAGS, *flags, *own])


def begin(line, **options):
    return subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
        # A background job of a shell inherits SIGINT ignored, and the launcher rightly leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(condition, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"waited in vain: {process.communicate()}")


def wait_for_the_end(processes):
    deadline = time.monotonic() + 60
    while left := processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_alive_in(session, process):
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session
    return False


def has_reached(folder, step):
    return (folder / "metrics.jsonl").exists() and any(m["step"] >= step for m in read_metrics(folder, "step"))


def ranks_of(run_name):
    """Return the live ranks, without their forks: one predicts the run's time beside rank 0."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "environ", "name"]):
        is_rank = "LOCAL_RANK" in (process.info["environ"] or {}) or (process.info["name"] or "").startswith("rank ")
        if is_rank and {run_name, f"--run-name={run_name}"} & {*(process.info["cmdline"] or [])}:
            found.append(process)
    pids = {process.pid for process in found}
    return [process for process in found if process.info["ppid"] not in pids]


@pytest.mark.slow
def test_a_killed_training_of_some_minutes_keeps_its_epochs(tmp_path):
    line = [sys.executable, "scripts/train.py", "digits", "--minutes", "0.6", "--epochs", "1000", *FLAGS]
    # Two threads would wait for each other while another test has a core, and no second epoch would fit.
    line += ["--model-type", MODEL, "--log-dir", str(tmp_path), "--report", "false", "--threads-per-rank", "1"]
    process, folder = begin(line), tmp_path / "runs" / "digits"
    wait_until(lambda: [*folder.glob("checkpoints/step-*/manifest.json")], process)
    epochs = json.loads((folder / "config.json").read_text())["epochs"]
    process.kill()
    process.wait()
    wait_for_the_end(lambda: ranks_of("digits"))
    process = begin([*line, "--run-name", "digits", "--resume", "auto"])
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "resuming from" in output
    assert json.loads((folder / "config.json").read_text())["epochs"] == epochs
    assert 1 < epochs < 1000
    assert read_metrics(folder, "epoch")[-1]["epoch"] == epochs


SETTINGS = {"model_type": "basic_cnn", "image_size": 8, "epochs": 4, "workers": "2", "run_name": "digits", "seed": 1}
# Two threads would wait for each other while another test has a core.
SETTINGS |= {"report": False, "progress": "off", "threads_per_rank": 1}
CALL = f"""
import sys, zerovision
zerovision.train("digits", log_dir=sys.argv[1], **{SETTINGS})
print("the next line of the script")
"""


@pytest.mark.parametrize("whom", ["its group", pytest.param("the process", marks=pytest.mark.slow)])
def test_ctrl_c_in_a_python_program_saves_and_interrupts_it(tmp_path, whom, capfd):
    """A terminal sends it to the group, a notebook to the process."""
    call = [sys.executable, "-c", CALL, str(tmp_path)]
    process, folder = begin(call, start_new_session=True), tmp_path / "runs" / "digits"
    wait_until(lambda: (folder / "metrics.jsonl").exists() and read_metrics(folder, "epoch"), process)
    (os.kill if whom == "the process" else os.killpg)(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "the next line" not in output
    *_, last = errors.splitlines()
    assert last.startswith("KeyboardInterrupt: run digits was stopped: to continue it, repeat the call with run_name")
    assert "[rank0]" not in errors
    wait_for_the_end(lambda: [one for one in psutil.process_iter() if is_alive_in(process.pid, one)])
    here = SETTINGS | {"workers": "0"}  # of which no byte depends
    zerovision.train("digits", log_dir=tmp_path, resume="auto", **here)
    assert "resuming from" in capfd.readouterr().out
    zerovision.train("digits", log_dir=tmp_path / "whole", **here)
    weights = [folder, tmp_path / "whole" / "runs" / "digits"]
    assert len({(one / "model.safetensors").read_bytes() for one in weights}) == 1


def rank_0_of(run_name):
    return next(process for process in ranks_of(run_name) if process.name() == f"{RANK_NAME}0")


def train_on_one_rank(logs, name, *flags):
    """The same training in this process, with two accumulation steps in the place of two ranks: output, bytes left."""
    words = ["--model-type", MODEL, "--strategy", WORDS[1], "--batch-size", WORDS[3], "--epochs", WORDS[4]]
    words += ["--gradient-accumulation-steps", "2", *FLAGS, "--run-name", name, "--log-dir", str(logs)]
    result = assert_success(train_here(*words, *flags))
    return result.stdout, bytes_left(logs / "runs" / name)


def bytes_left(run):
    return b"".join(path.read_bytes() for path in (run / "model.safetensors", *sorted((run / "history").iterdir())))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train_on_one_rank(tmp_path_factory.mktemp("whole"), "whole")[1]


def assert_stopped(process, number, name):
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output + errors
    assert f"stopped by {number.name}" in output
    assert "Traceback" not in output + errors
    assert ranks_of(name) == []
    return output


def assert_left_a_report(output, folder):
    assert f"report       {folder / 'report.html'}\n" in output
    assert "It can be resumed." in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_whose_rank_is_stopped_before_the_first_step_begins_anew(tmp_path, uninterrupted):
    process = start(tmp_path, "early")
    wait_until((tmp_path / "runs" / "early").exists, process)
    ranks_of("early")[0].send_signal(signal.SIGTERM)
    output = assert_stopped(process, signal.SIGTERM, "early")
    assert "could not be written" not in output
    assert train_on_one_rank(tmp_path, "early", "--resume", "auto")[1] == uninterrupted


def test_a_run_that_is_stopped_twice_ends_with_the_bytes_of_one_that_never_was(tmp_path, uninterrupted):
    """By SIGTERM to the launcher, and by SIGUSR1 to one rank in the evaluation.

    Slurm sends SIGUSR1 ahead of a preemption; the evaluation is broken off and made anew after the resume.
    """
    folder = tmp_path / "runs" / "stopped"
    process = start(tmp_path, "stopped", "--workers", "1")
    wait_until(lambda: has_reached(folder, 4), process)
    process.send_signal(signal.SIGTERM)
    output = assert_stopped(process, signal.SIGTERM, "stopped")
    assert_left_a_report(output, folder)
    assert not (folder / "README.md").exists()
    assert (folder / "checkpoints" / "last").read_text().startswith("step-00000-")

    line = shlex.split(re.search(r"^to continue  (.*)$", output, re.MULTILINE)[1])
    typed = ["bash", "scripts/launch_distributed.sh", *WORDS, *FLAGS, "--workers", "1"]
    assert line == [*typed, "--log-dir", str(tmp_path), "--run-name=stopped", "--resume=auto"]
    process = begin([*line, "--workers", "0"])  # so that ranks alone are found
    wait_until(lambda: len(ranks_of("stopped")) == 2, process)
    rank = ranks_of("stopped")[-1]  # found before, because the evaluation is short
    wait_until(lambda: has_reached(folder, STEPS_PER_EPOCH), process)
    rank.send_signal(signal.SIGUSR1)
    assert_left_a_report(assert_stopped(process, signal.SIGUSR1, "stopped"), folder)

    resumes = len(read_metrics(folder, "resume"))
    output, weights = train_on_one_rank(tmp_path, "stopped", "--resume", "auto")
    assert "resuming from" in output
    assert weights == uninterrupted
    assert len(read_metrics(folder, "resume")) == resumes + 1


@pytest.mark.slow  # of the standard output itself: tests/unit/test_lasting_output.py
def test_a_run_whose_output_nobody_reads_any_more_goes_on(tmp_path, uninterrupted):
    """As in `... | tee log`, if tee is killed; the log file has everything."""
    process = start(tmp_path, "unread")
    wait_until(lambda: has_reached(tmp_path / "runs" / "unread", 4), process)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert ranks_of("unread") == []
    assert bytes_left(tmp_path / "runs" / "unread") == uninterrupted
    assert "unread report " in (tmp_path / "training.log").read_text()


@pytest.mark.slow  # SIGTERM takes the same way, and any number of ranks and strategy is test_resume.py's
def test_ctrl_c_and_on_with_one_rank_under_another_strategy(tmp_path):
    """The global batch is held: two accumulation steps in the place of two ranks."""
    folder = tmp_path / "runs" / "moved"
    process = start(tmp_path, "moved")
    wait_until(lambda: has_reached(folder, STEPS_PER_EPOCH + 2), process)
    with pytest.raises(UserError, match=rf"is being trained by pid {rank_0_of('moved').pid} on"):
        lock_run(folder / LOCK, Origin(), wait_s=0)
    process.send_signal(signal.SIGINT)
    assert_left_a_report(assert_stopped(process, signal.SIGINT, "moved"), folder)
    assert (folder / "evaluation" / "worst.png").exists()
    words = [*WORDS[:1], "fsdp_stage3", "1", *WORDS[3:]]
    again = launch(*words, *FLAGS, "--run-name", "moved", "--log-dir", str(tmp_path), "--resume", "must")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "global batch 32 = 16 per CPU rank x 1 CPU rank x 2 accumulation steps" in again.stdout
    epochs = read_metrics(folder, "epoch")
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[-1]["val_top1"] > epochs[0]["val_top1"] > 0.3


def test_a_run_that_gives_up_says_why_in_its_report(tmp_path):
    diverges = ("--optimizer", "sgd", "--learning-rate", "100", "--gradient-clipping", "0", "--max-bad-steps", "2")
    words = ("--model-type", MODEL, "--batch-size", "32", "--epochs", "2", *FLAGS, *diverges)
    result = train_here(*words, "--run-name", "diverged", "--log-dir", str(tmp_path))
    folder = tmp_path / "runs" / "diverged"
    assert result.returncode == TOO_MANY_BAD_STEPS_EXIT_CODE, result.stdout + result.stderr
    (why,) = [line for line in result.stderr.splitlines() if line.startswith("error: 2 steps in a row were skipped")]
    step = read_metrics(folder, "skipped_step")[-1]["step"]
    assert f"gave up at step {step}\nreport       {folder / 'report.html'}\n" in result.stdout
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    assert f"Gave up at step {step} (" in page
    assert why.removeprefix("error: ") in page
    assert "the loss was not finite (2 in a row, among image " in page
