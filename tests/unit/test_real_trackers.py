"""The packages of the trackers themselves, without a network; those that are not installed are skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from test_loggers import RUN, STEP
from test_trackers import run_folder

from tests.kit import ROOT, wait_until
from tests.training.ranks import free_port
from zerovision.training.base.run_folder import WEIGHTS
from zerovision.training.config import TrainConfig
from zerovision.training.observe.loggers import tracker
from zerovision.training.observe.loggers.tracker import TrackerLogger
from zerovision.training.run import run

pytestmark = pytest.mark.slow
FILES = {"evaluation", "report", "model"}


def needs(name):
    is_missing = importlib.util.find_spec(name.partition(" ")[0]) is None
    return pytest.param(name, marks=pytest.mark.skipif(is_missing, reason="not installed"))


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker, "ENDING_SECONDS", 250.0)


@contextlib.contextmanager
def mlflow_server(log_dir):
    """Yield the process of a server on this machine, which keeps its runs where they are without one."""
    folder, port = log_dir / "mlflow", free_port()
    folder.mkdir(parents=True, exist_ok=True)
    words = ["server", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words, "--artifacts-destination", str(folder / "artifacts")],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 300
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        assert server.poll() is None, (folder / "server.log").read_text()[-1000:]
        assert time.monotonic() < end
        time.sleep(0.5)
    try:
        yield server
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        kill(server)


def kill(server):
    """Kill a server with all its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def read_wandb(log_dir):
    """Return (steps of the loss, what the run ended with, kinds of artifacts, configuration, runs) from its logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps, end, artifacts, config, runs = Counter(), [], set(), {}, set()
    for path in sorted(log_dir.glob("wandb/offline-run-*/*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while place < len(data):  # LevelDB's log format, in blocks of 32 KiB
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind not in (1, 4):  # the last part of a record
                continue
            record, whole = Record.FromString(whole), b""
            rows = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in rows:
                steps[int(rows["_step"])] += 1
            if record.HasField("run"):
                runs.add(record.run.run_id)
                if record.run.HasField("branch_point"):  # what the server does, too
                    assert record.run.branch_point.run == record.run.run_id
                    steps = Counter({step: n for step, n in steps.items() if step <= record.run.branch_point.value})
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("exit"):
                end.append(record.exit.exit_code)
            if record.HasField("artifact"):
                artifacts.add(record.artifact.type)
    return steps, "finished" if end[-1] == 0 else "killed", artifacts, config, runs


def read_mlflow(log_dir):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{log_dir}/mlflow/mlflow.db"))
    runs = client.search_runs([client.get_experiment_by_name("zerovision").experiment_id])
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    artifacts = {Path(one.path).stem for one in client.list_artifacts(runs[0].info.run_id)} - {"images"}
    names = {run.info.run_id for run in runs}
    return Counter(one.step for one in history), runs[0].info.status.lower(), artifacts, runs[0].data.params, names


def read_trackio(log_dir):
    os.environ["TRACKIO_DIR"] = str(log_dir / "trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("zerovision")
    logs = SQLiteStorage.get_logs("zerovision", "digits")
    steps = Counter(one["step"] for one in logs if "train/loss" in one)
    artifacts = {one["type"] for one in SQLiteStorage.get_artifacts("zerovision")}
    return steps, "", artifacts, run.config, {run.id}


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


def log(name, folder, first_step, last_step, *, is_killed=False):
    """Log steps as a run of that folder does, in a process that is killed, or in this one."""
    if is_killed:
        program = (
            "import os, sys, time; sys.path += ['tests/unit']; import test_real_trackers as tests\n"
            f"folder = tests.run_folder(tests.Path({str(folder.log_dir.parent)!r}))\n"
            f"logger = tests.TrackerLogger({name!r}, folder, {{'epochs': 3}}, {first_step})\n"
            f"tests.log_steps(logger, {first_step}, {last_step})\n"
            f"while not (folder.path / 'trackers/{name}.json').exists(): time.sleep(0.1)\n"
            "time.sleep(3); os.kill(os.getpid(), 9)"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        return
    logger = TrackerLogger(name, folder, {"epochs": 3}, first_step)
    log_steps(logger, first_step, last_step)
    logger.end(RUN)
    logger.delivered()


def log_steps(logger, first_step, last_step):
    for step in range(first_step, last_step):
        logger.event("step", {"step": step + 1, "loss": STEP.loss, "gradient_norm": float("nan"), "mfu": None})
    logger.event("diverged", {"step": last_step, "epoch": 1, "reason": "test"})


def processes(folder):
    """Return the command lines of the processes that feed this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0") if path.exists() else []
        found += [words] if str(folder.log_dir).encode() in words else []
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [needs(name) for name in (*READERS, "mlflow with a server")])
def test_a_killed_run_goes_on_in_the_same_one(name, tmp_path):
    folder, name, server = run_folder(tmp_path), name.partition(" ")[0], name.partition(" ")[2]
    with mlflow_server(folder.log_dir) if server else contextlib.nullcontext():
        check_killed_run(name, folder)


def check_killed_run(name, folder):
    steps_again = {5, 6}
    log(name, folder, 0, 6, is_killed=True)
    wait_until(lambda: processes(folder) == [], 90)
    steps, status, artifacts, _, runs = READERS[name](folder.log_dir)
    assert (sorted(steps), artifacts) == ([1, 2, 3, 4, 5, 6], set())
    assert status in ("killed", "")
    log(name, folder, 4, 9)
    steps, status, artifacts, config, same = READERS[name](folder.log_dir)
    assert same == runs
    assert sorted(steps) == [*range(1, 10)]
    assert {step for step, count in steps.items() if count > 1} == (set() if name == "wandb" else steps_again)
    assert status in ("finished", "")
    assert artifacts >= FILES
    assert str(config["epochs"]) == "3"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [needs("mlflow")])
def test_a_server_that_dies_in_mid_run_changes_no_byte(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tracker, "ENDING_SECONDS", 20.0)
    shared = {"model_type": "basic_cnn", "image_size": 8, "batch_size": 32, "log_every_steps": 1, "report": False}
    shared |= {"epochs": 3, "progress": "off", "log_dir": str(tmp_path)}
    runs, event, steps = tmp_path / "runs", TrackerLogger.event, Counter()

    def kill_after_first_epoch(logger, kind, values):
        event(logger, kind, values)
        end = time.monotonic() + 300
        while kind == "epoch" and not steps and time.monotonic() < end:
            with contextlib.suppress(AttributeError, IndexError):  # no run yet
                steps.update(read_mlflow(tmp_path)[0])
            time.sleep(0.5)
        if steps and server.poll() is None:
            kill(server)

    monkeypatch.setattr(TrackerLogger, "event", kill_after_first_epoch)
    with mlflow_server(tmp_path) as server:
        assert run(TrainConfig(**shared, run_name=name, loggers=name)) == 0
    assert server.returncode == -signal.SIGKILL
    assert min(steps) == 1, "it had some by then"
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"note: {name}: ")]
    end = time.monotonic() + 60
    while processes(run_folder(tmp_path)) and time.monotonic() < end:
        time.sleep(0.2)
    assert run(TrainConfig(**shared, run_name="alone", loggers="none")) == 0
    assert (runs / name / WEIGHTS).read_bytes() == (runs / "alone" / WEIGHTS).read_bytes()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("wandb", {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}),
        ("wandb", {"WANDB_MODE": "online", "WANDB_API_KEY": ""}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}),
    ],
)
def test_a_server_that_is_not_there_is_one_line(name, values, tmp_path, monkeypatch, capfd):
    if importlib.util.find_spec(name) is None:
        pytest.skip("not installed")
    monkeypatch.setenv("NETRC", "/dev/null")
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    folder = run_folder(tmp_path)
    start = time.monotonic()
    log(name, folder, 0, 6)
    assert time.monotonic() - start < 200
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"note: {name}: ")
    assert line.endswith("the run is not there, training goes on")
    assert processes(folder) == []
