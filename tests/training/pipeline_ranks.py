"""What the tests of pipelines run on each rank: a network in stages, and the same network whole."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.training.engine_ranks import CLASSES, configuration, whole_tensors
from zerovision.models.basic_cnn import BasicCNN
from zerovision.models.cnn_lstm import CNNLSTM
from zerovision.models.ensemble import Ensemble
from zerovision.training.base.errors import UserError
from zerovision.training.base.timing import SpanClock, measured_communication
from zerovision.training.data.reader import Batch
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.build import build_engine
from zerovision.training.engines.engine import Engine, EngineSetup, StepInput, TimedEngine
from zerovision.training.engines.pipeline.engine import train_in_stages
from zerovision.training.engines.settings import TORCH, ways_of
from zerovision.training.engines.ways import plan_of
from zerovision.training.loop import Accumulate, seed_dropout
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.teacher.network import distilled
from zerovision.training.world.collectives import barrier, gather_objects
from zerovision.training.world.world import World, form_mesh

SIZE = 16  # pixels
LARGER = {"lstm": 32}
MEMBERS = ("cnn", "vit", "resnet")  # of the ensemble


class Residual(nn.Module):
    """Blocks with a path around them, which allow no cut inside, and a parameter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)) for _ in "ab")
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images) * self.scale
        for block in self.blocks:
            features = features + block(features)
        return self.head(features.mean((2, 3)))


class Sleep(torch.autograd.Function):
    """Identity that takes some time in forward, and twice that in backward."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradient, None


class SleepingBlock(nn.Conv2d):
    """A convolution that takes as long, whatever else the machine does; inside, where other stages skip it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(3, 3, 1)
        self.seconds = seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(super().forward(images), self.seconds)


class Sleeper(nn.Module):
    """Four sleeping blocks and a head."""

    def __init__(self, block_s: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SleepingBlock(block_s) for _ in range(4)))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images).mean((2, 3)))


class Branches(nn.Module):
    """Two paths from the images to the logits, with no place where one tensor is all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(3 * SIZE * SIZE, CLASSES) for _ in "ab")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.left(images.flatten(1)) + self.right(images.flatten(1))


def make_network(name: str) -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = partial(VisionTransformer, SIZE, 4, num_classes=CLASSES, embed_dim=32, depth=4, num_heads=2)
    networks = {
        "cnn": lambda: BasicCNN(CLASSES, 3),
        "lstm": lambda: CNNLSTM(CLASSES, 3),
        "vit": lambda: vit(drop_path_rate=0.2, proj_drop_rate=0.1),
        "resnet": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, drop_path_rate=0.2),
        "residual": Residual,
        "branches": Branches,
        "ensemble": lambda: Ensemble([networks[member]() for member in MEMBERS]),
    }
    return networks[name]()


def make_engine(
    world: World, module: nn.Module, leaves: int, size: int, *, pipeline: int, schedule: str, split: str, **changes: Any
) -> Engine:
    accumulation = leaves // world.data.size
    cut = {"pipeline_parallel": pipeline, "pipeline_schedule": schedule, "pipeline_split": split}
    cut["ensemble_members"] = ",".join(MEMBERS)
    config = configuration(gradient_accumulation_steps=accumulation, **cut, **changes)
    heads = {"head.weight", "head.bias", "fc.weight", "fc.bias"}
    setup = EngineSetup(
        module,
        build_optimizer(module, config, heads, discriminative=False),
        plan_of("ddp", world.data.size),
        "fp32" if config.precision == "auto" else config.precision,
        world,
        8,
        accumulation,
        config.gradient_clipping,
        image_shape=(3, size, size),
    )
    engine = build_engine(setup, ways_of(config, TORCH))
    if pipeline > 1 and isinstance(module, Ensemble):
        named = ", ".join(setup.events["pipeline"]["members"])
        assert sorted(named.split(", ")) == sorted(MEMBERS)
        assert all(name in setup.notes[-1] for name in MEMBERS)
    return engine


def make_batches(step: int, first: int, count: int, size: int) -> list[Batch]:
    batches = []
    for leaf in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + leaf)
        images = torch.randn(8, 3, size, size, generator=generator).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (8,), generator=generator)
        batches.append(Batch(images, labels, torch.ones(8), torch.arange(8)))
    return batches


def train(
    world: World,
    network: str,
    leaves: int,
    pipeline: int = 1,
    schedule: str = "1f1b",
    split: str = "auto",
    recomputes: bool = False,
    frozen: Sequence[str] = (),
    has_teacher: bool = False,
    **changes: Any,
) -> dict[str, str]:
    """Train three steps and evaluate three batches; return a sha256 of all that came out, by name, on all ranks."""
    world, module = form_mesh(world, {"pipeline_parallel": pipeline}), make_network(network)
    size = LARGER.get(network, SIZE)
    if recomputes:
        enable_activation_checkpointing(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(tuple(frozen))))
    engine = make_engine(world, module, leaves, size, pipeline=pipeline, schedule=schedule, split=split, **changes)
    taught = configuration(label_smoothing=0.1)
    answers = torch.randn(3 * size * size, CLASSES, generator=torch.Generator().manual_seed(5))
    around = partial(distilled, lambda batch: batch.images.flatten(1) @ answers, 2.0, 0.5) if has_teacher else None
    loss = build_loss(taught, [], [], world.device, around=around)
    step = partial(train_in_stages, loss) if pipeline > 1 and network != "ensemble" else Accumulate(loss)
    own, seen, norms = leaves // world.data.size, list[torch.Tensor](), list[str]()
    module.train()
    for number in range(3):
        batches = make_batches(number, world.data.rank * own, own, size)

        def seed(leaf: int, number: int = number) -> None:
            seed_dropout(0, number, world.data.rank * own + leaf, world.device)

        def note(_batch: Batch, losses: torch.Tensor, logits: torch.Tensor) -> None:
            seen.append(torch.cat([losses.detach()[:, None], logits.detach().flatten(1)], dim=1))

        result = step(TimedEngine(engine, SpanClock()), StepInput(batches, seed, 1.0, note))
        norms.append(float(result.gradient_norm).hex())
    found: dict[str, str] = {}
    for kind, tensors in whole_tensors(engine).items():
        found |= {f"{kind} {name}": digest(tensor) for name, tensor in tensors.items()}
    for name, buffer in engine.buffers.by_name().items():
        for leaf, values in enumerate(buffer, world.data.rank * own):
            found[f"buffer {name} {leaf}"] = digest(values)
    for number, rows in enumerate(seen):
        found[f"outputs {number // own} {world.data.rank * own + number % own}"] = digest(rows)
    engine.buffers.average(world.data)
    engine.module.eval()
    with torch.no_grad():
        for number, (_, logits) in enumerate(engine.outputs(make_batches(7, 0, 3, size))):
            found[f"evaluation {number}"] = digest(logits)
    found["norms"] = " ".join(norms)
    everywhere = gather_objects([*map(list, found.items())], world)
    engine.close()
    merged: dict[str, str] = {}
    for rank in everywhere:
        for name, value in rank:
            assert merged.setdefault(name, value) == value, f"{name} differs between ranks"
    return merged


def wait_share(world: World, micro_batches: int, schedule: str, split: str, block_s: float) -> float:
    """Return the share of a step in which a rank waits for others: the mean of all ranks, the least of three steps."""
    torch.manual_seed(0)
    world, module = form_mesh(world, {"pipeline_parallel": world.size}), Sleeper(block_s).train()
    engine = make_engine(world, module, micro_batches, SIZE, pipeline=world.size, schedule=schedule, split=split)
    step = partial(train_in_stages, build_loss(configuration(), [], [], world.device))
    shares = []
    for number in range(4):
        batches = make_batches(number, 0, micro_batches, SIZE)
        barrier(world)
        clock = SpanClock()
        with measured_communication(clock):
            step(TimedEngine(engine, clock), StepInput(batches, lambda _: None, 1.0, lambda *_: None))
        with clock.communication:
            barrier(world)
        seconds = clock.seconds()
        shares.append(seconds["communication"] / sum(seconds.values()))
    engine.close()
    # The first step is longer: PyTorch tries the stages for the shapes of what they send.
    return min(statistics.mean(gather_objects(share, world)) for share in shares[1:])


def features_sent(world: World, schedule: str) -> list[list[str]]:
    """Evaluate four batches as on GPUs, where features have a group of their own; return every rank's messages in it.

    "back" is a message of features from the last rank to the first.
    """
    world = form_mesh(world, {"pipeline_parallel": world.size})
    features, messages = dist.new_group(backend="gloo"), list[str]()
    stages = dataclasses.replace(world.dimension("pipeline_parallel"), group=features)
    world.mesh["pipeline_parallel"] = stages
    engine = make_engine(world, make_network("vit"), 2, SIZE, pipeline=world.size, schedule=schedule, split="auto")

    def noted(name: str) -> Any:
        action = getattr(dist, name)

        def run(*tensors: torch.Tensor, group: Any, tag: int = 0, **options: Any) -> Any:
            messages.extend([name] if group is features else ["back"] if tag else [])
            return action(*tensors, group=group, tag=tag, **options)

        return mock.patch.object(dist, name, run)

    engine.module.eval()
    with torch.no_grad(), noted("isend"), noted("irecv"), noted("recv"):
        assert len([*engine.outputs(make_batches(7, 0, 4, SIZE))]) == 4
    engine.close()
    return gather_objects(messages, world)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def refusal(world: World, network: str, **settings: Any) -> str:
    """Return what a network, or a split, is refused with."""
    try:
        train(world, network, **settings)
    except UserError as error:
        return str(error)
    return ""
