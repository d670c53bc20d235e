"""What the tests of tensor parallelism run on each rank, and plain PyTorch on one process as their oracle."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from timm.models.vgg import VGG
from torch import nn

from tests.training.engine_ranks import configuration, whole_tensors
from tests.training.out_of_memory_ranks import run
from zerovision.models import tensor_plan
from zerovision.models.build import BuiltModel
from zerovision.models.timm_models import WholeInputConv2d
from zerovision.models.weights_metadata import Description
from zerovision.training.base.timing import SpanClock
from zerovision.training.data.reader import Batch
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.build import build_engine, set_up_engine
from zerovision.training.engines.engine import Engine, StepInput, TimedEngine
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.engines.pipeline.engine import train_in_stages
from zerovision.training.loop import Accumulate, seed_dropout
from zerovision.training.tasks.scores import sample_losses
from zerovision.training.world.collectives import sum_over_ranks
from zerovision.training.world.world import World, form_mesh

CLASSES, LEAVES, BATCH_SIZE, STEPS, RATE, CLIPPING = 10, 2, 4, 3, 0.05, 1.0
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "drop_path_rate": 0.2}  # 3 heads: one rank has 2 of them
# Small networks of every family, and the side of their images.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (partial(timm.create_model, "vit_tiny_patch16_224", **SMALL, img_size=32, proj_drop_rate=0.1), 32),
    "packed swiglu": (partial(timm.create_model, "vit_giant_patch14_reg4_dinov2", **SMALL, img_size=28), 28),
    "deit distilled": (partial(timm.create_model, "deit_tiny_distilled_patch16_224", **SMALL, img_size=32), 32),
    "eva": (partial(timm.create_model, "eva_giant_patch14_224", **SMALL, img_size=28), 28),
    "eva02": (partial(timm.create_model, "eva02_tiny_patch14_224", **SMALL, img_size=28), 28),
    "convnext": (partial(timm.create_model, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), 32),
    "mixer": (partial(MlpMixer, img_size=32, num_blocks=2, embed_dim=32), 32),
    # As zerovision.models.timm_models makes it, with few channels.
    "vgg": (partial(VGG, [8, "M", 8], mlp_ratio=1 / 64, conv_layer=WholeInputConv2d, drop_rate=0.5), 32),
    "vit_tiny": (partial(timm.create_model, "vit_tiny_patch16_224", img_size=32), 32),
    "vit_small": (partial(timm.create_model, "vit_small_patch16_224", img_size=32, depth=4), 32),
}


def make_network(name: str) -> tuple[nn.Module, int]:
    """Return a network, always with the same weights, and the side of its images."""
    torch.manual_seed(0)
    create, pixels = NETWORKS[name]
    return create(num_classes=CLASSES), pixels


def make_leaf(step: int, leaf: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    images = torch.randn(BATCH_SIZE, 3, pixels, pixels, generator=generator)
    return images.contiguous(memory_format=torch.channels_last), (torch.arange(BATCH_SIZE) + leaf) % CLASSES


@functools.cache
def plain_steps(name: str) -> dict[str, Any]:
    """Train with PyTorch's SGD on one process: losses, norms, weights, and logits after it."""
    network, pixels = make_network(name)
    optimizer, losses, norms = torch.optim.SGD(network.parameters(), RATE), [], []
    for step in range(STEPS):
        for leaf in range(LEAVES):
            images, labels = make_leaf(step, leaf, pixels)
            seed_dropout(0, step, leaf, images.device)
            loss = sample_losses(network(images), labels).mean()
            (loss / LEAVES).backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), CLIPPING).item())
        optimizer.step()
        optimizer.zero_grad()
    images, _ = make_leaf(99, 0, pixels)
    with torch.no_grad():
        logits = network.eval()(images)
    return {"losses": losses, "norms": norms, "logits": logits.tolist(), "weights": network.state_dict()}


def divided_steps(
    world: World,
    name: str,
    tensor: int,
    strategy: str,
    optimizer: str = "sgd",
    precision: str = "fp32",
    recomputes: bool = False,
    wide_head: int = 0,
    pipeline: int = 1,
    split: str = "auto",
    spoils: bool = False,
) -> dict[str, Any]:
    """Train on a mesh: what `plain_steps` returns, what this rank has of the state, and the sha256 of all of it.

    If it `spoils` a gradient of the last rank afterwards: whether all of the state is left as it was then.
    Rank 0 adds what it expects, and how far its weights are from that.
    """
    world = form_mesh(world, {"pipeline_parallel": pipeline, "tensor_parallel": tensor})
    network, pixels = make_network(name)
    if recomputes:
        enable_activation_checkpointing(network)
    accumulation = LEAVES // world.data.size
    config = configuration(
        strategy=strategy,
        optimizer=optimizer,
        learning_rate=RATE,
        momentum=0.0,
        weight_decay=0.0,
        gradient_clipping=CLIPPING,
        gradient_accumulation_steps=accumulation,
        batch_size=BATCH_SIZE,
        pipeline_parallel=pipeline,
        tensor_parallel=tensor,
        pipeline_split=split,
    )
    with mock.patch.object(tensor_plan, "WIDE_HEAD", wide_head or tensor_plan.WIDE_HEAD):
        built = BuiltModel(network, Description("basic_cnn", None, 2, 8))
        setup, ways = set_up_engine(config, built, precision, world, compiles=False)
    engine = build_engine(dataclasses.replace(setup, image_shape=(3, pixels, pixels)), ways)

    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return sample_losses(logits, batch.labels)

    step_of = Accumulate(loss) if pipeline == 1 else partial(train_in_stages, loss)
    own_leaves = setup.leaves.of(world.data.rank)
    losses, norms = torch.zeros(STEPS * LEAVES), []
    for step in range(STEPS):
        leaves = [make_leaf(step, leaf, pixels) for leaf in own_leaves]
        batches = [Batch(*leaf, torch.ones(BATCH_SIZE), torch.arange(BATCH_SIZE)) for leaf in leaves]
        found: list[torch.Tensor] = []
        result = step_of(
            TimedEngine(engine, SpanClock()),
            StepInput(
                batches,
                lambda leaf, step=step: seed_dropout(0, step, own_leaves[leaf], world.device),
                1 / BATCH_SIZE,
                lambda _batch, losses, _logits, found=found: found.append(losses.detach().mean()),
            ),
        )
        losses[[step * LEAVES + leaf for leaf in own_leaves]] = torch.stack(found)
        norms.append(float(result.gradient_norm))
    engine.module.eval()
    with torch.no_grad():
        logits = engine.forward(make_leaf(99, 0, pixels)[0])
    own = [parameter for parameter in engine.module.parameters() if not parameter.is_meta]
    moments = [state for states in engine.optimizer.state.values() for state in states.values() if state.ndim]
    report = {
        "losses": sum_over_ranks(losses, world.data).tolist(),
        "norms": norms,
        "logits": logits.float().tolist(),
        "elements": sum(parameter.numel() for parameter in own),
        "moments": sum(moment.numel() for moment in moments),
        "sha256": digest_of(engine),
    }
    if spoils:
        engine.module.train()
        if world.rank == world.size - 1:
            hidden = engine.module.get_submodule("blocks.0.mlp.act")  # whose features the ranks have a part of each
            hidden.register_forward_hook(lambda *given: spoil_gradient(given[-1]))
        for _ in range(accumulation):
            engine.backward(engine.forward(make_leaf(0, 0, pixels)[0]).mean())
            result = engine.step()
        report["is_left"] = not result.applied and digest_of(engine) == report["sha256"]
    weights = gather_weights(engine, world)
    engine.close()
    if world.is_main:
        expected = plain_steps(name)
        assert weights.keys() == expected["weights"].keys()
        differences = [(weights[key] - values).abs().max().item() for key, values in expected["weights"].items()]
        report |= {"difference": max(differences), "expected": {**expected, "weights": None}}
    return report


def digest_of(engine: Engine) -> str:
    """Return the sha256 of weights and moments; a collective."""
    digest = hashlib.sha256()
    for tensors in whole_tensors(engine).values():
        for _, values in sorted(tensors.items()):
            digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def spoil_gradient(features: torch.Tensor) -> None:
    features.register_hook(lambda gradient: gradient * torch.nan)


def whole_run(world: World, **case: Any) -> dict[str, Any]:
    """Train a run; here, so that its buckets are as small as those of the jobs that these ranks may have had before."""
    return run(world, **case)
