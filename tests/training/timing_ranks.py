"""What a rank of tests/training/test_slow_rank.py runs: our loop, one rank asleep."""

from __future__ import annotations

import socket
import time
from unittest import mock

import torch

from tests.kit import Recorder
from tests.training.engine_ranks import (
    configuration,
    loop_run,
    make_engine,
    make_model,
    make_small_data,
)
from zerovision.training.base.points import Loggers
from zerovision.training.base.timing import SpanClock, measured_communication
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.loop import train_one_epoch
from zerovision.training.steps.carrier import Start
from zerovision.training.world.world import World

STEPS, BATCH_SIZE, SLEEP_SECONDS = 18, 1, 0.06


def sleeping_forward(forward):
    def forward_after_sleep(images):
        time.sleep(SLEEP_SECONDS)
        return forward(images)

    return forward_after_sleep


def sleeping_in_batches(batches):
    for batch in batches:
        time.sleep(SLEEP_SECONDS)
        yield batch


def epoch_with_a_slow_rank(world: World, slow_rank: int, sleeps_in: str, reduces: str):
    """Train an epoch in which one rank sleeps in its data or forward; return what was said and measured."""
    engine, strategy = reduces.split()
    engine = make_engine(world, make_model(True), configuration(engine=engine, strategy=strategy))
    sleeps = world.rank == slow_rank
    for _ in range(3):  # the first steps take long, on any rank
        engine.backward(engine.forward(torch.ones(BATCH_SIZE, 3, 8, 8)).sum())
        engine.step()
    if sleeps and sleeps_in == "forward":
        engine.forward = sleeping_forward(engine.forward)
    plan = BatchPlan(37, BATCH_SIZE, 1, world.size, 0)
    host, heard, clock = f"{socket.gethostname()}-{world.rank}", Recorder(), SpanClock()
    loggers = Loggers([heard] if world.is_main else [])
    parts = {"loggers": loggers, "start": Start(), "clock": clock}
    with mock.patch("socket.gethostname", return_value=host):
        run = loop_run(world, engine, plan, settings={"log_every_steps": 6}, **parts)
    batches = Loader(make_small_data().train, plan, world.rank).epoch(0)
    if sleeps and sleeps_in == "data":
        batches = sleeping_in_batches(batches)
    busy = mock.patch("psutil.cpu_percent", return_value=25.0 * (world.rank + 1))
    with measured_communication(clock), busy:
        train_one_epoch(run, batches)
        run.start.stop.close()
    engine.close()
    return {
        "messages": heard.messages,
        "events": heard.events,
        "points": len(heard.points),
        "cpus": [dict(point.cpu_utilization) for point in heard.points],
    }
