"""Jobs on a real Slurm: trained, cut short, requeued, cancelled, preempted; each ends with the weights it should."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import REPO_ROOT, SHARED, Hosts, environment
from tests.cluster.slurm_jobs import FLAGS, SlurmJob, processes_left
from tests.cluster.trainings import RUN, assert_auto_was_planned, ranks, train_on_login

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TWO_NODES = ["--nodes=2", "--gpus-per-node=1"]
SHORT = ["basic_cnn", "ddp", "1", "16", "1"]
LONG = ["basic_cnn", "ddp", "1", "16", "14"]  # about a minute on 2 cores


@pytest.fixture(scope="module")
def uninterrupted() -> bytes:
    """The weights of LONG on two ranks of this machine, without Slurm."""
    logs = SHARED / "uninterrupted"
    shutil.rmtree(logs, ignore_errors=True)
    words = [*LONG[:2], "2", *LONG[3:], *FLAGS, "--log-dir", str(logs), "--run-name", "oracle"]
    command = ["bash", str(REPO_ROOT / "scripts/launch_distributed.sh"), *words]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
    return (logs / "runs/oracle/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "nodes", "ranks", "gpus"),
    [
        (["--nodes=2", "--gres=gpu:2"], "node01,node02", "1", "0,1"),
        (["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--gpus-per-task=1"], "node01", "2", "0,1"),
        (["--partition=cpu", "--gpus-per-node=0"], "node04", "2", ""),
    ],
)
def test_a_job_trains_wherever_gpus_are_bound(
    slurm: Hosts, shared: Path, options: list[str], nodes: str, ranks: str, gpus: str
) -> None:
    job = SlurmJob(slurm, shared, options, [*SHORT[:2], ranks, *SHORT[3:]])
    node = nodes.split(",")[0]
    job.wait_for(lambda: slurm.processes(node, "scripts/train_distributed.py --model-type"), timeout_s=60)
    rank = next(iter(slurm.processes(node, "scripts/train_distributed.py --model-type")))
    variables = slurm.run(node, ["cat", f"/proc/{rank}/environ"]).stdout.split("\0")
    assert [value for value in variables if value.startswith("CUDA_VISIBLE_DEVICES=")] == (
        [f"CUDA_VISIBLE_DEVICES={gpus}"] if gpus else []
    )
    shown = job.wait_for_state("COMPLETED", "FAILED", timeout_s=120)
    assert shown["JobState"] == "COMPLETED", job.output
    assert f"Slurm job {job.number} on {nodes}, restart 0\n" in job.output
    assert not {"\r", "\x1b"} & set(job.output)  # lines, no progress bar: no rank has a terminal
    assert job.weights(f"slurm-{job.number}")


def test_a_job_with_auto_trains_with_the_strategy_and_batch_size_that_it_finds(slurm: Hosts, shared: Path) -> None:
    batch = ["--global-batch", "64"]
    job = SlurmJob(slurm, shared, TWO_NODES, ["basic_cnn", "auto", "1", "auto", "1", *batch, "--preflight"])
    assert job.wait_for_state("COMPLETED", "FAILED", timeout_s=180)["JobState"] == "COMPLETED", job.output
    assert "0 wrong" in job.output
    run = job.logs / "runs" / f"slurm-{job.number}"
    strategy, size = assert_auto_was_planned(run, job.output, ranks=2, global_batch=64)
    logs = ["--log-dir", str(shared / "again/logs"), "--run-name", RUN]
    again = train_on_login(slurm, shared / "again", ["basic_cnn", strategy, "2", size, "1", *batch, *FLAGS, *logs])
    assert job.weights(run.name) == (again / "model.safetensors").read_bytes()


def test_a_job_goes_on_after_its_time_limit_with_the_same_weights(
    slurm: Hosts, shared: Path, uninterrupted: bytes
) -> None:
    limit = ["--time=1", "--signal=B:USR1@15"]  # Slurm sends it up to 30 s earlier, never later
    job = SlurmJob(slurm, shared, [*TWO_NODES, *limit], LONG)
    job.wait_for_training()
    halted = {node: ranks(slurm, node) for node in ("node01", "node02")}  # no machine trains faster than the limit
    assert all(halted.values()), job.output
    for number, said in ((signal.SIGSTOP, "all ranks save and stop"), (signal.SIGCONT, "requeued")):
        for node, processes in halted.items():
            slurm.signal(node, number, *processes)
        job.wait_for(lambda said=said: said in job.output, timeout_s=90)
    job.wait_for(lambda: job.show()["JobState"] == "PENDING" and job.show()["Restarts"] == "1", timeout_s=120)
    assert "the time limit is near: requeued" in job.output
    slurm.run("login", ["scontrol", "update", f"JobId={job.number}", "TimeLimit=10"])
    job.release()
    assert job.wait_for_state("COMPLETED", "FAILED", timeout_s=180)["JobState"] == "COMPLETED", job.output
    assert f"Slurm job {job.number} on node01,node02, restart 1\n" in job.output
    assert job.weights(f"slurm-{job.number}") == uninterrupted


def test_scancel_saves_and_leaves_no_process(slurm: Hosts, shared: Path) -> None:
    job = SlurmJob(slurm, shared, TWO_NODES, LONG)
    job.wait_for_training()
    slurm.run("login", ["scancel", job.number])
    job.wait_for_state("CANCELLED", timeout_s=30)
    deadline = time.monotonic() + 30
    while processes_left(slurm):
        assert time.monotonic() < deadline, processes_left(slurm)
        time.sleep(0.5)
    assert job.show()["Restarts"] == "0"
    assert (job.logs / "runs" / f"slurm-{job.number}" / "checkpoints" / "last").exists(), job.output


def test_a_job_that_fails_the_same_way_twice_stops(slurm: Hosts, shared: Path) -> None:
    (shared / "torchvision").mkdir()
    (shared / "torchvision" / "__init__.py").write_text("raise RuntimeError('a broken installation')\n")
    words = [*SHORT, "--max-restarts", "1"]
    job = SlurmJob(slurm, shared, TWO_NODES, words, PYTHONPATH=str(shared))
    job.wait_for(lambda: job.show()["JobState"] == "PENDING" and job.show()["Restarts"] == "1", timeout_s=90)
    assert "gave up after 1 restart" in job.output
    job.release()
    shown = job.wait_for_state("FAILED", "COMPLETED", timeout_s=90)
    assert (shown["JobState"], shown["Restarts"], shown["ExitCode"]) == ("FAILED", "1", "1:0"), job.output
    assert "without a newer checkpoint: not requeued" in job.output.splitlines()[-1]


def test_tasks_of_an_array_share_neither_run_nor_port(slurm: Hosts, shared: Path) -> None:
    options = ["--array=0-1", "--gpus-per-node=1", f"--output={shared}/%A-%a.out"]
    words = ["basic_cnn,mobilenet", *SHORT[1:], "--seed", "{task}"]
    job = SlurmJob(slurm, shared, options, words)
    queue = ["squeue", "--noheader", "--jobs", job.number]
    job.wait_for(lambda: not slurm.run("login", queue).stdout.split(), timeout_s=180)
    texts = [(shared / f"{job.number}-{task}.out").read_text() for task in (0, 1)]
    for task, (text, model) in enumerate(zip(texts, ("basic_cnn", "mobilenet"), strict=True)):
        name = f"slurm-{job.number}-{task}"
        assert f"run {name}: {model}" in text, text
        config = (job.logs / "runs" / name / "config.json").read_text()
        assert f'"seed": {task}' in config
        assert job.weights(name)
    ports = {line.rsplit(":", 1)[1] for text in texts for line in text.splitlines() if "they meet on" in line}
    assert len(ports) == 2


def test_a_preempted_job_saves_and_goes_on_with_the_same_weights(
    slurm: Hosts, shared: Path, uninterrupted: bytes
) -> None:
    job = SlurmJob(slurm, shared, TWO_NODES, LONG)
    job.wait_for_training()
    time.sleep(10)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null"]
    other = slurm.run("login", [*urgent, "--wrap", "sleep 600"]).stdout.strip()
    job.wait_for(lambda: job.show()["JobState"] == "PENDING" and job.show()["Restarts"] == "1", timeout_s=90)
    assert (job.logs / "runs" / f"slurm-{job.number}" / "checkpoints" / "last").exists(), job.output
    slurm.run("login", ["scancel", other])
    job.release()
    assert job.wait_for_state("COMPLETED", "FAILED", timeout_s=180)["JobState"] == "COMPLETED", job.output
    assert f"Slurm job {job.number} on node01,node02, restart 1\n" in job.output
    assert job.weights(f"slurm-{job.number}") == uninterrupted


def test_a_job_that_loses_a_node_goes_on_with_another_and_the_same_weights(
    slurm: Hosts, shared: Path, uninterrupted: bytes
) -> None:
    job = SlurmJob(slurm, shared, TWO_NODES, LONG)
    job.wait_for_training()
    time.sleep(8)
    slurm.fault("node02", "poweroff")
    job.wait_for(lambda: job.show()["JobState"] == "PENDING" and job.show()["Restarts"] == "1", timeout_s=90)
    job.release()
    assert job.wait_for_state("COMPLETED", "FAILED", timeout_s=180)["JobState"] == "COMPLETED", job.output
    assert "node02 is lost" in job.output
    assert f"Slurm job {job.number} on node01,node03, restart 1\n" in job.output
    assert job.weights(f"slurm-{job.number}") == uninterrupted


def test_the_tasks_of_an_srun_are_the_ranks(slurm: Hosts, shared: Path, uninterrupted: bytes) -> None:
    """Without any launcher of ours; the shell of the job, which Slurm calls a job of two tasks too, is no rank."""
    code = "from zerovision.training.world.launchers import launched_world; print('alone' * (launched_world()[3] == 1))"
    words = ["--model-type", "basic_cnn", "--batch-size", "16", "--epochs", LONG[-1], *FLAGS]
    words += ["--log-dir", str(shared / "logs"), "--run-name", "tasks"]
    train = shlex.join([sys.executable, "scripts/train_distributed.py", *words])
    script = f'cd {REPO_ROOT}; {sys.executable} -c "{code}"; srun --kill-on-bad-exit {train}'
    output = shared / "tasks.out"
    options = ["--wait", "--nodes=2", "--ntasks=2", "--gpus-per-node=1", f"--output={output}"]
    result = slurm.run("login", ["timeout", "200", "sbatch", *options, "--wrap", script], timeout=220)
    assert result.returncode == 0, output.read_text()
    assert output.read_text().splitlines().count("alone") == 1
    assert "2 CPU ranks over gloo on eth0" in output.read_text()
    assert (shared / "logs/runs/tasks/model.safetensors").read_bytes() == uninterrupted
