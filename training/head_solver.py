"""`--solver lbfgs`: the head that is the optimum over cached features, in the place of steps towards it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from training.base.errors import AgreedError
from training.engines.parameter_shards import WEIGHTS, fill_shards
from training.world.collectives import copy_from_main

if TYPE_CHECKING:
    from training.setup import Run

MOST_ITERATIONS, HISTORY = 5000, 100
SMALLEST_GRADIENT, SMALLEST_CHANGE = 1e-9, 1e-12  # of L-BFGS, which ends there
LARGEST_GRADIENT = 1e-5  # of what is called the optimum


def solve_head(context: Run, head: nn.Module, features: torch.Tensor, weights: torch.Tensor) -> None:
    """Put the optimum into the head, of which an evaluation is all that is left to do; a collective.

    It minimizes the mean cross-entropy plus weight_decay / 2 times the sum of the squared weights, biases not counted:
    scikit-learn's `LogisticRegression` with C = 1 / (weight_decay x images). That is convex, and has one minimum. It is
    computed in float64 on rank 0: the features are the same on every rank, and so the result on any number of them.

    Args:
        context: the run.
        head: a linear layer.
        features: what it reads of each training image, [N, D].
        weights: of the images' losses, float32 [N].

    Raises:
        UserError: on all ranks, if the head is no linear layer.
    """
    if not isinstance(head, nn.Linear):
        raise AgreedError(f"--solver lbfgs: the head is a {type(head).__name__}, no linear layer: leave it out.")
    config, world, state = context.config, context.world, context.state
    if state.progress.epoch == config.epochs:
        return
    labels = context.data.train.source.labels
    names = sorted(context.built.head_parameter_names, reverse=True)  # the weight comes first
    shapes = [(head.out_features, head.in_features), (head.out_features,)][: len(names)]
    solved = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if world.is_main:
        inputs = features.detach().cpu().double()
        # Without their mean, which the bias takes on, features need a tenth of the iterations.
        mean = inputs.mean(0) * (len(solved) > 1)
        decay, smoothing = config.weight_decay, config.label_smoothing
        loss, gradient = _minimize(solved, inputs - mean, labels, weights.double(), decay, smoothing)
        if len(solved) > 1:
            solved[1] = solved[1] - solved[0] @ mean
        context.loggers.message(f"solver       lbfgs: the head's optimum over {len(inputs)} images, loss {loss:.6f}")
        if not gradient <= LARGEST_GRADIENT:
            context.loggers.message(
                f"note: a gradient of {gradient:.0e} is left: --weight-decay above {decay:g} has an optimum that is "
                "nearer"
            )
    found = [tensor.detach().float().to(world.device) for tensor in solved]
    copy_from_main(found, world)
    whole = dict(zip(names, found, strict=True))

    def write(*_: object) -> None:
        fill_shards([part for part in state.engine.state().shards if part.name in whole], {WEIGHTS: whole})

    with torch.no_grad():
        state.engine.change_weights(write)
    last = {"epoch": config.epochs - 1, "step": context.plan.steps_per_epoch}
    state.progress = dataclasses.replace(state.progress, **last)


def _minimize(
    solved: list[torch.Tensor],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    decay: float,
    smoothing: float,
) -> tuple[float, float]:
    """Minimize in place, in float64; return the minimum and the largest gradient that is left."""
    optimizer = torch.optim.LBFGS(
        solved,
        max_iter=MOST_ITERATIONS,
        max_eval=2 * MOST_ITERATIONS,
        tolerance_grad=SMALLEST_GRADIENT,
        tolerance_change=SMALLEST_CHANGE,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(F.linear(inputs, *solved), labels, label_smoothing=smoothing, reduction="none")
        loss = (losses * weights).sum() / weights.sum() + decay / 2 * solved[0].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
        loss = closure().detach()
    return float(loss), max(float(tensor.grad.abs().max()) for tensor in solved if tensor.grad is not None)
