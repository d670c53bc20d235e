"""What `--compile on` costs before the first step: at the first start, at later ones, and after a kill -9.

    python benchmarks/compile_start.py --model basic_cnn

Two CPU ranks, 16 images of handwritten digits a rank, compiled code in a home folder that is empty at first. CPU
seconds are those of both ranks and of the compilers that they start, up to the end of the first step and of the first
evaluation; unlike the wall clock they say the same on a busy machine. The run that is killed must end with the bytes
of the undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.report import Section, save, show, versions
from zerovision.launch.launch_folder import HeartbeatFolder

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.01
COLUMNS = ("start", "s to the first step", "CPU s to the first step", "CPU s to the first evaluation's end", "weights")


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of processes and of all that they have started."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += sum(member.cpu_times()[:4])  # its own, and of its children that have ended
    return total


def run(name: str, model: str, compiles: str, home: Path, *, kills: bool = False) -> list[tuple[str, ...]]:
    """Train two epochs, and return a row for each start; with `kills` rank 1 is killed in the second epoch."""
    starts: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [model, "ddp", "2", "16", "2", "--data", "digits", "--run-name", "run", "--compile", compiles]
        flags = ["--tensorboard", "false", "--report", "false", "--save-every-steps", "10", "--log-dir", folder]
        command = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), *words, *flags]
        environment = os.environ | {"TMPDIR": folder, "HOME": str(home), "OMP_NUM_THREADS": "1"}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        began = time.time()
        launch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        while launch.poll() is None:
            for path in Path(folder).glob("zerovision-*"):
                beats = HeartbeatFolder(path).beats()
                if len(beats) < 2:
                    continue
                start = starts.setdefault(beats[0].pid, {})
                pids = [beat.pid for beat in beats.values()]
                if beats[0].phase == "step" and "seconds" not in start:
                    start |= {"seconds": beats[0].time - began, "cpu": cpu_seconds(pids)}
                if beats[0].phase == "step" and "evaluation" in start and kills:
                    os.kill(beats[1].pid, signal.SIGKILL)
                    kills, began = False, time.time()
                if beats[0].phase == "evaluate":
                    start["evaluation"] = cpu_seconds(pids)
            time.sleep(POLL_SECONDS)
        weights = Path(folder, "runs", "run", "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()[:12]
    names = [name, f"{name}, restarted after kill -9 of a rank"]
    return [
        (names[number], *(f"{start.get(key, 0):.1f}" for key in ("seconds", "cpu", "evaluation")), digest)
        for number, start in enumerate(start for start in starts.values() if "seconds" in start)
    ]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="basic_cnn")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as home:
        rows = [
            *run("--compile off", model, "off", Path(home)),
            *run("--compile on, first start", model, "on", Path(home)),
            *run("--compile on, second start", model, "on", Path(home), kills=True),
        ]
        (kept,) = Path(home, ".cache", "zerovision", "compiled").iterdir()
        text = (
            f"{model}, digits, 16 images per rank, 2 CPU ranks of 1 thread, load {os.getloadavg()[0]:.0f} at the end; "
            f"kept: {kept.stat().st_size / 1e6:.1f} MB."
        )
    section = Section("To the first step", text, COLUMNS, rows)
    show(section)
    command = f"python benchmarks/compile_start.py --model {model}"
    save(f"compile_start_{model}", "Starts with --compile on", versions("torch", "timm"), command, [section])


if __name__ == "__main__":
    main()
