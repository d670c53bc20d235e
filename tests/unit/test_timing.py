"""The clock of spans, shares, slow ranks, the count of operations and the peaks."""

from __future__ import annotations

import copy
import gzip
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType

from tests.kit import ALONE, Recorder
from tests.training.engine_ranks import loop_run
from zerovision.training.base.points import Loggers
from zerovision.training.base.timing import SPANS, SpanClock, StreamMarks, measured_communication, shares
from zerovision.training.config import TrainConfig
from zerovision.training.data.reader import Batch
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.build import build_engine
from zerovision.training.engines.deepspeed.engine import TimedBackend
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.flops import TrainingFlops, peak_tflops
from zerovision.training.engines.ways import plan_of
from zerovision.training.loop import train_one_epoch
from zerovision.training.observe.device_use import DeviceGauge
from zerovision.training.observe.observer import StepDone
from zerovision.training.observe.profiler import StepProfiler, costliest_operators
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.steps import step_metrics
from zerovision.training.steps.step_metrics import SlowRankDetector, fewest_steps, work_seconds
from zerovision.training.world.collectives import (
    barrier,
    broadcast_object,
    copy_from_main,
    gather_objects,
    sum_over_ranks,
)
from zerovision.training.world.signals import StopRequest
from zerovision.training.world.world import World


class Steps:
    """Marks on a clock that the test moves by hand."""

    def __init__(self):
        self.now = self.last = 0.0
        self.total = dict.fromkeys(SPANS, 0.0)

    def end(self, span):
        self.total[span] += self.now - self.last
        self.last = self.now

    def seconds(self):
        return dict(self.total)


def test_a_moment_belongs_to_the_innermost_span():
    marks = Steps()
    clock = SpanClock(marks)
    marks.now = 1.0
    with clock.backward:
        marks.now = 3.0
        with clock.communication:
            marks.now = 7.0
        marks.now = 7.5
    marks.now = 8.0
    with clock.evaluation:
        marks.now = 10.0
        with clock.communication:
            marks.now = 14.0
    seconds = clock.seconds()
    assert (seconds["backward"], seconds["communication"], seconds["other"]) == (2.5, 4.0, 1.5)
    assert seconds["evaluation"] == 6.0, "what it waits for is its own"
    assert sum(seconds.values()) == 14.0
    told = shares(seconds)
    assert sum(told.values()) == pytest.approx(1.0)
    assert told["backward"] == pytest.approx(2.5 / 8)
    assert "evaluation" not in told


def test_an_exception_closes_its_spans():
    marks = Steps()
    clock = SpanClock(marks)
    with pytest.raises(ValueError), clock.forward, clock.communication:  # noqa: PT011
        raise ValueError
    marks.now = 2.0
    assert clock.seconds()["other"] == 2.0


class Stream:
    """Passes the events put into it when it is told to; its time is the number of the work before."""

    def __init__(self):
        self.queue, self.done_ms = 0.0, 0.0


class Event:
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self, stream):
        self.stream, self.at_ms = stream, stream.queue

    def query(self):
        return self.at_ms <= self.stream.done_ms

    def synchronize(self):
        self.stream.done_ms = max(self.stream.done_ms, self.at_ms)

    def elapsed_time(self, later):
        assert self.query(), "reading it would wait"
        assert later.query(), "reading it would wait"
        return later.at_ms - self.at_ms


def test_a_stream_is_read_when_asked_and_its_events_are_used_again():
    stream, Event.made = Stream(), 0
    clock = SpanClock(StreamMarks(stream, Event))
    for _ in range(20):
        for _ in range(300):
            with clock.forward:
                stream.queue += 3.0
            stream.queue += 1.0
            stream.done_ms = max(stream.done_ms, stream.queue - 4000)  # the host runs ahead
        before = stream.done_ms
        seconds = clock.seconds()
        assert stream.done_ms > before
    assert seconds["forward"] == pytest.approx(20 * 300 * 3 / 1000)
    assert seconds["other"] == pytest.approx(20 * 300 * 1 / 1000)
    assert Event.made < 1000


def deepspeed_backend():
    return TimedBackend(mock.Mock(wraps=dist, spec=TimedBackend.COLLECTIVES))


# Each with the number of collectives that it starts or waits for.
CALLS = {
    "barrier": (lambda world: barrier(world), 1),
    "sum": (lambda world: sum_over_ranks(torch.ones(2), world), 1),
    "copy": (lambda world: copy_from_main([torch.ones(2)], world), 1),
    "gather values": (lambda world: gather_objects("a", world), 2),
    "broadcast a value": (lambda world: broadcast_object("a", world), 2),
    "stop": (lambda world: StopRequest().poll_now(world), 3),
    "DeepSpeed's": (lambda world: deepspeed_backend().all_reduce(torch.ones(2)), 1),
    "DeepSpeed's handle": (lambda world: deepspeed_backend().all_reduce(torch.ones(2), async_op=True).wait(), 2),
}


@pytest.mark.parametrize("call", CALLS)
def test_collectives_count_as_communication_of_a_run_on_its_thread(call, group, monkeypatch):
    function, number = CALLS[call]
    world = World(0, 0, 2, 2, torch.device("cpu"), group, group)  # "2 ranks": one alone skips its collectives
    clock, entered = SpanClock(), []
    monkeypatch.setattr(clock, "enter", lambda name: entered.append(name))
    monkeypatch.setattr(clock, "leave", lambda: None)
    function(world)
    with measured_communication(clock):
        thread = threading.Thread(target=function, args=[world])
        thread.start()
        thread.join()
        assert entered == [], "neither before the run nor on another thread"
        function(world)
    assert entered == ["communication"] * number
    function(world)
    assert len(entered) == number


def epoch_by_hand(waits, forward_seconds, log_every_steps):
    """Train one image a step; the host takes its time over each, the device's time moves by hand; return the result.

    The device waits for each image as long as `waits` says.
    """
    marks, logger = Steps(), Recorder()
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    module.register_forward_pre_hook(lambda *_: setattr(marks, "now", marks.now + forward_seconds))
    rule = build_optimizer(module, TrainConfig(learning_rate=0.1), [], discriminative=False)
    engine = build_engine(EngineSetup(module, rule, plan_of("ddp", 1), "fp32", ALONE, batch_size=1))

    def batches():
        for wait in waits:
            time.sleep(0.001)
            marks.now += wait
            images, indices = torch.zeros(1, 3, 2, 2), torch.zeros(1, dtype=torch.int64)
            yield Batch(images, indices, torch.ones(1), indices)

    parts = {"loggers": Loggers([logger]), "clock": SpanClock(marks), "settings": {"log_every_steps": log_every_steps}}
    run = loop_run(ALONE, engine, BatchPlan(len(waits), 1, 1, 1, 0), 2, classes=2, **parts)
    return train_one_epoch(run, batches()), logger.points


def test_the_wait_for_data_is_the_devices():
    result, points = epoch_by_hand([0.0, 0.0, 2.0, 4.0], forward_seconds=3.0, log_every_steps=2)
    assert [point.data_wait_share for point in points] == [0.0, 0.5]
    assert [point.time_shares["data"] for point in points] == [0.0, 0.5]
    assert result.data_wait_share == pytest.approx(6 / 18)


# Logging points.


@pytest.mark.parametrize(
    ("seconds", "every", "steps"),
    [
        (0.2, "auto", [10, 20, 30, 40, 50, 60, 65]),
        (0.051, "auto", [10, 30, 50, 65]),
        (0.045, "auto", [10, 40, 65]),  # 23 steps take a second
        (0.001, "auto", [10, 65]),
        (0.001, 20, [20, 40, 60, 65]),
    ],
)
def test_points_are_ten_steps_and_a_second_apart_or_as_given(seconds, every, steps):
    _, points = epoch_by_hand([0.0] * 65, seconds, every)
    assert [point.step for point in points] == steps


def test_the_slowest_rank_sets_the_pace_and_saving_does_not():
    ranks = [spans(forward=0.5, saving=9.0), spans(forward=0.5, communication=1.5, evaluation=9.0)]
    assert fewest_steps(ranks, 10) == 5


@pytest.mark.parametrize(("answer", "utilization"), [(37, 0.37), (RuntimeError("NVML: Not Supported"), None)])
def test_the_utilization_is_nvmls_or_none_and_asked_for_every_5_seconds(monkeypatch, answer, utilization):
    ask, clock = mock.Mock(side_effect=[answer, 50]), mock.Mock(return_value=100.0)
    monkeypatch.setattr(torch.cuda, "utilization", ask)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    monkeypatch.setattr(time, "monotonic", clock)
    world = World(0, 0, 1, 1, torch.device("cuda", 0))
    gauge = DeviceGauge(world, SimpleNamespace(path=Path()), None)
    assert gauge.read(100.0)[3:6] == (None, None, utilization)
    clock.return_value = 104.9
    assert gauge.read(100.0)[3:6] == (None, None, utilization)
    ask.assert_called_once_with(world.device)
    clock.return_value = 105.0
    assert gauge.read(100.0)[3:6] == (None, None, 0.5)
    assert gauge.read(100.0).disk_free_bytes > 0
    gone = DeviceGauge(world, SimpleNamespace(path=Path("/nothing/there")), None)
    assert gone.read(100.0).disk_free_bytes is None


# A slow rank.


def test_a_rank_is_slow_at_two_consecutive_points_and_named_once():
    detector = SlowRankDetector()
    normal, slow = [0.30, 0.29, 0.31, 0.30], [0.30, 0.29, 0.31, 0.41]
    assert detector.update(slow, 10) == []
    assert detector.update(normal, 10) == []
    assert detector.update(slow, 10) == []
    ((rank, own, others),) = detector.update(slow, 10)
    assert (rank, own, others) == (3, pytest.approx(0.041), pytest.approx(0.030))
    assert [detector.update(slow, 10) for _ in range(5)] == [[]] * 5


def test_a_slow_rank_is_named_again_after_a_while(monkeypatch):
    monkeypatch.setattr(step_metrics, "SECONDS_BETWEEN_REPORTS", 0.0)
    detector = SlowRankDetector()
    assert [len(detector.update([0.1, 0.2], 10)) for _ in range(4)] == [0, 1, 1, 1]


def test_of_two_ranks_the_slower_is_named_and_single_steps_are_put_together():
    detector = SlowRankDetector()
    found = [named for _ in range(10) for named in detector.update([0.03, 0.05], 1)]
    assert [(slow.rank, round(slow.step_seconds, 3)) for slow in found] == [(1, 0.05)]
    assert SlowRankDetector().update([1.0], 100) == []


def spans(**seconds):
    return dict.fromkeys(SPANS, 0.0) | seconds


def test_waiting_and_logging_are_no_work():
    every = dict.fromkeys(SPANS, 1.0)
    assert work_seconds([every]) == [len(SPANS) - 4]
    for name in ("communication", "logging", "saving", "evaluation"):
        assert work_seconds([every | {name: 9.0}, every]) == [len(SPANS) - 4] * 2


@pytest.mark.parametrize("span", ["data", "forward", "other", "backward", "optimizer"])
def test_work_counts_wherever_it_is_done_if_the_others_wait_for_it(span):
    usual = spans(data=1.0, forward=10.0, backward=20.0, optimizer=3.0, other=1.0)
    slow = usual | {span: usual[span] + 7.0}
    others = usual | {"communication": 7.0}
    assert work_seconds([others, slow, others]) == pytest.approx([35.0, 42.0, 35.0])


def test_a_wait_that_no_clock_sees_is_no_work():
    """Whatever the slow rank 1 is late with, the others wait for it inside backward, where nothing is measured."""
    usual = spans(forward=10.0, backward=20.0)
    waiting = usual | {"backward": 32.0}
    assert work_seconds([waiting, usual | {"forward": 22.0}, waiting]) == pytest.approx([30.0, 42.0, 30.0])
    assert work_seconds([waiting, usual | {"logging": 12.0}, waiting]) == pytest.approx([30.0, 30.0, 30.0])


# Operations.


def test_operations_of_layers_by_their_closed_forms():
    """2 operations for each multiplication; backward twice as many, but no gradient of the image."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # 16x16 places
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),  # depthwise
        nn.Conv2d(8, 4, 1, groups=2, bias=False),
        nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False),  # 16x16 -> 32x32
        nn.Flatten(),
        nn.Linear(6 * 32 * 32, 10, bias=False),
    )
    places = 16 * 16
    forward = [3 * 8 * 9 * places, 8 * 9 * places, 8 * 2 * places, 4 * 3 * 4 * places, 6 * 32 * 32 * 10]
    expected = 2 * (3 * sum(forward) - forward[0])
    assert TrainingFlops(model, 16).per_image == expected


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 32, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, images):
        return self.lstm(images.flatten(1, 2))[0]


def test_operations_of_an_lstm():
    """Four gates from input and state, each direction, layer and step; the first layer's input has no gradient."""
    size, steps = 32, 3 * 5
    first, state, second = 4 * size * 5, 4 * size * size, 4 * size * 2 * size
    forward = 2 * steps * 2 * (first + state + second + state)
    counted = TrainingFlops(Recurrent(), 5).per_image
    without_needless = 3 * forward - 2 * steps * 2 * first
    # The state before the first step needs no gradient either.
    assert counted == without_needless - 2 * 2 * 2 * state


def test_counting_changes_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3))
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert TrainingFlops(model, 8).per_image > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class OnlyWithData(nn.Module):
    def forward(self, images):
        return images * float(images.sum())


def test_a_model_that_needs_data_has_no_count():
    assert TrainingFlops(OnlyWithData(), 8).per_image is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks(name, peak):
    assert peak_tflops(name) == peak


# The profiler.


def profiled(folder, asked, left, done):
    clock, messages = SpanClock(), Recorder()
    profiler = StepProfiler(asked, left, folder, clock, Loggers([messages]))
    layer = nn.Linear(8, 8)
    for position in range(done):
        profiler.before_step(position)
        with clock.forward:
            loss = layer(torch.ones(2, 8)).sum()
        with clock.backward:
            loss.backward()
        with clock.optimizer:
            layer.zero_grad()
        profiler.after_step(StepDone(position, None))
    profiler.after_steps()
    with clock.forward:
        pass
    return messages.messages


@pytest.mark.parametrize(
    ("asked", "left", "done", "traced"),
    [(2, 20, 20, 2), (9, 3, 3, 3), (4, 6, 6, 4), (5, 30, 8, 3)],
    ids=["as asked", "more than the epoch has", "short warm-up", "broken off"],
)
def test_a_trace_holds_its_steps_and_our_spans(tmp_path, asked, left, done, traced):
    (line,) = profiled(tmp_path / "profile", asked, left, done)
    assert line.startswith(f"profile of {traced} steps: {tmp_path}/profile/trace.json.gz")
    with gzip.open(tmp_path / "profile" / "trace.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    for span in ("forward", "backward", "optimizer"):
        assert names.count(span) in (traced, traced + (done < left)), span
    first = max(0, min(5, left - asked))
    assert {name for name in names if "#" in name} >= {f"ProfilerStep#{first + step}" for step in range(traced)}
    summary = (tmp_path / "profile" / "summary.txt").read_text().splitlines()
    assert len(summary) == 3 + 10
    assert any("aten::addmm" in line for line in summary)
    assert not any(line.endswith(("forward", f"ProfilerStep#{first}")) for line in summary)


def test_time_on_a_gpu_counts_once():
    """The profiler gives a kernel's time to the kernel's row and to the row of the operator that launched it."""

    def row(key, device, gpu_us, count, cpu_us=500, is_user_annotation=False):
        return SimpleNamespace(
            key=key,
            device_type=device,
            self_device_time_total=gpu_us,
            self_cpu_time_total=cpu_us,
            count=count,
            is_user_annotation=is_user_annotation,
        )

    rows = [
        row("aten::mm", DeviceType.CPU, 3000, 8),
        row("aten::add", DeviceType.CPU, 1000, 4),
        row("sm90_gemm", DeviceType.CUDA, 3000, 8),
        row("vectorized_add", DeviceType.CUDA, 1000, 4),
        row("cudaLaunchKernel", DeviceType.CPU, 0, 12, cpu_us=9000),
        row("forward", DeviceType.CUDA, 5000, 4, is_user_annotation=True),
    ]
    lines = costliest_operators(mock.Mock(key_averages=lambda: rows), steps=2).splitlines()
    assert lines[0].endswith("GPU time of the operator itself")
    assert [line.split() for line in lines[3:]] == [
        ["75.0%", "1.500", "4.0", "aten::mm"],
        ["25.0%", "0.500", "2.0", "aten::add"],
        ["0.0%", "0.000", "6.0", "cudaLaunchKernel"],
    ]


def test_nothing_is_written_before_the_first_traced_step_or_unasked(tmp_path):
    assert profiled(tmp_path, 3, 20, 2) == []
    assert profiled(tmp_path, 0, 20, 20) == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_profile_is_told(tmp_path):
    (tmp_path / "profile").write_text("a file is in the way")
    (line,) = profiled(tmp_path / "profile", 1, 3, 3)
    assert line.startswith("note: the profile cannot be written")
