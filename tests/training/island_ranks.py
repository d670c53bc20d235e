"""What the tests of islands run on each rank, and the oracle: all islands in one process, in plain PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.kit import Recorder
from tests.stored_tensors import in_memory
from tests.training.engine_ranks import (
    BATCH_SIZE,
    CLASSES,
    EPOCH_SAMPLES,
    HEAD,
    configuration,
    loop_run,
    make_batch,
    make_engine,
    make_model,
    make_small_data,
    whole_tensors,
)
from tests.training.no_shared_memory import without_shared_memory
from tests.training.out_of_memory_ranks import run  # noqa: F401 - with the buckets of engine_ranks, too
from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.store import TrainState
from zerovision.training.data.loader import Loader
from zerovision.training.data.reader import Batch
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.islands.engine import APPLIED_STEPS, OUTER_WEIGHTS, OuterSteps
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.loop import train_one_epoch
from zerovision.training.observe.observer import Seen, StepDone
from zerovision.training.recipe.optimizer import OPTIONS, build_optimizer
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.tasks.scores import ScoreSums, sample_losses
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

LEAVES, EPOCHS, LOCAL_STEPS = 4, 3, 4  # two steps an epoch: rounds of 4 and 2, one epoch ends in mid-round
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def island_configuration(world: World, islands: int, **changes: Any):
    """Return settings without clipping, whose norm is added up in an order that plain PyTorch does not have."""
    settings = {"gradient_clipping": 0.0, "engine": "torch", "local_steps": LOCAL_STEPS, "islands": islands}
    return configuration(**settings | {"gradient_accumulation_steps": LEAVES // world.size} | changes)


def unfused():
    """Let AdamW round the last elements of a tensor as the others: the fused one does so in whole vectors alone."""
    return mock.patch.dict(OPTIONS, {"adamw": {}})


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in sorted(tensors.items())
    }


def train(
    world: World,
    islands: int,
    precision: str = "fp32",
    over_collectives: bool = False,
    of_one_matrix: bool = False,
) -> dict[str, Any]:
    """Train in the run's own loop; return the digests of what each epoch exports, and of all islands' weights."""
    config = island_configuration(world, islands, outer_precision=precision)
    module = make_model(True)
    if of_one_matrix:  # muon deals whole matrices out to an island's ranks: one has it
        config = dataclasses.replace(config, optimizer="muon")
        module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, CLASSES, bias=False))
    with unfused(), without_shared_memory() if over_collectives else nullcontext():
        engine = make_engine(world, module, config, groups=islands)
    plan = BatchPlan(EPOCH_SAMPLES, BATCH_SIZE, LEAVES // world.size, world.size, 0, groups=islands)
    log = Recorder()
    outer = OuterSteps(engine, config, EPOCHS * plan.steps_per_epoch, Loggers([log]))
    settings = {"local_steps": LOCAL_STEPS, "islands": islands}
    whole = loop_run(world, engine, plan, averages=outer, settings=settings, groups=islands)
    state, polls = whole.state, []
    poll = whole.start.stop.poll
    whole.start.stop.poll = lambda *given, **named: polls.append(whole.position) or poll(*given, **named)
    loader = Loader(make_small_data().train, plan, world.rank)
    found: dict[str, Any] = {}
    for epoch in range(EPOCHS):
        state.progress = Progress(epoch=epoch)
        train_one_epoch(whole, loader.epoch(epoch))
        engine.buffers.average(world)
        found[f"islands after {epoch}"] = digests(whole_tensors(engine)["weights"])
        with outer.in_use():
            found[f"exported after {epoch}"] = digests(gather_weights(engine, world))
    whole.start.stop.close()
    own = [state[OUTER_WEIGHTS].reshape(-1) for state in engine.optimizer.state.values()]
    ours = torch.cat([torch.empty(0), *own])
    every = gather_rows(ours, engine.peers)
    rounds = [[values["step"], values["round"], values["local_steps"]] for _, values in log.events]
    engine.close()
    are_equal, sent = bool((every == every[0]).all()), [values["sent_bytes"] for _, values in log.events]
    facts = {"rounds": rounds, "are_equal": are_equal, "sent_bytes": sent, "updates": len(ours), "polls": polls}
    return facts | {"found": found}


def simulate(islands: int, precision: str = "fp32") -> dict[str, Any]:
    """Return what `train` finds, by PyTorch alone: a model and an AdamW per island, SGD for the outer step."""
    plan, config = BatchPlan(EPOCH_SAMPLES, BATCH_SIZE, LEAVES, 1, 0), configuration(gradient_clipping=0.0)
    outer = make_model(True).to(memory_format=torch.channels_last)
    models = [copy.deepcopy(outer) for _ in range(islands)]
    with unfused():
        rules = [build_optimizer(model, config, HEAD, discriminative=False) for model in models]
    rule = torch.optim.SGD(outer.parameters(), OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
    buffers = [{name: buffer.clone() for name, buffer in outer.named_buffers()} for _ in range(LEAVES)]
    residuals = [[torch.zeros_like(parameter) for parameter in model.parameters()] for model in models]
    found: dict[str, Any] = {}
    for epoch in range(EPOCHS):
        leaves = [*Loader(make_small_data().train, plan, 0).epoch(epoch)]
        for step in range(plan.steps_per_epoch):
            for model, inner, number in zip(models, rules, range(islands), strict=True):
                own = range(number * LEAVES // islands, (number + 1) * LEAVES // islands)
                take_step(model, inner, [leaves[step * LEAVES + leaf] for leaf in own], [buffers[leaf] for leaf in own])
            position = epoch * plan.steps_per_epoch + step + 1
            if position % LOCAL_STEPS == 0 or position == EPOCHS * plan.steps_per_epoch:
                take_outer_step(outer, models, rule, residuals, precision)
                average(buffers)
                for model in models:
                    model.load_state_dict(dict(outer.named_parameters()), strict=False)
        average(buffers)
        found[f"islands after {epoch}"] = digests(
            {
                f"island {number}/{name}" if number else name: parameter
                for number, model in enumerate(models)
                for name, parameter in model.named_parameters()
            }
        )
        found[f"exported after {epoch}"] = digests(dict(outer.named_parameters()) | buffers[0])
    return found


def take_outer_step(
    outer: nn.Module,
    models: list[nn.Module],
    rule: torch.optim.Optimizer,
    residuals: list[list[torch.Tensor]],
    precision: str,
) -> None:
    """Let SGD take the mean of the ways from the outer weights to the islands' models for a gradient."""
    for place, (parameter, *others) in enumerate(
        zip(outer.parameters(), *(m.parameters() for m in models), strict=True)
    ):
        ways = [parameter.detach() - other.detach() for other in others]
        if precision == "bf16":
            ways = [way + own[place] for way, own in zip(ways, residuals, strict=True)]
            for way, own in zip(ways, residuals, strict=True):
                own[place] = way - way.bfloat16().float()
            ways = [way.bfloat16().float() for way in ways]
        mean = sum(ways) / len(models)
        parameter.grad = mean.bfloat16().float() if precision == "bf16" else mean
    rule.step()


def take_step(
    model: nn.Module, rule: torch.optim.Optimizer, leaves: list[Batch], buffers: list[dict[str, torch.Tensor]]
) -> None:
    """Take a step on the mean loss over an island's leaves, of which each has buffers of its own."""
    samples = max(sum(int(leaf.weights.sum()) for leaf in leaves), 1)
    rule.zero_grad()
    for leaf, own in zip(leaves, buffers, strict=True):
        model.load_state_dict(own, strict=False)
        losses = nn.functional.cross_entropy(model(leaf.images), leaf.labels, reduction="none")
        ((losses * leaf.weights).sum() / samples).backward()
        own.update({name: buffer.clone() for name, buffer in model.named_buffers()})
    rule.step()


def average(buffers: list[dict[str, torch.Tensor]]) -> None:
    """Replace the statistics of all leaves by their mean."""
    for name in buffers[0]:
        if buffers[0][name].is_floating_point():
            mean = sum(own[name] for own in buffers) / len(buffers)
            for own in buffers:
                own[name] = mean.clone()


def change_islands(world: World, before: int, after: int) -> dict[str, Any]:
    """Give the state of some islands to engines of another number of them; return both, and the applied steps."""
    found: dict[str, Any] = {}
    for name, islands in (("before", before), ("after", after)):
        config = island_configuration(world, islands, outer_precision="bf16")
        engine = make_engine(world, make_model(True), config, groups=islands)
        OuterSteps(engine, config, 1, Loggers([]))
        if name == "before":
            torch.manual_seed(world.rank)
            for weights, state in engine.optimizer.state.items():
                for tensor in (weights.detach(), *state.values()):
                    tensor.uniform_()
            saved = whole_tensors(engine)
        else:
            buffers = engine.buffers.by_name() | {APPLIED_STEPS: torch.tensor([world.rank])}
            engine.load_state(in_memory(saved), buffers, 0)
            found["applied"] = engine.state().applied_steps
        found[name] = {kind: digests(tensors) for kind, tensors in whole_tensors(engine).items()}
        engine.close()
    return found


def skip_on_one(world: World) -> dict[str, Any]:
    """Train three steps, of which the second has a NaN on the last island."""
    config = island_configuration(world, world.size)
    engine = make_engine(world, make_model(True), config, groups=world.size)
    log = Recorder()
    state = TrainState(engine, ScoreSums(CLASSES, world.device), Progress())
    guard = NonFiniteGuard(state, world, Loggers([log]), 0, "photo-{}".format)
    before: dict[int, dict[str, str]] = {}
    for step in range(3):
        guard.before_step(step)
        for micro_step in range(LEAVES // world.size):
            images, labels = make_batch(step, world.rank * LEAVES + micro_step)
            if step == 1 and world.rank == world.size - 1:
                images[0] = torch.nan
            losses = sample_losses(engine.forward(images), labels)
            engine.backward(losses.mean())
            result = engine.step()
            batch = Batch(images, labels, torch.ones(BATCH_SIZE), torch.arange(BATCH_SIZE))
            guard.seen(Seen(batch, losses, losses, losses))
        guard.after_step(StepDone(step, result))
        before[step] = digests(dict(engine.module.named_parameters()) | dict(engine.module.named_buffers()))
    guard.settle()
    applied = engine.state().buffers[APPLIED_STEPS].tolist()
    engine.close()
    return {
        "counts": [state.progress.skipped_steps, state.progress.bad_steps_in_row],
        "messages": log.messages,
        "applied": applied,
        "changed": [before[step] != before[step - 1] for step in (1, 2)],
    }
