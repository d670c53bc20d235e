"""What tests/gpu/test_gpu.py runs inside a rank: our engine, and as its oracle a plain PyTorch loop on the CPU."""

from __future__ import annotations

import copy
import hashlib
from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.our_engine import make_engine
from benchmarks.peers.job import mean_cross_entropy
from tests.kit import new_model
from tests.training import engine_ranks
from zerovision.models import MODELS
from zerovision.training.base.timing import start_clock
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.datasets import DatasetDefaults, DatasetPair, make_dataset_pair
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading.sources import ArraySource
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.build import build_engine
from zerovision.training.engines.compilation import Recorded
from zerovision.training.engines.engine import Engine, EngineSetup
from zerovision.training.engines.ways import plan_of
from zerovision.training.loop import seed_dropout, train_one_epoch
from zerovision.training.tasks.scores import ScoreSums, sample_losses
from zerovision.training.world.world import World

CLASSES, IMAGE_SIZE, BATCH_SIZE, LEARNING_RATE = 5, 64, 8, 1e-3


def make_network(model_type: str) -> nn.Module:
    """The same weights every time, no dropout: its draws differ between devices."""
    torch.manual_seed(0)
    module = new_model(model_type, num_classes=CLASSES, image_size=IMAGE_SIZE).module
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase):
            part.dropout = 0.0
    return module


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return images, torch.arange(BATCH_SIZE) % CLASSES


def recorded_beside_eager(world: World, model_type: str, precision: str, accumulation: int) -> dict[str, Any]:
    """Train with dropout twice without CUDA graphs and once with them; return each training's digest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    digests, is_recorded = [], False
    for shape in (None, None, (3, IMAGE_SIZE, IMAGE_SIZE)):
        torch.manual_seed(0)
        module = new_model(model_type, num_classes=CLASSES, image_size=IMAGE_SIZE).module
        recipe = {"accumulation_steps": accumulation, "gradient_clipping": 1.0, "graphs_of": shape}
        built = make_engine(module, "ddp", precision, BATCH_SIZE, world, **recipe)
        digest, (images, labels) = hashlib.sha256(), (tensor.to(world.device) for tensor in make_batch())
        images = images.contiguous(memory_format=torch.channels_last)
        for step, leaf in product(range(3), range(accumulation)):
            seed_dropout(0, step, leaf, world.device)
            loss = mean_cross_entropy(built.forward(images + 0.1 * leaf), labels)
            built.backward(loss)
            built.step()
            digest.update(str(float(loss.detach())).encode())
        for tensor in (*built.module.state_dict().values(), *built.buffers.by_name().values()):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        digests.append(digest.hexdigest())
        is_recorded = isinstance(built._distribution._compute, Recorded)
        built.close()
    torch.use_deterministic_algorithms(False)
    return {"digests": digests, "is_recorded": is_recorded}


def one_that_waits(world: World) -> dict[str, Any]:
    """Train a network whose forward reads a number on the host, so that it cannot be recorded."""

    class Waits(nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) * (1 + 0 * images[0, 0, 0, 0].item())

    module = Waits(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    setup = EngineSetup(
        module.to(world.device),
        torch.optim.SGD(module.parameters(), lr=0.1),
        plan_of("ddp", 1),
        "bf16",
        world,
        BATCH_SIZE,
        static_graph=True,
        image_shape=(3, IMAGE_SIZE, IMAGE_SIZE),
    )
    built = build_engine(setup)
    losses = our_losses(built, 3, world)
    with torch.no_grad():
        built.forward(make_batch()[0].to(world.device))
    built.close()
    return {"losses": losses, "notes": setup.notes}


def our_engine(module: nn.Module, strategy: str, engine: str, precision: str, world: World) -> Engine:
    recipe = {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    return make_engine(module, strategy, precision, BATCH_SIZE, world, engine=engine, **recipe)


def our_losses(engine: Engine, steps: int, world: World) -> list[float]:
    images, labels = (tensor.to(world.device) for tensor in make_batch())
    images = images.contiguous(memory_format=torch.channels_last)
    losses = []
    for _ in range(steps):
        loss = mean_cross_entropy(engine.forward(images), labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def plain_losses(module: nn.Module, steps: int) -> list[float]:
    """A plain loop on the CPU in fp32."""
    images, labels = make_batch()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_beside_plain(world: World, model_type: str, strategy: str, engine: str, steps: int) -> dict[str, Any]:
    """Train in fp32 on the device and by a plain loop on the CPU."""
    built = our_engine(make_network(model_type), strategy, engine, "fp32", world)
    ours = our_losses(built, steps, world)
    built.close()
    return {"device": world.device.type, "ours": ours, "plain": plain_losses(make_network(model_type), steps)}


def fp32_errors(world: World) -> dict[str, float]:
    """Compute in fp32 on the device, and return the relative errors against float64 on the CPU."""
    torch.manual_seed(0)
    layers: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "matrix product": (nn.Linear(512, 512, bias=False), torch.randn(512, 512)),
        "convolution": (nn.Conv2d(64, 64, 3, bias=False), torch.randn(8, 64, 16, 16)),
        "LSTM": (_Outputs(64, 64, batch_first=True), torch.randn(8, 16, 64)),
    }
    errors = {}
    for name, (layer, values) in layers.items():
        exact = copy.deepcopy(layer).double()(values.double()).detach()
        ours = layer.to(world.device)(values.to(world.device)).detach().cpu().double()
        errors[name] = float(torch.linalg.vector_norm(ours - exact) / torch.linalg.vector_norm(exact))
    return errors


class _Outputs(nn.LSTM):
    """An LSTM that returns its outputs alone."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values)[0]


def one_bf16_step(world: World, model_type: str, strategy: str, engine: str) -> dict[str, Any]:
    """Take one step in bf16, and compare its loss with that of the same weights on the CPU in fp32."""
    built = our_engine(make_network(model_type), strategy, engine, "bf16", world)
    before = engine_ranks.whole_tensors(built)["weights"]
    (loss,) = our_losses(built, 1, world)
    after = engine_ranks.whole_tensors(built)["weights"]
    built.close()
    trained = [name for name, _ in make_network(model_type).named_parameters()]
    return {
        "device": world.device.type,
        "loss": loss,
        "plain": plain_losses(make_network(model_type), 1)[0],
        "unchanged": [name for name in trained if torch.equal(before[name], after[name])],
        "not_finite": [name for name, value in after.items() if not value.isfinite().all()],
    }


def blank_images(count: int) -> DatasetPair:
    pixels = torch.zeros(count, 3, 64, 64, dtype=torch.uint8)
    source = ArraySource(pixels, torch.arange(count) % CLASSES)
    defaults = DatasetDefaults(64, "none", centre_crop=False, mean=[0.5] * 3, std=[0.25] * 3)
    return make_dataset_pair((source, source), list("abcde"), defaults, DataOptions(), "fingerprint")


def reserved_by_epochs(world: World, epochs: int) -> list[int]:
    """Load so many epochs of 8 batches of 64; return the bytes that the allocator has reserved after each."""
    loader, reserved = Loader(blank_images(512).train, BatchPlan(512, 64, 1, 1, 0), 0, device=world.device), []
    for epoch in range(epochs):
        for _ in loader.epoch(epoch):
            pass
        if world.device.type == "cuda":
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    return reserved


def peak_of_an_epoch(world: World, accumulation: int) -> int:
    """Train one epoch of 64 x 64 images in micro-batches of 64; return the bytes it took beyond what was there."""
    data = blank_images(64 * accumulation)
    plan = BatchPlan(64 * accumulation, 64, accumulation, 1, 0)
    config = engine_ranks.configuration(gradient_accumulation_steps=accumulation, engine="torch")
    engine = engine_ranks.make_engine(world, engine_ranks.make_model(False).to(world.device), config, "bf16")
    run = engine_ranks.loop_run(world, engine, plan, 64, clock=start_clock(world.device))
    batches = Loader(data.train, plan, 0, device=world.device).epoch(0)
    on_gpu = world.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    train_one_epoch(run, batches)
    run.start.stop.close()
    engine.close()
    return torch.cuda.max_memory_allocated() - before if on_gpu else 0


def steps_without_waits(world: World, workers: int) -> int:
    """Train on digits from our loader; after two steps of warming up, whatever waits for the GPU is an error."""
    data = load_data(DataOptions(data="digits", augmentation="shift_flip"))
    module = new_model("basic_cnn", num_classes=10, image_size=data.preprocessing.image_size).module
    engine = make_engine(module, "ddp", "bf16", 16, world, engine="torch")
    sums = ScoreSums(10, world.device)
    loader = Loader(data.train, BatchPlan(len(data.train), 16, 1, 1, 0), 0, workers=workers, device=world.device)
    done = 0
    try:
        for batch in loader.epoch(0):
            logits = engine.forward(batch.images)
            losses = sample_losses(logits, batch.labels)
            engine.backward((losses * batch.weights).mean())
            engine.step()
            sums.add(losses, logits, batch.labels, batch.weights)
            done += 1
            if done == 2 and world.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            if done == 8:
                break
    finally:
        if world.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        loader.close()
        engine.close()
    return done


TRAINABLE_MODELS = tuple(name for name, spec in MODELS.items() if not spec.always_pretrained)
