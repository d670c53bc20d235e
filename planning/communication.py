"""How long ranks take to exchange a step's gradients and weights, and how much of that a step waits for.

A message of n bytes over a link takes latency + n / bandwidth (Hockney 1994, "The communication challenge for MPP").
Collectives are sums of such messages, as in Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", which neglects the additions themselves. What an engine exchanges follows
Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 7) and the engines' own code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from planning.machines import Interconnect, Machine
from planning.memory import FLOAT32_BYTES
from training.parallel.block_norms import BLOCK
from training.parallel.buckets import FEWEST_ELEMENTS, FEWEST_ELEMENTS_ON_GPU
from training.parallel.strategies import ParallelPlan
from training.parallel.summation_tree import StepTree

SHARED_MEMORY = "shared-memory"  # the link inside a machine of CPU ranks: no messages, a rank reads the others' memory
# Of the rate of gloo's all-reduce, what its other collectives reach: the least of three runs of `step_phases.py`. Its
# reduce-scatter is an all-reduce of which a rank keeps its part (torch, ProcessGroupGloo.cpp). NCCL's collectives are
# taken to reach the same rate.
GLOO_SHARE = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_to_all": 0.79, "all_gather": 0.83}
# gloo sends through the kernel: a byte takes as long as so many copies of it, by the cores that would compute
# otherwise, so nothing hides it. Measured between two ranks of one machine, as is the time of a hop there.
GLOO_COPIES, GLOO_LATENCY_S = 22.4, 0.156e-3
DDP_BUCKET_BYTES, DDP_FIRST_BYTES = 25 << 20, 1 << 20  # DistributedDataParallel's bucket_cap_mb, and its first bucket
USUAL_BLOCKS = 16  # of a network: FSDP2 and ZeRO-3 gather and scatter one at a time


def ring_all_reduce_s(size_bytes: float, ranks: int, link: Interconnect) -> float:
    """Seconds of a reduce-scatter and an all-gather around a ring: Patarasuk and Yuan 2009, section 3."""
    return reduce_scatter_s(size_bytes, ranks, link) + all_gather_s(size_bytes, ranks, link)


def tree_all_reduce_s(size_bytes: float, ranks: int, link: Interconnect) -> float:
    """Seconds up and down two binary trees at once: Sanders, Speck and Träff 2009, without the time to fill them."""
    return 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * size_bytes / _rate(link)


def all_reduce_s(size_bytes: float, ranks: int, link: Interconnect) -> float:
    """Seconds of the better of ring and trees, as NCCL chooses."""
    return min(ring_all_reduce_s(size_bytes, ranks, link), tree_all_reduce_s(size_bytes, ranks, link))


def reduce_scatter_s(size_bytes: float, ranks: int, link: Interconnect) -> float:
    """Seconds around a ring: a rank sends ranks - 1 times the ranks-th part of the `size_bytes` that all have."""
    return (ranks - 1) * (link.latency_s + size_bytes / ranks / _rate(link))


def all_gather_s(size_bytes: float, ranks: int, link: Interconnect) -> float:
    """Seconds around a ring, after which every rank has `size_bytes`: a reduce-scatter's messages in reverse."""
    return reduce_scatter_s(size_bytes, ranks, link)


def all_to_all_s(size_bytes: float, ranks: int, link: Interconnect) -> float:
    """Seconds of pairwise exchange: a rank sends another part of its `size_bytes` to each of the others.

    One after another: NCCL has several messages under way, so for many ranks and few bytes this is an upper bound.
    """
    return reduce_scatter_s(size_bytes, ranks, link)


FLAT = {
    "all_reduce": all_reduce_s,
    "reduce_scatter": reduce_scatter_s,
    "all_gather": all_gather_s,
    "all_to_all": all_to_all_s,
}


def collective_s(collective: str, size_bytes: float, ranks: int, machine: Machine) -> float:
    """Seconds of a collective of ranks that fill one machine after another.

    Over several machines it is the faster of one ring over all ranks, as many of them at once as a machine has links to
    others, and of two levels: inside the machines, and between ranks of the same place, each with its part (Cho et al.
    2019, "BlueConnect", section 3). The hops' latency in the ring is NCCL's (src/graph/tuning.cc).

    Args:
        collective: a key of `FLAT`.
        size_bytes: of the whole vector, before an all-reduce or reduce-scatter, after an all-gather.
        ranks: that take part.
        machine: one of theirs.
    """
    machines = math.ceil(ranks / machine.ranks)
    local = math.ceil(ranks / machines)
    if ranks == 1:
        return 0.0
    if machines == 1:
        return FLAT[collective](size_bytes, ranks, machine.inside)
    if local == 1:
        return FLAT[collective](size_bytes, ranks, machine.between)
    inside, between = machine.inside, machine.between
    if collective == "all_to_all":
        near = (local - 1) * (inside.latency_s + size_bytes / ranks / _rate(inside))
        return max(near, (ranks - local) * (between.latency_s + size_bytes / ranks / _rate(between)))
    passes = 2 if collective == "all_reduce" else 1
    hops_s = (machines - 1) * between.latency_s + (ranks - machines) * inside.latency_s
    ring = passes * (hops_s + (ranks - 1) / ranks * size_bytes / min(_rate(inside), local * _rate(between)))
    levels = passes * reduce_scatter_s(size_bytes, local, inside)
    return min(ring, levels + FLAT[collective](size_bytes / local, machines, between))


def _rate(link: Interconnect) -> float:
    return link.bandwidth_bytes_per_s * link.achieved_share


@dataclass(frozen=True)
class Exchange:
    """What a step sends of the model's fp32 values in one place.

    Attributes:
        collective: a key of `FLAT`.
        bucket_bytes: of one message; 0 for one per block of the network.
        behind: what computes meanwhile, 'forward' or 'backward' of a micro-step; '' if nothing does.
        each_micro_step: whether it happens in each of an update's micro-steps, rather than once.
        first_bytes: of the first message, if it is smaller.
    """

    collective: str
    bucket_bytes: int
    behind: str = ""
    each_micro_step: bool = False
    first_bytes: int = 0


# By engine and ZeRO stage. `--engine torch` is DistributedDataParallel at stage 1 and FSDP2 at 2 and 3. DeepSpeed sums
# by all-reduce below stage 3 (`use_multi_rank_bucket_allreduce`), and at stage 1 when backward has ended; from stage 2
# on it sums in every micro-step.
_NATIVE = (Exchange("all_to_all", FEWEST_ELEMENTS * FLOAT32_BYTES, "backward"), Exchange("all_gather", 0))
_DEEPSPEED_BUCKET = ParallelPlan(zero_stage=1).bucket_elements * FLOAT32_BYTES
_GATHER, _SCATTER = Exchange("all_gather", 0, "forward"), Exchange("reduce_scatter", 0, "backward")
EXCHANGES: dict[tuple[str, int], tuple[Exchange, ...]] = {
    **{("native", stage): _NATIVE for stage in (1, 2, 3)},
    ("torch", 1): (Exchange("all_reduce", DDP_BUCKET_BYTES, "backward", first_bytes=DDP_FIRST_BYTES),),
    ("torch", 2): (_GATHER, _SCATTER),
    ("torch", 3): (
        Exchange("all_gather", 0, "forward", each_micro_step=True),
        Exchange("all_gather", 0, "backward", each_micro_step=True),
        _SCATTER,
    ),
    ("deepspeed", 1): (Exchange("all_reduce", _DEEPSPEED_BUCKET), Exchange("all_gather", _DEEPSPEED_BUCKET)),
    ("deepspeed", 2): (
        Exchange("all_reduce", _DEEPSPEED_BUCKET, "backward", each_micro_step=True),
        Exchange("all_gather", _DEEPSPEED_BUCKET),
    ),
    ("deepspeed", 3): (
        Exchange("all_gather", 0, "forward", each_micro_step=True),
        Exchange("all_gather", 0, "backward", each_micro_step=True),
        Exchange("reduce_scatter", 0, "backward", each_micro_step=True),
    ),
}


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds of an update that its ranks exchange, and of those the ones that nothing hides."""

    total_s: float
    exposed_s: float


def communication_s(
    engine: str,
    plan: ParallelPlan,
    parameters: int,
    machine: Machine,
    *,
    forward_s: float,
    backward_s: float,
    accumulation_steps: int = 1,
    blocks: int = USUAL_BLOCKS,
) -> CommunicationTime:
    """Predict the exchange of one update.

    Args:
        engine: 'native', 'torch' or 'deepspeed'.
        plan: of the strategy, with its shards and replicas.
        parameters: trained ones.
        machine: one of those that the ranks fill.
        forward_s: of one micro-step on one rank.
        backward_s: likewise.
        accumulation_steps: micro-steps of an update.
        blocks: of the network.
    """
    ranks, total_s, exposed_s = plan.shards * plan.replicas, 0.0, 0.0
    compute_s = {"forward": forward_s, "backward": backward_s, "": 0.0}
    shares_memory = machine.inside.name == SHARED_MEMORY and ranks <= machine.ranks
    is_native_on_gpus = engine == "native" and machine.inside.name != SHARED_MEMORY
    uses_gloo = machine.inside.name == SHARED_MEMORY and not (shares_memory and engine == "native")
    if uses_gloo:
        inside = dataclasses.replace(machine.inside, latency_s=GLOO_LATENCY_S, achieved_share=1 / GLOO_COPIES)
        machine = dataclasses.replace(machine, inside=inside)
    for exchange in EXCHANGES[engine, plan.zero_stage] if ranks > 1 else ():
        if is_native_on_gpus and exchange.bucket_bytes:
            exchange = dataclasses.replace(exchange, bucket_bytes=FEWEST_ELEMENTS_ON_GPU * FLOAT32_BYTES)
        size = _size_bytes(engine, exchange, parameters, ranks, accumulation_steps)
        messages, behind = _messages(exchange, size, blocks), "" if shares_memory else exchange.behind
        if uses_gloo:
            messages = [message / GLOO_SHARE[exchange.collective] for message in messages]
        elif shares_memory:  # where there is one copy of the weights
            messages = [0.0 if exchange.collective == "all_gather" else size]
        seconds = [_message_s(exchange, message, plan, engine, machine) for message in messages]
        times = accumulation_steps if exchange.each_micro_step else 1
        passes = 2 if exchange.collective == "all_reduce" else 1
        is_copied = uses_gloo and not shares_memory  # to and from a wire, by the core that would compute
        copied_s = is_copied * passes * (ranks - 1) / ranks * size * GLOO_COPIES / machine.gpu.bandwidth_bytes_per_s
        total_s += times * (sum(seconds) + copied_s)
        exposed_s += times * (exposed(seconds, compute_s[behind]) + copied_s)
    return CommunicationTime(total_s, exposed_s)


def exposed(messages_s: Sequence[float], compute_s: float) -> float:
    """Seconds of messages that remain after the computation that makes them one after another, each its share of it.

    As in wait-free backpropagation (Zhang et al. 2017, "Poseidon", arXiv:1706.03292, section 3), a message starts when
    its part of the computation has ended, or the message before it. Of m equal ones the last ends one message after
    the computation, or, if they queue from the first on, all of them after the first m-th of it. Fetching weights in
    time for the layers that need them is the same in reverse.
    """
    total, ready, end = sum(messages_s), 0.0, 0.0
    for seconds in messages_s:
        ready += compute_s * seconds / total if total else 0.0
        end = max(end, ready) + seconds
    return max(end - compute_s, 0.0)


def measured_link(name: str, small: tuple[float, float], large: tuple[float, float], ranks: int) -> Interconnect:
    """Return the link over which a ring of ranks would take as long as two measured all-reduces, such as the doctor's.

    Args:
        name: of the link.
        small: bytes and seconds of one that latency decides.
        large: of one that bandwidth decides.
        ranks: that took part, at least 2.
    """
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    passes = 2 * (ranks - 1)
    byte_s = (large_s - small_s) / (large_bytes - small_bytes) * ranks / passes
    latency_s = max(small_s / passes - small_bytes / ranks * byte_s, 0.0)
    return Interconnect(name, latency_s, 1 / byte_s, f"an all-reduce of {ranks} ranks, measured", 1)


def volumes(engine: str, plan: ParallelPlan, parameters: int, accumulation_steps: int = 1) -> dict[str, float]:
    """Return bytes that each rank sends in an update, by collective."""
    sent: defaultdict[str, float] = defaultdict(float)
    ranks = plan.shards * plan.replicas
    group = plan.shards if engine == "torch" and plan.zero_stage > 1 else ranks
    for exchange in EXCHANGES[engine, plan.zero_stage] if ranks > 1 else ():
        passes = 2 if exchange.collective == "all_reduce" else 1
        times = accumulation_steps if exchange.each_micro_step else 1
        size = _size_bytes(engine, exchange, parameters, ranks, accumulation_steps)
        sent[exchange.collective] += times * passes * size * (group - 1) / group
        if group < ranks and exchange.collective == "reduce_scatter":
            sent["all_reduce"] += times * 2 * size / group * (plan.replicas - 1) / plan.replicas
    return dict(sent)


def _size_bytes(engine: str, exchange: Exchange, parameters: int, ranks: int, accumulation_steps: int) -> float:
    """Bytes of the whole vector that is exchanged.

    The native engine's buckets are whole blocks on every rank, and its tree leaves a rank with several sums to send if
    its micro-steps are no power of two.
    """
    size = float(FLOAT32_BYTES * parameters)
    if engine != "native":
        return size
    padding = max(BLOCK * ranks / FEWEST_ELEMENTS, 1.0)
    rows = _tree_rows(ranks, accumulation_steps) if exchange.collective == "all_to_all" else 1
    return size * padding * rows


def _messages(exchange: Exchange, size_bytes: float, blocks: int) -> list[float]:
    """Return the bytes of each message."""
    if not exchange.bucket_bytes:
        return [size_bytes / blocks] * blocks
    first = min(exchange.first_bytes, size_bytes)
    count = math.ceil((size_bytes - first) / exchange.bucket_bytes)
    rest = [(size_bytes - first) / count] * count if count else []
    return [first, *rest] if first or not rest else rest


@functools.cache
def _tree_rows(ranks: int, accumulation_steps: int) -> int:
    return StepTree(ranks, accumulation_steps).rows_sent


def _message_s(exchange: Exchange, size_bytes: float, plan: ParallelPlan, engine: str, machine: Machine) -> float:
    """Seconds of one message; FSDP2 with replicas also sums each shard's part over them (HSDP)."""
    if engine != "torch" or plan.zero_stage == 1:  # no other engine shards among some of the ranks only
        return collective_s(exchange.collective, size_bytes, plan.shards * plan.replicas, machine)
    seconds = collective_s(exchange.collective, size_bytes, plan.shards, machine)
    if exchange.collective == "reduce_scatter" and plan.replicas > 1:
        link = machine.between if plan.shards * plan.replicas > machine.ranks else machine.inside
        seconds += all_reduce_s(size_bytes / plan.shards, plan.replicas, link)
    return seconds
