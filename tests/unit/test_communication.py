"""The time of exchanges against simulations of their messages, and volumes against the ZeRO paper and PyTorch."""

from __future__ import annotations

import dataclasses
import json

import pytest

from planning.calibration import calibrate, with_measured_link
from planning.communication import (
    EXCHANGES,
    FLAT,
    GLOO_COPIES,
    GLOO_LATENCY_S,
    GLOO_SHARE,
    all_reduce_s,
    collective_s,
    communication_s,
    exposed,
    measured_link,
    ring_all_reduce_s,
    tree_all_reduce_s,
    volumes,
)
from planning.machines import Gpu, Interconnect, Machine, find_machine, shared_memory
from planning.plan_command import parse, run
from training.errors import UserError
from training.parallel.strategies import ParallelPlan

LINK = Interconnect("made-up", 1e-5, 1e9, "", achieved_share=1)
CPU = Gpu("cpu", 10**10, 1e10, {"fp32": 1e11}, "")
SIZE = 4_000_000
PARAMETERS = 25_000_000


def simulated_ring_s(size, ranks, link):
    """Send every part around the ring, message by message; a link has one at a time."""
    ready = [[0.0] * ranks for _ in range(ranks)]  # by rank and part
    for step in range(2 * (ranks - 1)):
        arrives = {}
        for rank in range(ranks):
            part = (rank - step) % ranks
            arrives[(rank + 1) % ranks, part] = ready[rank][part] + link.latency_s + size / ranks / 1e9
        for (rank, part), time in arrives.items():
            ready[rank][part] = max(ready[rank][part], time)
    return max(max(row) for row in ready)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_takes_as_long_as_its_messages(ranks):
    assert ring_all_reduce_s(SIZE, ranks, LINK) == pytest.approx(simulated_ring_s(SIZE, ranks, LINK))


def test_small_messages_of_many_ranks_go_over_trees():
    assert (
        all_reduce_s(1000, 1024, LINK)
        == tree_all_reduce_s(1000, 1024, LINK)
        < 0.1 * ring_all_reduce_s(1000, 1024, LINK)
    )
    assert all_reduce_s(1e9, 8, LINK) == ring_all_reduce_s(1e9, 8, LINK)


@pytest.mark.parametrize(
    ("gpu", "links", "ranks", "size", "bus_bytes_per_s"),
    [
        ("h100", "nvlink4+ib400", 8, 4e9, 370e9),  # nccl-tests, issue 212: what NCCL's author says of a ring
        ("a100-40gb", "nvlink3+ib100", 24, 128e6, 96e9),  # issue 119, the best size: a port of 200 Gbit/s for 2 GPUs
    ],
)
def test_bandwidth_that_nccl_tests_measured(gpu, links, ranks, size, bus_bytes_per_s):
    seconds = collective_s("all_reduce", size, ranks, find_machine(gpu, 8, links))
    assert 2 * (ranks - 1) / ranks * size / seconds == pytest.approx(bus_bytes_per_s, rel=0.08)


@pytest.mark.parametrize("collective", FLAT)
def test_two_levels_are_never_faster_than_their_slow_link_allows(collective):
    machine = find_machine("h100", 8, "nvlink4+ib400")
    for machines in (2, 16, 128):
        ranks = 8 * machines
        least = (machines - 1) / machines * SIZE / 8 / (machine.between.bandwidth_bytes_per_s)
        assert collective_s(collective, SIZE, ranks, machine) > least
        assert collective_s(collective, SIZE, ranks, machine) < FLAT[collective](SIZE, ranks, machine.between)
    one = dataclasses.replace(machine, ranks=1)
    assert collective_s(collective, SIZE, 4, one) == FLAT[collective](SIZE, 4, machine.between)
    assert collective_s(collective, SIZE, 1, machine) == 0


@pytest.mark.parametrize(
    ("exchange_s", "messages", "compute_s"), [(1, 1, 5), (1, 10, 5), (9, 4, 5), (3, 7, 0), (2, 5, 2), (0, 3, 1)]
)
def test_what_computation_hides_of_equal_messages(exchange_s, messages, compute_s):
    each = exchange_s / messages
    expected = max(each, compute_s / messages + exchange_s - compute_s)
    assert exposed([each] * messages, compute_s) == pytest.approx(expected if exchange_s else 0)


def test_a_small_first_message_does_not_wait_for_the_others():
    """It is on its way for 1 s after a fifth of 10 s; the other begins at the end."""
    assert exposed([1, 4], 10) == 4
    assert exposed([2, 3], 0) == 5


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_link_from_two_measurements(ranks):
    sizes = (1024, 64_000_000)
    measured = [(size, ring_all_reduce_s(size, ranks, LINK)) for size in sizes]
    link = measured_link("found", *measured, ranks)
    assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((LINK.latency_s, LINK.bandwidth_bytes_per_s))


@pytest.mark.parametrize(("ranks", "machines"), [(8, 1), (2, 2), (16, 2), (64, 8)])
def test_a_machine_with_the_link_that_was_measured(ranks, machines):
    """The ring over all ranks, whose hops between machines share the links of a machine's ranks."""
    machine, unknown = find_machine("h100", 8, "nvlink4+ib100"), find_machine("h100", 8, "pcie3+ethernet1")
    inside, between = machine.inside, machine.between
    unknown = dataclasses.replace(unknown, inside=inside if machines > 1 else unknown.inside)
    used, count = (inside, 1) if machines == 1 else (between, ranks // machines)
    hops_s = (machines - 1) * between.latency_s + (ranks - machines) * inside.latency_s
    rate = count * used.bandwidth_bytes_per_s * used.achieved_share
    measured = [(size, 2 * (hops_s + (ranks - 1) / ranks * size / rate)) for size in (1024, 10**9)]
    found = with_measured_link(unknown, ranks, machines, *measured)
    link = found.inside if machines == 1 else found.between
    assert (link.latency_s, link.bandwidth_bytes_per_s * link.achieved_share) == pytest.approx(
        (used.latency_s, used.bandwidth_bytes_per_s * used.achieved_share)
    )
    assert (found.between if machines == 1 else found.inside) == (unknown.between if machines == 1 else inside)


REPORT = {"ranks": 16, "machines": 2, "backend": "nccl", "small": [1024, 4e-4], "large": [10**8, 0.01]}


def test_the_planner_takes_the_doctors_all_reduce(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"rows": [], "all_reduce": REPORT}))
    words = ["--model-type=basic_cnn", "--num-gpus=32", "--gpu=h100", f"--calibrate={path}", "--json"]
    request = parse(words, None)
    between = request.job.machine.between
    assert between.bandwidth_bytes_per_s == pytest.approx(30 / 16 * 1e8 / (0.01 - 4e-4) / 8, rel=0.01)
    assert run(request) == 0
    inside, measured = json.loads(capsys.readouterr().out)["links"]
    assert inside.startswith("in a machine nvlink4")
    assert "between machines measured" in measured
    assert "an all-reduce of 16 ranks, measured" in measured


@pytest.mark.parametrize(
    ("content", "gpu", "answer"),
    [
        ("", "h100", "expected a file that"),
        ('{"rows": [], "all_reduce": null}', "h100", "expected a file that"),
        (json.dumps({"all_reduce": REPORT | {"ranks": 1, "machines": 1}}), "h100", "not usable"),
        (json.dumps({"all_reduce": REPORT | {"large": [10**8, 1e-4]}}), "h100", "not usable"),
        (json.dumps({"all_reduce": REPORT | {"backend": "gloo"}}), "h100", "h100-80gb ranks exchange over nccl"),
        (json.dumps({"all_reduce": REPORT | {"backend": "gloo", "machines": 1}}), "", "share memory"),
    ],
)
def test_a_report_that_does_not_fit_is_one_line(content, gpu, answer, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(content)
    machine = find_machine(gpu, 8) if gpu else dataclasses.replace(find_machine("h100", 8), gpu=CPU)
    with pytest.raises(UserError, match=answer) as raised:
        calibrate(machine, str(path))
    assert "\n" not in str(raised.value)


def test_the_native_engine_pads_buckets_for_many_ranks():
    """A bucket of 2^18 elements is whole blocks of 1,024 on each of 1,024 ranks: 2^20."""
    few, many = (sum(volumes("native", ParallelPlan(1, shards=ranks), PARAMETERS).values()) for ranks in (256, 1024))
    assert many == pytest.approx(4 * few, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "stage", "sends"),
    [("torch", 1, 2), ("torch", 2, 2), ("torch", 3, 3), ("native", 1, 2), ("deepspeed", 1, 3), ("deepspeed", 3, 3)],
)
def test_volumes_of_the_zero_paper(engine, stage, sends):
    """Section 7 of arXiv:1910.02054: 2 x the parameters at stages 1 and 2, 3 x at stage 3; DeepSpeed all-reduces."""
    ranks = 256
    sent = volumes(engine, ParallelPlan(stage, shards=ranks), PARAMETERS)
    assert sum(sent.values()) == pytest.approx(sends * 4 * PARAMETERS, rel=2 / ranks)


def test_volumes_of_accumulated_micro_steps():
    """DDP and the native engine exchange once; ZeRO-3 gathers twice and scatters once in each."""
    for engine, stage, times in (("torch", 1, 1), ("native", 1, 1), ("deepspeed", 3, 4)):
        plan = ParallelPlan(stage, shards=2)
        once, four = (sum(volumes(engine, plan, PARAMETERS, steps).values()) for steps in (1, 4))
        assert four == times * once
    three = volumes("native", ParallelPlan(1, shards=4), PARAMETERS, 3)
    assert three["all_to_all"] > volumes("native", ParallelPlan(1, shards=4), PARAMETERS, 4)["all_to_all"]


def test_shards_of_a_machine_send_little_between_machines():
    """Replicas of shards (HSDP) sum an 8th of the gradients between machines."""
    whole = volumes("torch", ParallelPlan(3, shards=64), PARAMETERS)
    parts = volumes("torch", ParallelPlan(3, shards=8, replicas=8), PARAMETERS)
    assert parts["all_reduce"] == 2 * 7 / 8 * 4 * PARAMETERS / 8
    assert sum(whole.values()) == pytest.approx(3 * 63 / 64 * 4 * PARAMETERS)


@pytest.mark.parametrize(("engine", "stage"), EXCHANGES)
def test_a_step_waits_for_no_more_than_all_and_one_rank_for_nothing(engine, stage):
    machine = find_machine("h100", 8)

    def time(ranks, backward_s=0.02):
        plan = ParallelPlan(stage, shards=ranks)
        return communication_s(engine, plan, PARAMETERS, machine, forward_s=0.01, backward_s=backward_s)

    assert time(1).total_s == time(1).exposed_s == 0
    for ranks in (2, 8, 64, 1024):
        assert 0 < time(ranks).exposed_s <= time(ranks).total_s * (1 + 1e-9)
        assert time(ranks).exposed_s <= time(ranks, backward_s=0.001).exposed_s * (1 + 1e-9)
    assert time(1024).total_s > time(16).total_s > time(8).total_s


def test_gloo_reaches_a_part_of_a_wire_and_nccl_all_of_it():
    """Two machines of one rank, no computation: the native engine sends half of the values, twice."""
    plan, size = ParallelPlan(1, shards=2), 4 * PARAMETERS

    def total_s(machine, engine):
        return communication_s(engine, plan, PARAMETERS, machine, forward_s=0.0, backward_s=0.0).exposed_s

    link = dataclasses.replace(LINK, latency_s=0.0)
    gpus = dataclasses.replace(find_machine("h100", 1), between=link)
    cpus = Machine(CPU, 1, shared_memory(1e10), link)
    assert total_s(gpus, "native") == pytest.approx(total_s(gpus, "torch")) == pytest.approx(size / 1e9)
    copied_s = size * GLOO_COPIES / 1e10  # by the core that would compute
    assert total_s(cpus, "torch") == pytest.approx(size / 1e9 + copied_s)
    parts = 1 / GLOO_SHARE["all_to_all"] + 1 / GLOO_SHARE["all_gather"]
    assert total_s(cpus, "native") == pytest.approx(size / 2 / 1e9 * parts + copied_s)


def test_cpu_ranks_of_one_machine_send_through_the_kernel_unless_they_share_memory():
    """Two ranks all-reduce 25 million values in 1 MB and messages of 25 MB, half of each both ways, beside nothing."""
    machine, plan, size = Machine(CPU, 2, shared_memory(1e10), LINK), ParallelPlan(1, shards=2), 4 * PARAMETERS
    times = {
        engine: communication_s(engine, plan, PARAMETERS, machine, forward_s=9.0, backward_s=9.0)
        for engine in ("native", "torch")
    }
    messages = 1 + 4  # 1 MiB, and 99 MB in buckets of 26.2
    expected = 2 * messages * GLOO_LATENCY_S + size * GLOO_COPIES / 1e10
    assert times["torch"].total_s == times["torch"].exposed_s == pytest.approx(expected)
    assert times["native"].exposed_s == pytest.approx(size / 2 / 1e10, rel=0.01)
