"""This project's engines: each under each strategy; `benchmarks/engines.py` compares them."""

from __future__ import annotations

from itertools import product

from benchmarks.peers.job import Job, Measure, timed
from benchmarks.peers.ours import our_step
from zerovision.training.base.errors import UserError
from zerovision.training.engines.build import ENGINES
from zerovision.training.engines.ways import STRATEGIES


def step_contestants(job: Job) -> dict[str, Measure]:
    """Return those that know the strategy, over batches in memory."""
    found = {}
    for strategy, engine in product(STRATEGIES, ENGINES):
        try:
            found[f"{strategy}, {engine}"] = timed(our_step(job, strategy, engine))
        except UserError as error:
            print(f"{strategy}, {engine} is left out: {error}", flush=True)
    return found
