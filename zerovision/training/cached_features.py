"""`--features cached`: the frozen backbone computes the head's input for each image once.

Without augmentation, an image is the same in every epoch, and so are the features that a frozen network computes from
it. Each image goes through the network once, in evaluation batches; later batches contain features instead of images.
The evaluation batches have the training batch size, because the last bits of a kernel's sums may depend on that size.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from zerovision.training.base.errors import AgreedError
from zerovision.training.base.units import format_duration
from zerovision.training.data.loader import Batch, SampleRows
from zerovision.training.engines.parameter_shards import WEIGHTS, fill_shards
from zerovision.training.loop import forward_all, seed_dropout
from zerovision.training.steps.carrier import Run
from zerovision.training.world.collectives import copy_from_main, largest_over_ranks

# Relative to the largest number: a wrong dropout rate exceeds this limit, different rounding does not.
MOST_DIFFERENCE = 0.01
MOST_ITERATIONS, HISTORY = 5000, 100
SMALLEST_GRADIENT, SMALLEST_CHANGE = 1e-9, 1e-12  # below these values, L-BFGS stops
LARGEST_GRADIENT = 1e-5  # if the gradient stays above this value, the log says that the optimum was not reached exactly


def cache_features(run: Run) -> int:
    """Make the loaders yield features instead of images, and make the model accept both; a collective.

    Return the number of the signal that stopped the computation, or 0; raise a UserError on all ranks if the model does
    not allow this, or if an image on any rank cannot be read.
    """
    config, engine, world, begin = run.config, run.state.engine, run.world.data, time.perf_counter()
    heads = {name.rpartition(".")[0] for name in run.model.built.head_parameter_names}
    if len(heads) != 1:
        raise AgreedError("--features cached: this model has several heads: leave it out.")
    head = engine.module.get_submodule(*heads)
    read: list[torch.Tensor] = []
    loaders = (run.readers.train, run.readers.val)
    sets = [SampleRows(loader, world) for loader in loaders]
    images = sum(len(loader.dataset) for loader in loaders)
    run.loggers.message(f"features     {images} images go through the network once, before the first epoch")
    with head.register_forward_pre_hook(lambda _head, inputs: read.append(inputs[0])):
        engine.module.eval()
        for loader, features in zip(loaders, sets, strict=True):
            with run.clock.evaluation, torch.no_grad():
                once, add = loader.each_once(), partial(_add, features, read)
                stop_signal = forward_all(run, engine.outputs, once, add)
            if stop_signal:
                return stop_signal
        run.model.freezer.start_epoch(only_head=False)
        difference = _take_either(run, head, sets[0], read)
    for loader, features in zip(loaders, sets, strict=True):
        loader.read_from(features.batch)
    if config.solver == "lbfgs":
        own = run.data.train.source.loss_weights
        weights = sets[0].weights if own is None else sets[0].weights * own
        solve_head(run, head, sets[0].values, weights)
    width, seconds = sets[0].values.shape[1], time.perf_counter() - begin
    run.loggers.message(
        f"features     {images} images went through the network once, in "
        f"{format_duration(seconds)}: the head trains on {width} features per image"
    )
    if difference:
        run.loggers.message(
            f"note: here the last bits of a feature depend on its place in the batch (by {difference:.0e}): "
            "--features computed may change the last bits of the weights"
        )
    return 0


def _add(features: SampleRows, read: list[torch.Tensor], batch: Batch, _logits: torch.Tensor) -> None:
    """Store the head's input for a batch; a collective."""
    own = read.pop()
    if own.ndim != 2:
        shape = " x ".join(map(str, own.shape[1:]))
        raise AgreedError(f"--features cached: this head reads {shape} numbers, not a vector: leave it out.")
    features.add(batch, own)


@torch.no_grad()
def _take_either(run: Run, head: nn.Module, features: SampleRows, read: list[torch.Tensor]) -> float:
    """Make the model also accept features [B, D], to which training applies the dropout before the head; a collective.

    The dropout rate is chosen so that features and images yield the same result from the same random numbers. Return
    the difference that remains between the two results, relative to the largest number.
    """
    engine, device = run.state.engine, run.world.device
    module, rate = engine.module, 0.0
    compute = module.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return compute(inputs) if inputs.ndim > 2 else head(F.dropout(inputs, rate, module.training))

    def results(inputs: torch.Tensor) -> list[torch.Tensor]:
        seed_dropout(run.config.seed, 0, 0, device)
        logits = engine.forward(inputs)
        drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return [read.pop().double(), logits.double(), drawn.double()]

    module.forward = forward
    images, cached = (part.flip(0) for part in features.first)  # at different places in the batch
    wanted = results(images)
    own = {child.p for child in module.modules() if isinstance(child, nn.Dropout)}
    rates = sorted(own | {0.0, float(getattr(module, "drop_rate", 0.0))})
    differences = []
    for rate in rates:  # noqa: B007  # `forward` reads it
        pairs = zip(results(cached), wanted, strict=True)
        differences.append(max((one - two).abs().max() / two.abs().max().clamp(min=1e-30) for one, two in pairs))
    largest = largest_over_ranks(torch.stack(differences).to(device), run.world.data)
    rate = rates[int(largest.argmin())]
    if not largest.min() <= MOST_DIFFERENCE:
        raise AgreedError(
            "--features cached: this model computes something after its head, or differs before it between training "
            "and evaluation: use --drop-path 0, and --dropout 0 if it is not just before the head, or leave it out."
        )
    return float(largest.min())


def solve_head(run: Run, head: nn.Module, features: torch.Tensor, weights: torch.Tensor) -> None:
    """Set a linear head to its optimum, so that the run only has to evaluate it; a collective.

    The optimum minimizes the mean cross-entropy over the features [N, D], weighted by `weights` float32 [N], plus
    weight_decay / 2 times the sum of the squared weights of the head (excluding biases), as in scikit-learn's
    `LogisticRegression` with C = 1 / (weight_decay x images). The problem is convex and has one minimum, which rank 0
    computes in float64. Every rank has the same features, so the result does not depend on the number of ranks.
    """
    if not isinstance(head, nn.Linear):
        raise AgreedError(f"--features cached:lbfgs: the head is a {type(head).__name__}, not linear: leave lbfgs out.")
    config, world, state = run.config, run.world, run.state
    if state.progress.epoch == config.epochs:
        return
    labels = run.data.train.source.labels
    names = sorted(run.model.built.head_parameter_names, reverse=True)  # the weight comes first
    shapes = [(head.out_features, head.in_features), (head.out_features,)][: len(names)]
    solved = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if world.is_main:
        inputs = features.detach().cpu().double()
        # Subtracting the features' mean, which the bias absorbs, reduces the number of iterations to a tenth.
        mean = inputs.mean(0) * (len(solved) > 1)
        decay, smoothing = config.weight_decay, config.label_smoothing
        loss, gradient = _minimize(solved, inputs - mean, labels, weights.double(), decay, smoothing)
        if len(solved) > 1:
            solved[1] = solved[1] - solved[0] @ mean
        run.loggers.message(f"solver       lbfgs: the head's optimum over {len(inputs)} images, loss {loss:.6f}")
        if not gradient <= LARGEST_GRADIENT:
            run.loggers.message(
                f"note: a gradient of {gradient:.0e} remains: a --weight-decay above {decay:g} has an optimum that is "
                "easier to reach"
            )
    found = [tensor.detach().float().to(world.device) for tensor in solved]
    copy_from_main(found, world)
    whole = dict(zip(names, found, strict=True))

    def write(*_: object) -> None:
        parts = [part for part in state.engine.state().shards if part.name in whole]
        fill_shards(parts, {WEIGHTS: lambda name, box: whole[name][box]})

    with torch.no_grad():
        state.engine.change_weights(write)
    state.progress = dataclasses.replace(state.progress, epoch=config.epochs - 1, step=run.plan.steps_per_epoch)


def _minimize(
    solved: list[torch.Tensor],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    decay: float,
    smoothing: float,
) -> tuple[float, float]:
    """Minimize the loss over `solved` in place, in float64; return the minimum and the largest remaining gradient."""
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
