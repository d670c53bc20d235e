"""Stragglers, failures and scaling against published tables, simulations and limits that are known."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from planning.failures import (
    FAILURES_PER_GPU_DAY,
    daly_interval_s,
    expected_maximum,
    lost_share,
    mean_time_between_failures_s,
    young_interval_s,
)
from planning.machines import find_machine
from planning.scaling import ScaleJob, read_counts, scale, verdict
from training.errors import UserError

RESNET50 = ScaleJob("torch", "ddp", 25_557_032, find_machine("h100", 8), 128, 0.02, 0.04, 0.0005, 1_281_167)


@pytest.mark.parametrize(
    ("ranks", "mean"), [(1, 0), (2, 0.56419), (3, 0.84628), (10, 1.53875), (100, 2.50759), (1000, 3.24144)]
)
def test_the_slowest_of_many_as_in_tippetts_table(ranks, mean):
    assert expected_maximum(ranks) == pytest.approx(mean, abs=1e-5)


def test_failures_of_the_llama_3_training():
    """The Llama 3 report, arXiv:2407.21783: 419 in 54 days on 16,384 GPUs, one in about 3 hours."""
    assert mean_time_between_failures_s(16384) == pytest.approx(54 * 86400 / 419)
    assert pytest.approx(4.7e-4, rel=0.02) == FAILURES_PER_GPU_DAY


def simulated_share(interval_s, save_s, restart_s, between_s, segments=20_000):
    """Play a long run at random: a failure throws away the segment, and may come during the restart too."""
    draw = random.Random(1)
    total = 0.0
    for _ in range(segments):
        while (fails := draw.expovariate(1 / between_s)) < interval_s + save_s:
            total += fails
            while (fails := draw.expovariate(1 / between_s)) < restart_s:
                total += fails
            total += restart_s
        total += interval_s + save_s
    return 1 - segments * interval_s / total


@pytest.mark.parametrize("numbers", [(600, 10, 120, 20_000), (100, 30, 60, 1000)])
def test_what_failures_cost_as_in_a_simulation(numbers):
    assert lost_share(*numbers) == pytest.approx(simulated_share(*numbers), rel=0.05)


@pytest.mark.parametrize(("save_s", "between_s"), [(0.01, 1e5), (10, 1e5), (60, 3600), (300, 3600)])
def test_dalys_interval_loses_least(save_s, between_s):
    best = daly_interval_s(save_s, between_s)
    least = lost_share(best, save_s, 60, between_s)
    assert all(lost_share(best * factor, save_s, 60, between_s) > least for factor in (0.8, 0.9, 1.1, 1.25))
    assert young_interval_s(0.01, 1e5) == pytest.approx(daly_interval_s(0.01, 1e5), rel=0.01)


def test_no_failures_lose_nothing():
    point = scale(dataclasses.replace(RESNET50, failures_per_gpu_day=0.0), [64])[0]
    assert (point.failures_per_day, point.lost_share) == (0, 0)


def test_one_rank_is_the_measure_and_more_are_less_efficient():
    points = scale(RESNET50, [1, 2, 8, 64, 1024, 4096])
    assert points[0].efficiency == 1
    assert points[0].images_per_s == pytest.approx(128 / 0.0605)
    assert points[0].epoch_s == pytest.approx(1_281_167 / 128 * 0.0605, rel=1e-3)
    for before, after in itertools.pairwise(points):
        assert after.efficiency < before.efficiency
        assert after.images_per_s > before.images_per_s
        assert after.lost_share > before.lost_share


def test_without_spread_and_exchange_the_scaling_is_perfect():
    """The update of replicated weights is a part of every rank's step, so the efficiency is 1."""
    job = dataclasses.replace(RESNET50, spread=0.0, parameters=0)
    assert [point.efficiency for point in scale(job, [1, 8])] == pytest.approx([1, 1], abs=1e-3)


def test_accumulation_hides_a_slow_network():
    slow = dataclasses.replace(RESNET50, machine=find_machine("a100-40gb", 1, "pcie4+ethernet1"))
    one, eight = (scale(dataclasses.replace(slow, accumulation_steps=steps), [16])[0] for steps in (1, 8))
    assert one.efficiency < 0.1
    assert eight.efficiency > 5 * one.efficiency


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"machine": find_machine("a100-40gb", 1, "pcie4+ethernet1")}, "more than 1 GPUs do not pay"),
        ({}, "more than 256 GPUs pay in images/s only: from 256 to 512 GPUs a step grows to 65536 images"),
        ({"batch_size": 1}, "4096 GPUs still pay"),
    ],
)
def test_it_says_up_to_where_more_pay(changes, answer):
    assert verdict(scale(dataclasses.replace(RESNET50, **changes), read_counts("1..4096"))).startswith(answer)


def test_the_numbers_of_ranks():
    assert read_counts("8..4096") == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert read_counts("8..100") == [8, 16, 32, 64, 100]
    assert read_counts("24") == [24]
    for wrong in ("", "8..", "0..8", "16..8", "8..99999999", "8...16", "a\nb"):
        with pytest.raises(UserError, match=r"such as 8\.\.4096"):
            read_counts(wrong)
