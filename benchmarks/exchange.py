"""A step of two machines over networks of several speeds: ours against DDP. Needs root and iproute2.

    python benchmarks/exchange.py --mbit 100,1000,10000

Each machine is a network namespace with one CPU rank; the wire between them is limited in both directions by a token
bucket, or not at all for 0. All contestants run in every round, in shuffled order; ratios are taken within each round.
The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launch import ROOT
from benchmarks.peers.bare_ddp import BASELINE, TUNED, TUNED_OPTIONS, ddp_step
from benchmarks.peers.job import Job, make_batches, make_network, read_job, take_turns, timed, write_job
from benchmarks.report import Section, ratios_to, save, show, spread, versions
from benchmarks.step_choices import our_step, without_shared_memory
from zerovision.training.engines import buckets
from zerovision.training.world.world import start_world, stop_world

HOSTS = ("exchange-a", "exchange-b")
OURS, AFTERWARDS = "ours", "ours, all gradients in one bucket"


@contextmanager
def two_hosts(mbit: int) -> Iterator[None]:
    """Make two network namespaces that are joined by a wire of this speed in Mbit/s; 0 for no limit."""
    try:
        for host in HOSTS:
            ip(f"netns add {host}")
        ip(f"link add eth0 netns {HOSTS[0]} type veth peer name eth0 netns {HOSTS[1]}")
        for number, host in enumerate(HOSTS, start=1):
            ip(f"-n {host} address add 10.99.0.{number}/24 dev eth0")
            for link in ("lo", "eth0"):
                ip(f"-n {host} link set {link} up")
            if mbit:
                shape = f"qdisc add dev eth0 root tbf rate {mbit}mbit burst {burst_kb(mbit)}kb latency 50ms"
                subprocess.run(["tc", "-n", host, *shape.split()], check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], check=False, stderr=subprocess.DEVNULL)


def burst_kb(mbit: int) -> int:
    """Return KB that a wire lets pass at once: of a fast one a millisecond's, of a slow one a few packets."""
    return max(16, min(256, mbit // 8))


def ip(words: str) -> None:
    """Run iproute2's command."""
    subprocess.run(["ip", *words.split()], check=True)


def on_two_hosts(*words: str) -> None:
    """Run Python with these words as a rank on each host; both have one thread.

    Raises:
        SystemExit: if a rank fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}
    environment |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    started = []
    for rank, host in enumerate(HOSTS):
        places = {"RANK": str(rank), "LOCAL_RANK": "0"}
        command = ["ip", "netns", "exec", host, sys.executable, *words]
        started.append(subprocess.Popen(command, env=environment | places, cwd=ROOT))
    exit_codes = [process.wait() for process in started]
    if any(exit_codes):
        raise SystemExit("a rank failed")


def rounds_between_hosts(job: Job, rounds: int, steps: int) -> list[dict[str, float]]:
    """Start a rank on each host; return each round's seconds per step by contestant."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        on_two_hosts(
            __file__, f"--job={write_job(job)}", f"--rounds={rounds}", f"--steps={steps}", f"--result={result}"
        )
        return json.loads(result.read_text())


def measure(job: Job, rounds: int, steps: int, result: Path) -> None:
    """Measure on this rank; rank 0 writes each round's seconds per step."""
    world = start_world()
    variants = {BASELINE: ddp_step(make_network(job), job)}
    variants[TUNED] = ddp_step(make_network(job), job, fused=True, channels_last=True, **TUNED_OPTIONS)
    with without_shared_memory():
        variants[OURS] = our_step(make_network(job), world, job.batch_size)
        buckets.FEWEST_ELEMENTS = 1 << 40
        variants[AFTERWARDS] = our_step(make_network(job), world, job.batch_size)
    measures = {name: timed(step) for name, step in variants.items()}
    seconds = take_turns(measures, make_batches(job, steps), rounds)
    if world.is_main:
        result.write_text(json.dumps(seconds))
    stop_world()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="100,1000,10000", help="speeds of the wire in Mbit/s, comma-separated")
    parser.add_argument("--job", type=read_job, default=Job(), help="fields of `Job` as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="steps per contestant and round")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.result:
        measure(given.job, given.rounds, given.steps, given.result)
        return
    rows: dict[str, list[str]] = {}
    speeds = [int(word) for word in given.mbit.split(",")]
    for mbit in speeds:
        with two_hosts(mbit):
            rounds = rounds_between_hosts(given.job, given.rounds, given.steps)
        ratios = ratios_to(BASELINE, rounds)
        for name in rounds[0]:
            milliseconds = 1e3 * statistics.median(taken[name] for taken in rounds)
            rows.setdefault(name, [name]).extend((spread(ratios[name]), f"{milliseconds:.0f}"))
    columns = [word for mbit in speeds for word in (f"time / {BASELINE}, {mbit} Mbit/s", "ms (median)")]
    text = (
        f"{given.job.model_type}, {given.job.batch_size} images of {given.job.image_size} pixels per rank, one "
        f"thread each, fp32, AdamW, no clipping; {given.rounds} rounds of {given.steps} steps; median (quartiles) of "
        "the ratio."
    )
    section = Section("One step", text, ("contestant", *columns), [tuple(row) for row in rows.values()])
    show(section)
    command = f"python benchmarks/exchange.py --mbit {given.mbit}"
    save("exchange", "Exchange of gradients between two machines", versions("torch", "timm"), command, [section])


if __name__ == "__main__":
    main()
