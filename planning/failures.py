"""What many ranks cost beside messages: the slowest one is waited for, and one of them fails now and then."""

from __future__ import annotations

import math
from statistics import NormalDist

# 419 unexpected interruptions of 16,384 GPUs in 54 days: Llama team 2024, arXiv:2407.21783, section 3.3.4. Of the same
# order: 6.5 and 2.3 failures per 1,000 days of 8 GPUs, Kokolis et al. 2024, arXiv:2410.21680, section III.
FAILURES_PER_GPU_DAY = 419 / 16384 / 54
# Equal GPUs differ by 8 % in their time for equal work (Sinha et al. 2022, arXiv:2208.11035), taken as the range of a
# box plot's whiskers, which is 5.4 standard deviations of a normal distribution.
GPU_SPREAD = 0.08 / 5.4
SECONDS_PER_DAY = 86400
STEPS, LIMIT = 2000, 9.0  # of the integral


def expected_maximum(ranks: int) -> float:
    """Return the mean of the largest of so many independent standard normal values.

    The integral of x times the maximum's density, ranks * phi(x) * Phi(x)^(ranks - 1): Tippett 1925, "On the extreme
    individuals and the range of samples taken from a normal population".
    """
    normal, width = NormalDist(), 2 * LIMIT / STEPS
    points = (-LIMIT + width * number for number in range(STEPS + 1))
    return width * sum(x * ranks * normal.pdf(x) * normal.cdf(x) ** (ranks - 1) for x in points)


def mean_time_between_failures_s(ranks: int, failures_per_gpu_day: float = FAILURES_PER_GPU_DAY) -> float:
    """Return the mean time until any of the ranks fails, at a constant rate; infinity at a rate of 0."""
    return SECONDS_PER_DAY / (ranks * failures_per_gpu_day) if failures_per_gpu_day else math.inf


def young_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return the seconds of work between saves that lose least: Young 1974, "A first order approximation"."""
    return math.sqrt(2 * save_s * between_failures_s)


def daly_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return the same to a higher order: Daly 2006, "A higher order estimate of the optimum checkpoint interval"."""
    if math.isinf(between_failures_s):
        return math.inf
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = save_s / (2 * between_failures_s)
    return young_interval_s(save_s, between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def lost_share(interval_s: float, save_s: float, restart_s: float, between_failures_s: float) -> float:
    """Return the expected share of a long run's time that is not training: saves, restarts, and work done twice.

    The complete model of Daly 2006, section 3, for failures at a constant rate, during restarts too.

    Args:
        interval_s: work between saves.
        save_s: for which the training stands still at each.
        restart_s: from a failure until training goes on.
        between_failures_s: mean time.
    """
    if math.isinf(between_failures_s):
        return 0.0
    exponent = (interval_s + save_s) / between_failures_s
    if exponent + restart_s / between_failures_s > 500:  # no interval is ever finished
        return 1.0
    total = between_failures_s * math.exp(restart_s / between_failures_s) * math.expm1(exponent)
    return 1 - interval_s / total
