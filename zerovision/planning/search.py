"""A training job on given GPUs, and the memory that the job needs under each configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerovision.models import ImageSize
from zerovision.models.activations import Activations
from zerovision.planning.machines import CPU, Gpu, Machine
from zerovision.planning.memory import MemoryPlan, ModelSizes, RankShare, plan_memory
from zerovision.planning.run_workload import Workload, stages_of, workload_of
from zerovision.training.base.errors import UserError, either
from zerovision.training.base.settings import FEWEST_IMAGES
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config, needing_torch
from zerovision.training.config.global_batch import MOST_IMAGES_ON_CPU, divided, micro_batches, usual_global_batch
from zerovision.training.engines.build import ENGINES, resolve_engine
from zerovision.training.engines.settings import check_machine
from zerovision.training.engines.ways import STRATEGIES, ParallelPlan, plan_of
from zerovision.training.observe.device_use import FILL
from zerovision.training.recipe.rules import check_optimizer
from zerovision.training.steps.carrier import Run
from zerovision.training.world.launchers import data_ranks

FIRST_PROBE, MOST_PROBES = 4, 5  # multiple of the option's images to try first; maximum number of batch sizes to try
NO_ACTIVATIONS = Activations(0, ((0, 0),))


@dataclass(frozen=True)
class PlannedJob:
    """The job to plan."""

    config: TrainConfig  # the search begins with its strategy
    machine: Machine  # one of the identical machines on which the ranks run
    ranks: int  # on all machines
    classes: int
    image_size: ImageSize  # of the training images, in pixels
    images: int  # in an epoch

    @cached_property
    def workload(self) -> Workload:
        """The workload of the network, or of one rank's part in a tensor group, computed on first use."""
        return workload_of(self.config, self.classes, self.image_size)

    @cached_property
    def _divided(self) -> dict[int, Workload]:
        """Cached workloads by number of ranks that divide each layer; a large network's workload takes seconds."""
        return {}

    def workload_for(self, config: TrainConfig) -> Workload:
        """Return a rank's workload under another configuration of the job's network."""
        ranks = config.ranks_per_layer
        if ranks == self.config.ranks_per_layer:
            return self.workload
        if ranks not in self._divided:
            self._divided[ranks] = workload_of(config, self.classes, self.image_size)
        return self._divided[ranks]

    def plan_for(self, config: TrainConfig) -> ParallelPlan:
        """Return how a configuration distributes the state over the job's ranks, or raise a UserError."""
        of_data, local = data_ranks(self.ranks, config.mesh), min(self.machine.ranks, self.ranks)
        check_machine(config, local)
        shards = local // config.ranks_per_replica if config.replicate_across == "nodes" else 0
        return plan_of(config.strategy, of_data, config.offload, shards)

    @property
    def device(self) -> str:
        """The type of the ranks' devices, as PyTorch names it."""
        return "cuda" if self.has_gpus else "cpu"

    @property
    def has_gpus(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.machine.gpu.name != CPU

    def host_bytes(self, option: Option) -> int:
        """Return the number of bytes that a machine's ranks offload to CPU memory."""
        return option.memory.offloaded * min(self.machine.ranks, self.ranks)

    @property
    def precision(self) -> str:
        """The precision that `--precision` selects on these devices; see `zerovision.training.engines.precision`.

        Raises:
            UserError: for a precision that the devices do not support.
        """
        wanted, known = self.config.precision, self.machine.gpu.precisions
        if wanted == "auto":
            return known[0]
        if wanted not in known and self.has_gpus:
            raise UserError(f"--precision {wanted}: {self.machine.gpu.name} does not support it: use {either(known)}.")
        return wanted


@dataclass(frozen=True)
class Option:
    """One way to run a job, and the memory it needs."""

    config: TrainConfig
    engine: str
    plan: ParallelPlan
    memory: MemoryPlan
    fits: bool

    @property
    def images_per_update(self) -> int:
        """Number of images per update, over all ranks."""
        return self.config.micro_batch * self.config.gradient_accumulation_steps * self.plan.shards * self.plan.replicas


def evaluate(job: PlannedJob, config: TrainConfig, *, counts_activations: bool = True) -> Option:
    """Predict the memory of one configuration of a job, with the job's network and update rule.

    Args:
        job: the job to plan.
        config: the configuration, with the job's network.
        counts_activations: whether to count activations, which takes seconds for a large network; if False, the
            predicted memory is too low.

    Raises:
        UserError: if the engine does not support the settings, or the update rule does not support the engine and
            strategy.
    """
    sharded = STRATEGIES[config.strategy].zero_stage > 1
    check_optimizer(FLAG_OF["optimizer"], config.optimizer, config.strategy, config.engine, shards_parameters=sharded)
    if config.ranks_per_replica > 1:
        check_config(config, FLAG_OF)
    plan, workload = job.plan_for(config), job.workload_for(config)
    name = resolve_engine(config, plan, workload.network, needing_torch(config))
    is_cut = config.ranks_per_replica > config.ranks_per_layer  # whether the network is cut into stages
    if not counts_activations:  # nor the sizes of stages, which require activations
        sizes = ModelSizes(0, 0, 0) if is_cut else workload.sizes
        shares: Sequence[RankShare] = [RankShare(sizes, NO_ACTIVATIONS, workload.whole_bytes)]
    elif is_cut:
        shares = stages_of(workload, config, job.precision, job.device)
    else:
        channels_last = job.has_gpus or (name == "torch" and plan.zero_stage == 1)
        settings = (config.micro_batch, job.precision, job.device, config.activation_checkpointing, channels_last)
        shares = [RankShare(workload.sizes, workload.activations(*settings), workload.whole_bytes)]
    ahead = workload.image_bytes * config.micro_batch if job.has_gpus else 0  # a GPU also holds the next micro-batch
    found = []
    for share in shares:
        kept = share.activations._replace(saved=share.activations.saved + ahead)
        rank, steps = dataclasses.replace(share, activations=kept), config.gradient_accumulation_steps
        found.append(plan_memory(rank, plan, name, workload.optimizer_values, steps, job.device))
    memory = max(found, key=lambda memory: memory.peak)
    return Option(config, name, plan, memory, memory.peak <= job.machine.gpu.memory_bytes)


def predicted_tensors(run: Run, configs: Sequence[TrainConfig]) -> list[int]:
    """Predict the peak bytes of a rank's tensors under several configurations, for a run that tries batch sizes.

    Args:
        run: the prepared run.
        configs: configurations of the run that differ in batch size, strategy, offload and activation checkpointing.

    Raises:
        UserError: if the network's memory cannot be predicted, or the engine does not support the settings.
    """
    data, ranks, device = run.data, run.ranks_per_state, run.world.device.type
    run = run.changed(precision=run.precision, image_channels=data.preprocessing.channels)
    machine = Machine(Gpu(CPU if device == "cpu" else "gpu", memory_bytes=0), min(run.world.local_size, ranks))
    job = PlannedJob(run.config, machine, ranks, len(data.class_names), data.train.sizes[-1], images=0)
    return [evaluate(job, config).memory.tensors for config in configs]


def fits(job: PlannedJob, config: TrainConfig, share: float = 1.0) -> bool:
    """Return whether a configuration fits in a share of a GPU's memory, or raise a UserError, as `evaluate` does."""
    most = share * job.machine.gpu.memory_bytes
    # Activations, which take longer, are counted only if the rest fits.
    return all(evaluate(job, config, counts_activations=each).memory.peak <= most for each in (False, True))


def engines_of(job: PlannedJob, config: TrainConfig) -> list[TrainConfig]:
    """Return the configuration and, if its engine is 'auto', one for each engine besides the default that supports it.

    A UserError is raised if the default or the requested engine does not support the configuration.
    """
    default = evaluate(job, config, counts_activations=False).engine
    found = [config]
    for name in ENGINES if config.engine == "auto" else ():
        if name != default:
            with contextlib.suppress(UserError):  # the engine does not support this
                engine: Any = name  # one of the field's values
                other = dataclasses.replace(config, engine=engine)
                evaluate(job, other, counts_activations=False)
                found.append(other)
    return found


def options(job: PlannedJob) -> list[Option]:
    """Return one option for every possible strategy and engine of the job."""
    found: list[Option] = []
    possible = [name for name, plan in STRATEGIES.items() if job.config.offload in plan.offloadable]
    for name in possible:
        with contextlib.suppress(UserError):  # the update rule cannot be combined with this strategy
            configs = engines_of(job, dataclasses.replace(job.config, strategy=name))
            found += [evaluate(job, config) for config in configs]
    return found


def with_planned_batch(job: PlannedJob) -> PlannedJob:
    """Return the job with the largest batch size predicted to fit in place of `auto`, or the smallest if none fits.

    A UserError is raised if the ranks cannot share the global batch.
    """
    config = job.config
    if config.batch_size != "auto":
        return job
    ranks = data_ranks(job.ranks, config.mesh)
    global_batch = config.global_batch or usual_global_batch(ranks, job.images)
    sizes = micro_batches(global_batch, ranks, 0 if job.has_gpus else MOST_IMAGES_ON_CPU)
    configs = [dataclasses.replace(divided(config, size, global_batch, ranks), global_batch=0) for size in sizes]
    fitting = [each for each in configs if fits(job, each, FILL)]
    return dataclasses.replace(job, config=[configs[0], *fitting][-1])


def filling_batch(job: PlannedJob, chosen: Option) -> Option:
    """Return the option without accumulation and with the most images predicted to fit, or `chosen` if none has more.

    The memory of the backward pass grows about linearly with the number of images. The line through the last two sizes
    predicts where it reaches `FILL` of the GPU; the memory at that size then improves the estimate.
    """

    def with_images(count: int) -> tuple[Option, int]:
        option = evaluate(job, dataclasses.replace(chosen.config, batch_size=count, gradient_accumulation_steps=1))
        return option, dataclasses.replace(option.memory, start=0, step=0).peak

    most, room = FIELDS["batch_size"].metadata["high"], FILL * job.machine.gpu.memory_bytes
    own = chosen.config.micro_batch
    found, needs = chosen, {own: with_images(own)[1]}
    before, count = own, min(FIRST_PROBE * own, most)
    while count > own and count not in needs and len(needs) <= MOST_PROBES:
        option, needs[count] = with_images(count)
        if option.memory.peak <= room and count > found.config.micro_batch:
            found = option
        each = (needs[count] - needs[before]) / (count - before)
        reached = count + (room - needs[count]) / each if each > 0 else most
        before, count = count, int(min(reached, most)) // FEWEST_IMAGES * FEWEST_IMAGES
    return found
