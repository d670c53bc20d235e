"""What a rank of tests/training/test_slow_rank.py runs: our loop over a plain engine, one rank asleep."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.engine_ranks import CLASSES, loop_context, make_small_data
from training.data.loader import TrainLoader
from training.data.sampler import BatchPlan
from training.loop import train_one_epoch
from training.observe.heartbeat import HeartbeatWriter
from training.observe.loggers import Loggers
from training.observe.scores import ScoreSums
from training.observe.step_metrics import Timing, name_hosts
from training.observe.timing import SpanClock, measured_communication, shares
from training.parallel.engine import StepResult
from training.parallel.world import World
from training.recipe.nonfinite_steps import NonFiniteGuard
from training.state import Progress, TrainState

STEPS, BATCH_SIZE, SLEEP_SECONDS = 18, 1, 0.03


class PlainEngine:
    """Plain PyTorch behind our verbs: the gradients are reduced inside backward, as DeepSpeed does."""

    loss_scale = None

    def __init__(self, world: World, sleeps: bool) -> None:
        self.module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, CLASSES))
        self.rule = torch.optim.SGD([{"params": list(self.module.parameters()), "rate_scale": 1.0}], lr=0.1)
        self.parameter_groups = self.rule.param_groups
        self.world, self.sleeps = world, sleeps

    def forward(self, images):
        if self.sleeps:
            time.sleep(SLEEP_SECONDS)
        return self.module(images)

    def backward(self, loss):
        loss.backward()
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, async_op=True).wait()

    def step(self):
        self.rule.step()
        self.rule.zero_grad()
        return StepResult(True, None)


class DdpEngine(PlainEngine):
    """The gradients are reduced by DDP: from C++, past the methods of Python's ProcessGroup."""

    def __init__(self, world: World, sleeps: bool) -> None:
        super().__init__(world, sleeps)
        self.parallel = DistributedDataParallel(self.module)

    def forward(self, images):
        if self.sleeps:
            time.sleep(SLEEP_SECONDS)
        return self.parallel(images)

    def backward(self, loss):
        loss.backward()


ENGINES = {"python": PlainEngine, "ddp": DdpEngine}


class SleepingReport(HeartbeatWriter):
    """Sleeps where rank 0 writes its logs."""

    def beat(self, *arguments, **named):
        time.sleep(SLEEP_SECONDS)


class Heard:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.messages, self.events, self.points = [], [], []

    def message(self, message):
        self.messages.append(message)

    def event(self, kind, values):
        self.events.append([kind, values])

    def steps(self, point):
        self.points.append(dict(point.time_shares))


def sleeping_in_batches(batches):
    for batch in batches:
        time.sleep(SLEEP_SECONDS)
        yield batch


def epoch_with_a_slow_rank(world: World, slow_rank: int, sleeps_in: str, reduces: str):
    """Train an epoch in which one rank sleeps in its data, forward or logging; return what was said and measured.

    If it is in its logging, both sleep in forward as well: some work, beside which this machine's noise is small.
    """
    sleeps = world.rank == slow_rank
    engine = ENGINES[reduces](world, (sleeps and sleeps_in == "forward") or sleeps_in == "logging")
    plan = BatchPlan(37, BATCH_SIZE, 1, world.size, 0)
    hosts, heard, clock = name_hosts(world), Heard(), SpanClock()
    loggers = Loggers([heard] if world.is_main else [])
    timing = Timing(clock, hosts=hosts)
    guard = NonFiniteGuard(engine, world, loggers, most_in_row=0, name_of=str)
    heartbeat = (SleepingReport if sleeps and sleeps_in == "logging" else HeartbeatWriter)(None, 0, 0.0)
    values = {"loggers": loggers, "guard": guard, "heartbeat": heartbeat, "timing": timing, "log_every_steps": 6}
    context = loop_context(world, engine, plan, **values)
    state = TrainState(engine, ScoreSums(CLASSES, world.device), Progress())
    batches = TrainLoader(make_small_data(), plan, world.rank).epoch(0)
    if sleeps and sleeps_in == "data":
        batches = sleeping_in_batches(batches)
    with measured_communication(clock):
        train_one_epoch(state, batches, context)
        context.stop.close()
    return {
        "messages": heard.messages,
        "events": heard.events,
        "points": heard.points,
        "shares": shares(clock.seconds()),
    }
