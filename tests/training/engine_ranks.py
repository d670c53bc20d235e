"""What the engine tests run on each rank: our engine, and plain PyTorch as the oracle."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from tests.stored_tensors import in_memory
from tests.training.no_shared_memory import without_shared_memory
from zerovision.training.base.errors import AgreedError
from zerovision.training.base.leaves import Leaves
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.checkpoint.store import TrainState
from zerovision.training.config import TrainConfig
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines import buckets, fsdp2
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.build import build_engine, resolve_engine
from zerovision.training.engines.engine import Engine, EngineSetup
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.engines.settings import ways_of
from zerovision.training.engines.ways import plan_of
from zerovision.training.loop import Accumulate, train_one_epoch
from zerovision.training.observe.device_use import peak_memory, reset_peak_memory, used_memory
from zerovision.training.observe.observer import Observer, Observers
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.recipe.schedule import Schedule
from zerovision.training.recipe.tuning import BackboneFreezer
from zerovision.training.steps.carrier import Run, RunModel, Start
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.steps.watch import Heartbeats, every_step, guard_of
from zerovision.training.steps.weight_average import WeightAverages
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.scores import ScoreSums, sample_losses
from zerovision.training.tasks.task import Task
from zerovision.training.world.collectives import gather_rows, ranks_per_machine
from zerovision.training.world.world import World

BATCH_SIZE = 8
CLASSES = 10
HEAD = {"head.weight", "head.bias"}
NEVER = sys.maxsize  # a step
buckets.FEWEST_ELEMENTS = 256  # several buckets for models as small as these


class SmallNet(nn.Module):
    """Two convolutions and a head; BatchNorm only where asked for."""

    def __init__(self, with_batchnorm: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if with_batchnorm else lambda channels: nn.Identity()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            norm(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            norm(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


class BlockNet(nn.Module):
    """Repeated blocks with activation checkpointing, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(8, CLASSES)
        self.unused = nn.Parameter(torch.ones(3, 2))
        enable_activation_checkpointing(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def make_model(with_batchnorm: bool) -> nn.Module:
    torch.manual_seed(0)
    return SmallNet(with_batchnorm)


def make_batch(step: int, part: int, size: int = BATCH_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Part `part` of step `step`: the same whichever rank takes it."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def make_engine(
    world: World,
    module: nn.Module,
    config: TrainConfig,
    precision: str = "fp32",
    discriminative: bool = False,
    groups: int = 1,
) -> Engine:
    optimizer, ranks = build_optimizer(module, config, HEAD, discriminative=discriminative), world.data.size
    shards = 2 if config.replicate_across == "nodes" else ranks  # as on machines with two ranks each
    plan = plan_of(config.strategy, ranks, config.offload, shards)
    setup = EngineSetup(
        module,
        optimizer,
        plan,
        precision,
        world,
        BATCH_SIZE,
        config.gradient_accumulation_steps,
        config.gradient_clipping,
        compile="auto" if config.compile == "on" else "off",
        groups=groups,
    )
    if config.pipeline_parallel > 1:
        channels = next(parameter.shape[1] for parameter in module.parameters() if parameter.ndim == 4)
        setup = dataclasses.replace(setup, image_shape=(channels, 8, 8))
    return build_engine(setup, ways_of(config, resolve_engine(config, plan, module)))


def leaves_of(engine: Engine, world: World, accumulation: int = 1) -> Leaves:
    """Return which rank computes which leaf of a step."""
    return getattr(engine, "_leaves", Leaves(world.size, accumulation))


def configuration(**changes: Any) -> TrainConfig:
    return dataclasses.replace(TrainConfig(learning_rate=0.01, gradient_clipping=0.5), **changes)


def train_steps(
    world: World, engine: Engine, steps: range, accumulation: int = 1, poison: tuple[int, int] = (-1, -1)
) -> list[float]:
    """Train, and return the mean loss over all leaves of each step; (step, rank) of `poison` sees a NaN."""
    losses = []
    for step in steps:
        of_step = torch.zeros((), dtype=torch.float64)
        for micro_step in range(accumulation):
            images, labels = make_batch(step, leaves_of(engine, world, accumulation).number(world.rank, micro_step))
            if (step, world.rank) == poison:
                images[0, 0, 0, 0] = float("nan")
            loss = sample_losses(engine.forward(images), labels).mean()
            engine.backward(loss)
            engine.step()
            of_step += loss.detach().double() / accumulation
        losses.append(mean_over_ranks(world, of_step))
    return losses


def mean_over_ranks(world: World, loss: torch.Tensor) -> float:
    total = loss.detach().double().clone()
    if world.size > 1:
        torch.distributed.all_reduce(total)
    return float(total) / world.size


def whole_tensors(engine: Engine) -> dict[str, dict[str, torch.Tensor]]:
    """Put weights and moments together from all ranks' shards: kind -> parameter name -> tensor; a collective."""
    state = engine.state()
    # Copies: a pickled view has its whole buffer, and Muon's matrices are all in one.
    own = [(s.name, s.box, {kind: tensor.cpu().clone() for kind, tensor in s.tensors.items()}) for s in state.shards]
    parts: list[Any] = [own]
    if torch.distributed.get_world_size() > 1:
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, own)
    whole: dict[str, dict[str, torch.Tensor]] = {"weights": {}, **{kind: {} for kind in state.moment_kinds}}
    for name, box, tensors in (shard for part in parts for shard in part):
        for kind, tensor in tensors.items():
            whole[kind].setdefault(name, torch.full(state.shapes[name], torch.nan))[box] = tensor
    return whole


def weights_of(engine: Engine) -> dict[str, list]:
    """Return all weights and this rank's buffers; a collective."""
    buffers = {name: buffer.tolist() for name, buffer in engine.module.named_buffers() if not buffer.is_meta}
    weights = {name: tensor.double().tolist() for name, tensor in whole_tensors(engine)["weights"].items()}
    return dict(sorted((weights | of_all_stages(buffers)).items()))


def of_all_stages(own: dict[str, Any]) -> dict[str, Any]:
    """Return by name what this rank has, and other ranks have beside it; a collective."""
    parts: list[Any] = [own] * torch.distributed.get_world_size()
    if len(parts) > 1:
        torch.distributed.all_gather_object(parts, own)
    return {name: value for part in parts for name, value in part.items()} | own


def train_with_engine(
    world: World,
    steps: int,
    with_batchnorm: bool = True,
    accumulation: int = 1,
    defers_verdict: bool = False,
    restart_at: int = NEVER,
    **changes: Any,
):
    """Train with our engine; return losses and final weights."""
    config = configuration(gradient_accumulation_steps=accumulation, **changes)
    engine = make_engine(world, make_model(with_batchnorm), config)
    if defers_verdict:
        engine.updates.defers_verdict = True  # as on a GPU: the rule itself looks at whether the gradient is finite
    losses = train_steps(world, engine, range(min(steps, restart_at)), accumulation)
    if restart_at < steps:
        engine.restart_optimizer()
        losses += train_steps(world, engine, range(restart_at, steps), accumulation)
    result = {"losses": losses, "weights": weights_of(engine)}
    engine.close()
    return result


def train_over_collectives(world: World, steps: int, optimizer: str):
    """As `train_with_engine` under ddp, on a machine without memory to share."""
    with without_shared_memory():
        return train_with_engine(world, steps, optimizer=optimizer, engine="torch")


def train_blocks(world: World, strategy: str, engine: str, over_collectives: bool = False, **changes: Any):
    """Train the head alone for three steps of two micro-batches, evaluate, and train all layers for three."""
    torch.manual_seed(0)
    module = BlockNet()
    module.stem.bias.requires_grad_(False)
    config = configuration(strategy=strategy, engine=engine, gradient_accumulation_steps=2, **changes)
    with without_shared_memory() if over_collectives else nullcontext():
        engine = make_engine(world, module, config)
    freezer = BackboneFreezer(module, {"head.weight", "head.bias"})
    freezer.start_epoch(only_head=True)
    losses = train_steps(world, engine, range(3), 2)
    with torch.no_grad():
        logits = engine.forward(make_batch(3, 0)[0])
    before = weights_of(engine)
    freezer.start_epoch(only_head=False)
    losses += train_steps(world, engine, range(3, 6), 2)
    result = {"losses": losses, "logits": logits.tolist(), "before": before, "weights": weights_of(engine)}
    engine.close()
    return result


def whole_bytes_while_sharding(world: World, strategy: str) -> tuple[list[int], list[int]]:
    """Return the bytes of each block and of the rest, and how many of the whole weights are left after each's turn."""
    module, left = BlockNet(), []
    whole = [(StorageWeakRef(parameter.untyped_storage()), parameter.nbytes) for parameter in module.parameters()]
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in module.blocks]

    def shard(unit: nn.Module, **options: Any) -> None:
        fully_shard(unit, **options)
        left.append(sum(size for storage, size in whole if not storage.expired()))

    with mock.patch.object(fsdp2, "fully_shard", shard):
        make_engine(world, module, configuration(strategy=strategy, engine="torch")).close()
    return [*sizes, sum(size for _, size in whole) - sum(sizes)], left


def uneven_machines(world: World) -> str:
    """Return what `--replicate-across nodes` says if machines have different numbers of ranks."""
    try:
        ranks_per_machine(dataclasses.replace(world, local_size=1 + world.rank))
    except AgreedError as error:
        return str(error)
    return ""


def train_leaves(world: World, leaves: int, precision: str = "fp32", over_collectives: bool = False, **changes: Any):
    """Train on so many micro-batches a step; return the sha256 of norms and the whole state, and what is updated here.

    The second is the number of elements that this rank's optimizer has, without those that only align others.
    """
    accumulation = leaves // world.size
    config = configuration(engine="torch", gradient_accumulation_steps=accumulation, **changes)
    with without_shared_memory() if over_collectives else nullcontext():
        engine = make_engine(world, make_model(True), config, precision, discriminative=True)
    digest = hashlib.sha256()
    for step, micro_step in product(range(3), range(accumulation)):
        images, labels = make_batch(step, leaves_of(engine, world, accumulation).number(world.rank, micro_step))
        engine.backward(sample_losses(engine.forward(images), labels).mean())
        if result := engine.step():
            digest.update(float(result.gradient_norm).hex().encode())
    for tensors in whole_tensors(engine).values():
        for _, tensor in sorted(tensors.items()):
            digest.update(tensor.contiguous().numpy().tobytes())
    order = leaves_of(engine, world, accumulation).order()
    for buffer in engine.buffers.by_name().values():
        every = gather_rows(buffer.reshape(-1), world).view(leaves, -1)
        digest.update(every[order].contiguous().numpy().tobytes())
    updated = sum(tensors.numel() for shard in engine.state().shards for tensors in [shard.tensors["weights"]])
    engine.close()
    return digest.hexdigest(), updated


def memory_report(world: World, optimizer: str) -> dict[str, float]:
    """Return by how many times a model's bytes its steps, and then `whole_tensors`, raise this rank's peak memory."""
    layers = nn.Sequential(*(nn.Linear(192, 192) for _ in range(40)))
    parts = {"stem": nn.Conv2d(3, 192, 8), "flat": nn.Flatten(), "layers": layers, "head": nn.Linear(192, CLASSES)}
    module = nn.Sequential(OrderedDict(parts))
    raised, model_bytes = {}, sum(parameter.nbytes for parameter in module.parameters())

    def watch(what: str, function: Callable[[], Any]) -> None:
        reset_peak_memory(world.device)
        before = used_memory(world.device)
        function()
        raised[what] = (peak_memory(world.device) - before) / model_bytes

    engine = make_engine(world, module, configuration(engine="torch", optimizer=optimizer))
    watch("steps", lambda: train_steps(world, engine, range(3)))
    watch("whole_tensors", lambda: whole_tensors(engine))
    engine.close()
    return raised


def decayed_and_not(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def train_with_plain_pytorch(
    world: World, steps: int, optimizer: str, with_batchnorm: bool = True, restart_at: int = NEVER
):
    """The oracle: DistributedDataParallel, PyTorch's (or timm's) optimizer, clip_grad_norm_."""
    from timm.optim import MADGRAD, Adan, Lamb, Lars

    config, model = configuration(), make_model(with_batchnorm)
    groups = decayed_and_not(model, config.weight_decay)
    rules = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=config.learning_rate),
        "sgd": lambda: torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=True),
        "lamb": lambda: Lamb(groups, lr=config.learning_rate, max_grad_norm=None),
        "adan": lambda: Adan(groups, lr=config.learning_rate),
        "madgrad": lambda: MADGRAD(groups, lr=config.learning_rate, momentum=config.momentum),
        "lars": lambda: Lars(groups, lr=config.learning_rate, momentum=config.momentum),
        "muon": lambda: build_optimizer(model, configuration(optimizer="muon"), HEAD, discriminative=False),
    }
    rule = rules[optimizer]()
    # Our ranks keep their own BatchNorm buffers between evaluations.
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    losses = []
    for step in range(steps):
        images, labels = make_batch(step, world.rank)
        loss = nn.functional.cross_entropy(parallel(images), labels)
        rule.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        if step == restart_at:
            rule = rules[optimizer]()
        rule.step()
        losses.append(mean_over_ranks(world, loss))
    return {"losses": losses, "weights": {n: t.double().tolist() for n, t in model.state_dict().items()}}


def precision_report(world: World, strategy: str, engine: str, precision: str):
    """Train a little in a precision; return the dtypes of everything and the losses."""
    module = make_model(True)
    engine = make_engine(world, module, configuration(strategy=strategy, engine=engine), precision)
    computed: set[str] = set()
    gathered: set[str] = set()

    def note_dtypes(layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        computed.add(str(output.dtype))
        gathered.add(str(layer.weight.dtype))

    module.features[3].register_forward_hook(note_dtypes)
    losses = train_steps(world, engine, range(3))
    result = {
        "losses": losses,
        "convolution_output": sorted(computed),
        "gathered": sorted(gathered),
        "weights": sorted({str(tensor.dtype) for tensor in whole_tensors(engine)["weights"].values()}),
        "live": sorted({str(t.dtype) for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()}),
        "loss_scale": engine.loss_scale.value if engine.loss_scale else None,
    }
    engine.close()
    return result


def nan_report(
    world: World,
    strategy: str,
    engine: str,
    precision: str,
    good_steps: int = 2,
    optimizer: str = "adamw",
    defers_verdict: bool = False,
):
    """Put a NaN into one image of rank 1 after some good steps, and go on; and the same run without that step."""
    config = configuration(strategy=strategy, engine=engine, optimizer=optimizer)
    runs = []
    for poison in ((good_steps, 1), None):
        engine = make_engine(world, make_model(False), config, precision)
        if defers_verdict:
            engine.updates.defers_verdict = True  # as on a GPU
        train_steps(world, engine, range(good_steps))
        states = [state_report(engine)]
        if poison:
            train_steps(world, engine, range(good_steps, good_steps + 1), poison=poison)
            states.append(state_report(engine))
        train_steps(world, engine, range(good_steps + 1, good_steps + 3))
        runs.append([*states, state_report(engine)])
        engine.close()
    (before, after, later), (_, undisturbed) = runs
    return {"before": before, "after": after, "later": later, "undisturbed": undisturbed}


def state_report(engine: Engine):
    """Return the weights, the loss scale and the count of updates."""
    return {
        "weights": weights_of(engine),
        "loss_scale": engine.loss_scale.value if engine.loss_scale else None,
        "applied_steps": engine.state().applied_steps,
    }


def resume_report(world: World, change: tuple[str, str, str, str], optimizer: str):
    """Train 4 steps at once, and 2 + 2 through `read` and `write`; two learning rates make four parameter groups.

    `change` is strategy and engine of the first two steps, and of the last two.
    """
    strategies, engines = change[::2], change[1::2]
    results = []
    for split in (False, True):
        config = configuration(strategy=strategies[0], engine=engines[0], optimizer=optimizer)
        engine = make_engine(world, make_model(True), config, discriminative=True)
        losses = train_steps(world, engine, range(2))
        if split:
            tensors, old = whole_tensors(engine), engine.state()
            # Each rank keeps its own BatchNorm buffers here, as between two evaluations.
            buffers = {name: buffer.clone() for name, buffer in old.buffers.items()}
            engine.close()
            torch.manual_seed(77)
            config = configuration(strategy=strategies[1], engine=engines[1], optimizer=optimizer)
            engine = make_engine(world, SmallNet(True), config, discriminative=True)
            engine.load_state(in_memory(tensors), buffers, old.applied_steps)
        losses += train_steps(world, engine, range(2, 4))
        results.append({"losses": losses, "weights": weights_of(engine)})
        engine.close()
    return results


def evaluation_report(world: World):
    """Evaluate a model of fixed random weights on the held-out digits; return the scores and the predictions."""
    from zerovision.training.data import DataOptions, load_data
    from zerovision.training.data.loader import Loader
    from zerovision.training.data.sampler import BatchPlan, EvaluationPlan
    from zerovision.training.loop import evaluate

    data = load_data(DataOptions())
    config = configuration(batch_size=BATCH_SIZE, strategy="fsdp_stage3")
    engine = make_engine(world, make_model(True), config)
    # Statistics that differ from those of any batch, so that a model left in training mode would be seen.
    for buffer in engine.module.buffers():
        buffer.fill_(2)
    plan = BatchPlan(len(data.train), BATCH_SIZE, 1, world.size, 0)
    task = Task(configuration(batch_size=BATCH_SIZE, best_by="auroc"))
    task.prepare(data, "fp32", world)
    run = loop_run(world, engine, plan, 32, task=task)
    loader = Loader(data.val, EvaluationPlan(len(data.val), BATCH_SIZE, world.size), world.rank)
    scores = evaluate(engine, loader, run)
    engine.module.eval()
    images = torch.stack([data.val[0, index][0] for index in range(len(data.val))])
    with torch.no_grad():
        logits = torch.cat([engine.forward(part) for part in images.split(60)])
    engine.close()
    return {
        "scores": [scores.loss, scores.top1, scores.top5, scores.samples],
        "areas": [*scores.areas],
        "confusion": scores.details.confusion(CLASSES).tolist(),
        "labels": data.val.source.labels.tolist(),
        "logits": logits.tolist(),
    }


EPOCH_SAMPLES = 37  # 2 ranks x 2 micro-steps x 8 images: a full step, and one of 5


def make_small_data(samples: int = EPOCH_SAMPLES, augmentation: str = "none", channels: int = 3, **options: Any):
    """37 grey images with labels, or another number, as a data set with an augmentation and these options of data."""
    from zerovision.training.data import DataOptions
    from zerovision.training.data.datasets import DatasetDefaults, make_dataset_pair
    from zerovision.training.data.reading.sources import ArraySource

    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(256, (samples, 1, 8, 8), generator=generator, dtype=torch.uint8)
    source = ArraySource(pixels, torch.arange(samples) % CLASSES, channels)
    defaults = DatasetDefaults(8, augmentation, centre_crop=False, mean=[0.5] * 3, std=[0.25] * 3)
    names = [f"class-{number}" for number in range(CLASSES)]
    return make_dataset_pair((source, source), names, defaults, DataOptions(**options), "fingerprint")


def loop_run(
    world: World,
    engine: Engine,
    plan: BatchPlan,
    image_size: int = 8,
    classes: int = CLASSES,
    averages: Any = None,
    settings: dict[str, Any] | None = None,
    groups: int = 1,
    **parts: Any,
) -> Run:
    """Return a run without logs and checkpoints, at a constant learning rate, with the observers of any training."""
    data = SimpleNamespace(
        preprocessing=SimpleNamespace(shape=(3, image_size, image_size)),
        class_names=[f"class-{number}" for number in range(classes)],
        train=SimpleNamespace(source=SimpleNamespace(name=str)),
    )
    fixed: dict[str, Any] = {"log_every_steps": 1, "epochs": 1, "label_smoothing": 0.0}
    run = Run(
        config=configuration(**(fixed | (settings or {}))),
        world=world,
        start=Start(groups=groups),
        folder=RunFolder(Path("nowhere"), "run"),
        data=cast(Any, data),
        plan=plan,
        model=RunModel(cast(Any, None), averages=averages or WeightAverages(engine, 0.0, 0, plan.steps_per_epoch)),
        state=TrainState(engine, ScoreSums(classes, world.device), Progress()),
        schedule=Schedule(0.01, total_steps=1, warmup_steps=0, final_scale=1.0),
        step=Accumulate(build_loss(configuration(label_smoothing=0.0), [], [], world.device)),
    )
    return observed(dataclasses.replace(run, **parts))


def observed(run: Run, guard: NonFiniteGuard | None = None, *more: Observer) -> Run:
    """Return a run with the observers of any training, and more."""
    observers = [*every_step(run, guard or guard_of(run, 0)), Heartbeats(run.start.heartbeat), *more]
    return dataclasses.replace(run, observers=Observers(observers, run.clock))


def epoch_with_our_loop(world: World, strategy: str, engine: str):
    """Train one epoch with a remainder; return the weights and the scores of the epoch."""
    from zerovision.training.data.loader import Loader

    config = configuration(strategy=strategy, engine=engine, gradient_accumulation_steps=2)
    engine = make_engine(world, make_model(False), config)
    plan = BatchPlan(EPOCH_SAMPLES, BATCH_SIZE, config.gradient_accumulation_steps, world.size, 0)
    schedule = Schedule(config.learning_rate, total_steps=1, warmup_steps=0, final_scale=1.0)
    run = loop_run(world, engine, plan, schedule=schedule)
    train_one_epoch(run, Loader(make_small_data().train, plan, world.rank).epoch(0))
    scores = run.state.sums.reduce(world)
    run.start.stop.close()
    weights = weights_of(engine)
    engine.close()
    return {"weights": weights, "loss": scores.loss, "top1": scores.top1, "n": scores.samples}


def accuracy_of_mixed_images(world: World):
    """Train an epoch of mixed images at a rate of 0; return its accuracy, and what it is by two kinds of labels."""
    from zerovision.training.data.loader import Loader

    module, data = make_model(False), make_small_data(mixup=1.0)
    for layer in module.modules():  # whose choice depends on the image
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 100
    engine = make_engine(world, copy.deepcopy(module), configuration())
    plan = BatchPlan(EPOCH_SAMPLES, BATCH_SIZE, 1, world.size, 0)
    schedule = Schedule(0.0, total_steps=1, warmup_steps=0, final_scale=1.0)
    run = loop_run(world, engine, plan, schedule=schedule)
    train_one_epoch(run, Loader(data.train, plan, world.rank).epoch(0))
    scores = run.state.sums.reduce(world)
    run.start.stop.close()
    engine.close()
    batches = [*Loader(data.train, plan, world.rank).epoch(0)]
    chosen = torch.cat([module(batch.images).argmax(1) for batch in batches])[:EPOCH_SAMPLES]
    labels = torch.from_numpy(plan.draw_keys(0)) % CLASSES
    mixed = torch.cat([batch.targets for batch in batches])[:EPOCH_SAMPLES]
    return {
        "top1": scores.top1,
        "by_own_labels": float((chosen == labels).double().mean()),
        "by_heaviest_targets": float((chosen == mixed.argmax(1)).double().mean()),
    }


def epoch_with_plain_pytorch(world: World, global_batch: int):
    """The oracle on one rank: the mean loss over each step's own samples, in the same order."""
    from zerovision.training.data.sampler import BatchPlan

    config, data, model = configuration(), make_small_data(), make_model(False)
    order = BatchPlan(EPOCH_SAMPLES, global_batch, 1, 1, 0).draw_keys(0)
    rule = torch.optim.AdamW(decayed_and_not(model, config.weight_decay), lr=config.learning_rate)
    loss_sum = hits = 0.0
    for start in range(0, EPOCH_SAMPLES, global_batch):
        samples = [data.train[0, int(index)] for index in order[start : start + global_batch]]
        images, labels = torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        rule.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        rule.step()
        loss_sum += float(loss) * len(samples)
        hits += int((logits.argmax(1) == labels).sum())
    weights = {name: tensor.double().tolist() for name, tensor in model.state_dict().items()}
    return {"weights": weights, "loss": loss_sum / EPOCH_SAMPLES, "top1": hits / EPOCH_SAMPLES, "n": EPOCH_SAMPLES}


def batchnorm_average_report(world: World):
    """Each leaf of two a rank sees other data; return the buffers of this rank's leaves before and after averaging."""
    module = make_model(True)
    buffers = ModelBuffers(module, Leaves(world.size, 2))
    for step, version in product(range(3), range(2)):
        buffers.select(version)
        module(make_batch(step, 2 * world.rank + version)[0])
    before = {name: leaves.double().tolist() for name, leaves in buffers.by_name().items()}
    buffers.average(world)
    return {"before": before, "after": {name: leaves.double().tolist() for name, leaves in buffers.by_name().items()}}
