"""Islands over slow links: accuracy by local steps, and the seconds that exchanges take on links of the cluster lab.

    python benchmarks/islands.py accuracy --seeds 3
    python benchmarks/islands.py accuracy --data npz:cifar10.npz --epochs 8
    python benchmarks/islands.py links                # root: on the hosts of tests/cluster
    python benchmarks/islands.py overlap --data npz:/shared/fashion-mnist.npz   # the same; a file that all hosts see

`accuracy` trains basic_cnn on the digits, or airbench_small on other data, on two ranks of this machine. `links` trains
it on two hosts and changes the link between them while it runs; every cell is the median of some exchanges, beside
what bytes and round trips predict. `overlap` shows what `--outer-delay` saves of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launch import torchrun
from benchmarks.report import machine_name, today, versions
from tests.cluster.hosts import SHARED, Hosts
from tests.cluster.trainings import RUN, Training, read_metrics
from zerovision.training.config import TrainConfig
from zerovision.training.prepare import FIRST_START
from zerovision.training.run import set_up, train
from zerovision.training.world.world import start_world, stop_world

RECIPE = {"model_type": "basic_cnn", "batch_size": 16, "image_size": 16, "learning_rate": 1e-3, "augmentation": "none"}
# Local steps, precision and delay.
VARIANTS = [
    (1, "fp32", 0),
    (10, "fp32", 0),
    (10, "fp32", 5),
    (50, "fp32", 0),
    (50, "fp32", 10),
    (200, "fp32", 0),
    (50, "bf16", 0),
    (50, "int8", 0),
]
LARGER = {"model_type": "airbench_small", "batch_size": 64, "learning_rate": 4e-3, "augmentation": "shift_flip"}
EARLY = 2
LINKS = [(rate, delay) for rate in (1000, 100, 10) for delay in (1, 50, 200)]  # Mbit/s; ms each way
FITTED = ((1000, 1), (1000, 50))  # links that tell how many round trips there are
WARM_UP, EXCHANGES = 4, 5  # on each link: until TCP's window fits it, and those that are measured
TABLE_STEPS = 200
ROUND, DELAY, OVERLAPPED = 50, 45, ((1000, 50), (10, 1), (10, 200))
Link = tuple[int, int] | None


class Measured(NamedTuple):
    """Bytes that a host sends per exchange, and seconds by link; None for one without limits.

    Attributes:
        sent_bytes: per exchange.
        seconds: that training stood still for an exchange.
        rounds: from one exchange to the next.
    """

    sent_bytes: float
    seconds: dict[Link, float]
    rounds: dict[Link, float]

    def predicted(self, rate: int, delay: int) -> float:
        """Return the seconds that an exchange takes by its bytes and round trips."""
        (low, high), (_, base), (_, longer) = (self.seconds[link] for link in FITTED), *FITTED
        round_trips = (high - low) / (longer - base)  # per ms each way
        return self.seconds[None] + round_trips * delay + 8 * self.sent_bytes / (rate * 1e6)


def accuracy(recipe: dict[str, Any], seeds: int, variants: list[tuple[int, str, int]]) -> str:
    """Train every variant with so many seeds; return the table."""
    cases = [[recipe, *variant, seed] for variant in variants for seed in range(seeds)]
    output = torchrun(2, "benchmarks.islands", "train", json.dumps(cases))
    runs = [json.loads(line.removeprefix("RUN ")) for line in output.splitlines() if line.startswith("RUN ")]
    columns = "local steps | precision | delay | bytes sent per step | outer steps | early | last | best"
    rows = [f"| {columns} |", "|---" * 8 + "|"]
    for number, (steps, precision, delay) in enumerate(variants):
        own = runs[number * seeds : (number + 1) * seeds]
        scores = [f"{100 * statistics.mean(run[name] for run in own):.1f}" for name in ("early", "last", "best")]
        sent, rounds = (statistics.mean(run[name] for run in own) for name in ("sent_bytes", "rounds"))
        cells = [str(steps), precision, str(delay), f"{sent:,.0f}", f"{rounds:.0f}", *scores]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def train_cases(cases: list[tuple[dict[str, Any], int, str, int, int]]) -> None:
    """Train as one of two ranks; rank 0 prints what came out of each case."""
    world = start_world()
    for recipe, steps, precision, delay, seed in cases:
        with tempfile.TemporaryDirectory() as folder:
            own = {"local_steps": steps, "islands": 2 if steps > 1 else 0, "seed": seed}
            own |= {"outer_precision": precision, "outer_delay": delay}
            logs = {"log_dir": folder, "run_name": RUN, "tensorboard": False, "report": False, "progress": "off"}
            context = set_up(TrainConfig(**recipe, **own, **logs), world)
            weights = sum(parameter.numel() for parameter in context.built.module.parameters())
            total = context.config.epochs * context.plan.steps_per_epoch
            assert train(context) == 0
            FIRST_START.stop.close()
            context.close()
            if world.is_main:
                lines = [json.loads(line) for line in (context.folder.path / "metrics.jsonl").read_text().splitlines()]
                scores = [line["val_top1"] for line in lines if line["kind"] == "epoch"]
                sent = [line["sent_bytes"] for line in lines if line["kind"] == "outer_step"]
                # Of ddp on two machines with a rank each: half of the gradients there, half of the weights back.
                found = {"sent_bytes": sum(sent) / total if sent else 4 * weights, "rounds": len(sent)}
                found |= {"early": scores[EARLY - 1], "last": scores[-1], "best": max(scores)}
                print("RUN", json.dumps(found), flush=True)
    stop_world()


def links() -> str:
    """Measure a step of ddp, and outer steps, over every link; return the table."""
    flags = [word for name, value in RECIPE.items() for word in (f"--{name.replace('_', '-')}", str(value))][4:]
    variants = {
        "ddp": [],
        "fp32": ["--local-steps", "10"],
        "int8": ["--local-steps", "10", "--outer-precision", "int8"],
    }
    with Hosts(2) as hosts:
        found = {name: measure(hosts, name, [*flags, *more], LINKS) for name, more in variants.items()}
    return link_table(found)


def overlap(data: str) -> str:
    """Measure rounds of steps with an outer step at their end, and with a delayed one; return the table."""
    flags = ["--data", data, "--learning-rate", "0.001", "--augmentation", "none", "--local-steps", str(ROUND)]
    variants = {"end": [], "delay": ["--outer-delay", str(DELAY)]}
    with Hosts(2) as hosts:
        found = {name: measure(hosts, name, [*flags, *more], OVERLAPPED) for name, more in variants.items()}
    columns = f"link | {ROUND} steps, outer step at their end | stood still | {DELAY} steps later | stood still | ratio"
    rows = [f"Seconds, with {found['end'].sent_bytes:,.0f} bytes sent.", "", f"| {columns} |", "|---" * 6 + "|"]
    for link in (None, *OVERLAPPED):
        cells = [f"{value[link]:.2f}" for one in found.values() for value in (one.rounds, one.seconds)]
        cells.append(f"{found['delay'].rounds[link] / found['end'].rounds[link]:.2f}")
        rows.append(f"| {f'{link[0]} Mbit/s, {link[1]} ms' if link else 'no limit'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def link_table(found: dict[str, Measured]) -> str:
    """Return the seconds per so many steps, for every link and several numbers of local steps."""
    columns = {
        "1 (ddp)": ("ddp", 1),
        "10": ("fp32", 10),
        "50": ("fp32", 50),
        "200": ("fp32", 200),
        "50, int8": ("int8", 50),
    }
    sizes = ", ".join(f"{name} {one.sent_bytes:,.0f} bytes" for name, one in found.items())
    rows = [f"Sent per exchange: {sizes}.", "", "| link | " + " | ".join(columns) + " |", "|---" * 6 + "|"]
    for rate, delay in LINKS:
        cells = []
        for name, steps in columns.values():
            one, times = found[name], TABLE_STEPS / steps
            spent = one.seconds[rate, delay] - (one.seconds[None] if name == "ddp" else 0)  # a step also computes
            predicted = one.predicted(rate, delay) - (one.seconds[None] if name == "ddp" else 0)
            cells.append(
                " / ".join(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (times * predicted, times * spent))
            )
        rows.append(f"| {rate} Mbit/s, {delay} ms | {' | '.join(cells)} |")
    return "\n".join(rows)


def measure(hosts: Hosts, name: str, flags: list[str], links: Sequence[tuple[int, int]]) -> Measured:
    """Train on two hosts, and change the link between them after some exchanges."""
    folder = SHARED / f"islands-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    logs = ["--log-dir", str(folder / "logs"), "--run-name", RUN, "--tensorboard", "false", "--report", "false"]
    words = [RECIPE["model_type"], "ddp", "2", "1", str(RECIPE["batch_size"]), "10000", *flags, *logs]
    words += [
        "--log-every-steps",
        "1" if name == "ddp" else "auto",
        "--save-every-minutes",
        "0",
        "--hang-timeout",
        "600",
        "--keep-last",
        "1",
    ]
    training = Training(hosts, folder, words, 2, 1)
    training.wait_for_step(50, timeout_s=300)
    seconds: dict[Link, float] = {}
    rounds: dict[Link, float] = {}
    sent_bytes = 0.0
    for link in (None, *links):
        hosts.fault("node02", "clear")
        if link is not None:
            hosts.fault("node02", "rate", f"{link[0]}mbit")
            hosts.fault("node02", "delay", str(link[1]))
        first = len(exchanges(folder, name)) + WARM_UP
        while len(exchanges(folder, name)) < first:
            time.sleep(0.05)
        sent = sent_by(hosts)
        while len(exchanges(folder, name)) < first + EXCHANGES:
            time.sleep(0.05)
        done = exchanges(folder, name)
        seconds[link] = statistics.median(done[first:])
        times = [
            line["time"] for line in read_metrics(folder) if line["kind"] == ("step" if name == "ddp" else "outer_step")
        ]
        rounds[link] = statistics.median(after - before for before, after in pairwise(times[first - 1 : len(done)]))
        if link is None and name == "ddp":
            sent_bytes = (sent_by(hosts) - sent) / (len(done) - first)
        elif link is None:  # more than that has crossed the cable: evaluations lie between outer steps
            sent_bytes = next(line["sent_bytes"] for line in read_metrics(folder) if line["kind"] == "outer_step")
        print(name, link, [round(one, 3) for one in done[first:]], file=sys.stderr, flush=True)
    hosts.fault("node02", "clear")
    training.signal(signal.SIGTERM)
    training.end()
    return Measured(sent_bytes, seconds, rounds)


def exchanges(folder: Path, name: str) -> list[float]:
    """Return the seconds of every step of ddp so far, or of every outer step."""
    lines: list[dict[str, Any]] = read_metrics(folder)
    if name != "ddp":
        return [line["seconds"] for line in lines if line["kind"] == "outer_step"]
    times = [line["time"] for line in lines if line["kind"] == "step"]
    return [after - before for before, after in pairwise(times)]


def sent_by(hosts: Hosts) -> int:
    """Return the bytes that a host has sent on its cable since it was started."""
    lines = hosts.run("node02", ["cat", "/proc/net/dev"]).stdout.splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def main() -> None:
    """Measure and print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "links", "overlap", "train"))
    parser.add_argument("cases", nargs="?", default="[]", help="for the ranks that accuracy starts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", help="as of a training (default: the digits)")
    parser.add_argument("--only", default="", help="variants such as 200:fp32:0,50:int8:10")
    given = parser.parse_args()
    if given.what == "train":
        train_cases(json.loads(given.cases))
        return
    words = [one.split(":") for one in given.only.split(",") if one]
    chosen = [(int(steps), precision, int(delay)) for steps, precision, delay in words]
    recipe = (LARGER | {"data": given.data} if given.data else RECIPE) | {"epochs": given.epochs}
    if given.what == "accuracy":
        table = accuracy(recipe, given.seeds, chosen or VARIANTS)
    else:
        table = links() if given.what == "links" else overlap(given.data)
    print(f"{machine_name()}, {versions('torch')}, {today()}\n\n{table}")


if __name__ == "__main__":
    main()
