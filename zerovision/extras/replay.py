"""Repeats one step of a run in this process, starting from the last checkpoint before it, and records its details.

The micro-batches of all ranks are accumulated in one process, which produces the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerovision.delivery.evaluation_files import BLACK, LONGEST_NAME, WRONG, contact_sheet, thumbnail
from zerovision.delivery.trained_model import find_run, read_json, read_run_config
from zerovision.extras.bisect_runs import compare_step, read_hashes
from zerovision.extras.settings import ReplaySettings
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.files import errors_of_writing, replacing_folder, write_json
from zerovision.training.base.points import Loggers
from zerovision.training.base.run_folder import CHECKPOINTS, ENVIRONMENT, METRICS
from zerovision.training.checkpoint.store import NAME_PATTERN, find_candidates, restore
from zerovision.training.config import FLAG_OF
from zerovision.training.data.augment import unnormalized
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import StepInput, StepResult, TimedEngine
from zerovision.training.engines.settings import TOGETHER
from zerovision.training.epoch import begin_epoch
from zerovision.training.loop import train_one_epoch
from zerovision.training.observe.observer import Observers, Seen
from zerovision.training.observe.step_hashes import StepHashes, hashed_parameters
from zerovision.training.run import set_up
from zerovision.training.steps.carrier import Run
from zerovision.training.steps.watch import every_step, guard_of
from zerovision.training.world.launchers import data_ranks
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import start_world

MOST_PICTURES = 600  # on one sheet


@dataclass
class WatchedStep:
    """An `accumulate.Step` that records the inputs and results of one step, and stops training after it."""

    number: int  # of the recorded step in the run, counted from 1
    run: Run  # of the replay
    before: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters by name, float32 in CPU memory
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the trained parameters, before clipping
    seen: list[tuple[Batch, torch.Tensor]] = field(default_factory=list)  # batches as the network saw them, losses [B]
    hashes: dict[str, Any] = field(default_factory=dict)  # in the format of `StepHashes`

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.engines.engine.Step`."""
        if self.run.position != self.number - 1:
            return self.run.step(engine, given)
        scale = 1.0 if engine.engine.loss_scale is None else engine.engine.loss_scale.value

        def keep(batch: Batch, losses: torch.Tensor, logits: torch.Tensor, *more: torch.Tensor) -> None:
            self.seen.append((batch, losses.detach()))
            self.hasher.seen(Seen(batch, losses, logits, losses))
            given.note(batch, losses, logits, *more)

        def add(gradient: torch.Tensor, name: str) -> None:
            self.gradients[name] = self.gradients.get(name, torch.zeros_like(gradient)) + gradient / scale

        self.before = hashed_parameters(self.run.state.engine, self.run.world)
        self.hasher.before_step(0)
        trained = [(name, one) for name, one in engine.engine.module.named_parameters() if one.requires_grad]
        for name, parameter in trained:
            parameter.register_hook(partial(add, name=name))  # called once for each leaf
        self.run.start.stop.request(signal.SIGINT)
        return self.run.step(engine, given._replace(note=keep))

    @functools.cached_property
    def hasher(self) -> StepHashes:
        """The object that hashes only the recorded step."""
        return StepHashes(1, self.run.world, self.run.plan.leaves, self.run.state.engine, Loggers([]))


def run(settings: ReplaySettings) -> int:
    """Replay the requested step, and return the exit code."""
    folder = find_run(settings.run)
    output = Path(os.path.expanduser(settings.output)) if settings.output else folder / f"replay-{settings.step}"
    if output.exists():
        raise UserError(f"'{output}' exists: move it away, or use another --output folder.")
    watched = replay(folder, settings.step)
    differing = differences(watched, folder)
    with errors_of_writing(output):
        print("\n".join(write_step(watched, differing, output)))
    print(f"output       {output}")
    return 1 if differing else 0


@preserved_process()
def replay(run: Path, number: int) -> WatchedStep:
    """Repeat step `number` (counted from 1) of a run, or raise a UserError; write only to a temporary folder."""
    config, facts = read_run_config(run), read_json(run / ENVIRONMENT)
    if missing := [name for name in ("ranks", "training_images") if type(facts.get(name)) is not int]:
        raise UserError(f"'{run / ENVIRONMENT}' is damaged: no number '{missing[0]}'. Restore it.")
    if flags := [FLAG_OF[name] for name in TOGETHER if getattr(config, name) > 1]:
        raise UserError(f"run {run.name} has {flags[0]}: one process cannot repeat ranks that train independently.")
    leaves = data_ranks(facts["ranks"], config.mesh) * config.gradient_accumulation_steps
    steps_per_epoch = -(-facts["training_images"] // (leaves * config.micro_batch))
    planned = config.epochs * steps_per_epoch
    if number > (last := min(_trained_steps(run, planned), planned)):
        steps = f"{last} steps" if last == planned else f"trained {last} of its {planned} steps"
        raise UserError(f"--step {number}: run {run.name} has {steps}: use 1 to {max(last, 1)}.")
    whole: dict[str, Any] = dict.fromkeys(config.mesh, 1) | {"features": "computed"}
    quiet: dict[str, Any] = dict.fromkeys(("profile", "log_hashes", "audit", "max_bad_steps"), 0) | {"loggers": "none"}
    resume = _newest_before(run, number, steps_per_epoch)
    config = dataclasses.replace(config, **whole, **quiet, resume=resume, gradient_accumulation_steps=leaves)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        alone = dataclasses.replace(config, log_dir=folder, run_name="replay")
        with contextlib.closing(set_up(alone, start_world(deterministic=config.deterministic))) as ready:
            watched = WatchedStep(number, ready)
            _train(watched)
    return watched


def _trained_steps(run: Path, planned: int) -> int:
    """Return the highest step that a run logged, even if it later resumed at a lower step; `planned` without a log."""
    try:
        content = (run / METRICS).read_bytes()
    except OSError:
        return planned
    return max(map(int, re.findall(rb'"step": (\d+)', content)), default=0)


def _newest_before(run: Path, number: int, steps_per_epoch: int) -> str:
    """Return the newest checkpoint before a step as a value of `--resume`; 'never' if there is no such checkpoint."""
    for path in find_candidates("auto", run / CHECKPOINTS, is_restart=False)[0]:
        name = NAME_PATTERN.fullmatch(path.name)
        if name and int(name[1]) * steps_per_epoch + int(name[2]) < number:
            return str(path)
    return "never"


def _train(watched: WatchedStep) -> None:
    """Train through the recorded step as the run did, but without evaluations, which do not affect training steps."""
    run = dataclasses.replace(watched.run, loggers=Loggers([]), step=watched)
    state, found = run.state, run.start.found
    if found is not None:
        restore(found, state, run.world)
    observers = every_step(run, guard_of(run, most_consecutive=0))
    run = dataclasses.replace(run, observers=Observers(observers, run.clock))
    while not watched.seen:
        begin_epoch(run)
        if state.progress.step < run.plan.steps_per_epoch:
            train_one_epoch(run, run.readers.train.epoch(state.progress.epoch, state.progress.step))
            state.engine.buffers.average(run.world.data)
        state.progress = state.progress.after_epoch(0.0, 0.0, is_best=False, has_diverged=False)
        state.sums.reset()
    watched.after = hashed_parameters(state.engine, run.world)
    watched.hashes = watched.hasher.line()


def write_step(watched: WatchedStep, differing: list[str] | None, folder: Path) -> Iterator[str]:
    """Write batch.png and step.json into a new folder, and yield lines to print; see `differences` for `differing`."""
    found, layers, (samples, pictures) = watched.run.start.found, _layers(watched), _samples(watched)
    counted = [one for one in samples if one["weight"]]
    loss = sum(one["weight"] * one["loss"] for one in counted) / max(sum(one["weight"] for one in counted), 1)
    start, verdict = found.path.name if found else "the seed", "the same bytes as in the run"
    if differing is None:
        verdict = "the run has no hashes of this step (--log-hashes) to compare with"
    elif differing:
        verdict = f"differs from the run in {len(differing)} of its hashes: {'; '.join(differing[:3])}"
    facts = {"step": watched.number, "start": start, "loss": loss, "verdict": verdict}
    with replacing_folder(folder) as new:
        write_json(new / "step.json", facts | {"layers": layers, "samples": samples})
        contact_sheet(*zip(*pictures, strict=True)).save(new / "batch.png")
    width = max(map(len, layers))
    yield f"step {watched.number}, from {start}: loss {loss:.6g}"
    yield f"{'layer':{width}}  {'gradient':>12}  {'before':>12}  {'after':>12}  {'change':>12}"
    for name, norms in layers.items():
        yield f"{name:{width}}  " + "  ".join(f"{norm:12.6g}" for norm in norms.values())
    yield f"step {watched.number}: {verdict}"


def differences(watched: WatchedStep, run: Path) -> list[str] | None:
    """Describe the leaves and parameters whose hashes differ from the run's; None if the run did not hash the step."""
    line = read_hashes(run).get(watched.number)
    if line is None:
        return None
    leaves = zip(watched.hashes["leaves"], line.get("leaves", []), strict=False)
    found = compare_step(watched.hashes | {"leaves": [own | {"rank": leaf["rank"]} for own, leaf in leaves]}, line)
    return [*found.leaves, *found.tensors]


def _samples(watched: WatchedStep) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return facts and losses of all images, and pictures of the first images with captions."""
    data = watched.run.data
    samples: list[dict[str, Any]] = []
    pictures: list[Any] = []
    for batch, losses in watched.seen:
        for slot, (weight, loss) in enumerate(zip(batch.weights.tolist(), losses.tolist(), strict=True)):
            labels = {data.class_names[int(batch.labels[slot])]: 1.0}
            if batch.targets is not None:  # mixed images have several labels
                shares = zip(data.class_names, batch.targets[slot].tolist(), strict=True)
                labels = {label: share for label, share in shares if share}
            name = data.train.source.name(int(batch.indices[slot]))
            samples.append({"name": name, "labels": labels, "weight": weight, "loss": loss})
            if len(pictures) < MOST_PICTURES:
                pixels = unnormalized(batch.images[slot].float().cpu(), data.preprocessing).clamp(0, 1)
                captions = (printable(Path(name).name)[-LONGEST_NAME:], printable(", ".join(labels))[:LONGEST_NAME])
                picture = thumbnail((255 * pixels).round().to(torch.uint8))
                pictures.append((picture, [(caption, BLACK if weight else WRONG) for caption in captions]))
    return samples, pictures


def _layers(watched: WatchedStep) -> dict[str, dict[str, float]]:
    """Return the L2 norms by layer: the gradient, the weights before and after the step, and their change."""
    changes = {name: after - watched.before[name] for name, after in watched.after.items()}
    kinds = {"gradient": watched.gradients, "before": watched.before, "after": watched.after, "change": changes}
    squares: dict[str, dict[str, float]] = {}
    for name in watched.after:
        layer = squares.setdefault(name.rpartition(".")[0] or name, dict.fromkeys(kinds, 0.0))
        for kind, tensors in kinds.items():
            layer[kind] += float(tensors[name].double().square().sum()) if name in tensors else 0.0
    return {name: {kind: square**0.5 for kind, square in layer.items()} for name, layer in squares.items()}
