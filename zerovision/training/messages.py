"""The messages at the start and at the end of a run."""

from __future__ import annotations

import contextlib
import signal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from zerovision.models import USUAL_RATE
from zerovision.training.base.control_groups import quota_note, usable_cores
from zerovision.training.base.points import SCORE_NAMES, RunPoint, merit, show_score
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import SHARED_MEMORY, shown_path
from zerovision.training.base.units import plural
from zerovision.training.config import FIELDS
from zerovision.training.config.values import launch_command
from zerovision.training.data.augment import unnormalized, viewable
from zerovision.training.data.bad_images import bad_image_lines
from zerovision.training.data.reading.files import ImageError
from zerovision.training.data.reading.image_numbers import BYTES, stretched
from zerovision.training.engines.precision import note_slow_bf16
from zerovision.training.observe.best_weights import epoch_of
from zerovision.training.recipe.schedule import schedule_notes
from zerovision.training.steps.carrier import Run
from zerovision.training.world.launchers import line_to_go_on
from zerovision.training.world.signals import can_handle_signals

AUGMENTED_IMAGES_SHOWN = 16


def announce_start(run: Run) -> None:
    """Log the model, the ranks, the batch and the data of a run, and anything unexpected."""
    config, world, plan, log = run.config, run.world, run.plan, run.loggers.message
    log(f"run {run.folder.name}: {config.model_type}, {config.strategy}, {run.precision}, {world.describe()}")
    (unit, units), is_own = world.units(), config.learning_rate == config.default_rate != USUAL_RATE
    whose = f" (the default of {config.model_type} from random weights)" if is_own else ""
    log(
        f"global batch {plan.global_batch} = {config.batch_size} per {unit} x {units} x "
        f"{plural(config.gradient_accumulation_steps, 'accumulation step')}; "
        f"{plural(plan.steps_per_epoch, 'step')} per epoch; "
        f"peak learning rate {run.schedule.peak:.3g}{whose}"
    )
    data, pixels = run.data, run.data.train.preprocessing.image_size
    channels = f" of {plural(data.preprocessing.channels, 'channel')}" if data.preprocessing.channels != 3 else ""
    log(
        f"data {config.data}: {len(data.train)} training and {len(data.val)} validation images, "
        f"{len(data.class_names)} classes, {pixels} pixels{channels}, augmentation {data.augmentation}"
    )
    for note in [*data.notes, *run.model.built.notes, *_warnings(run)]:
        log(f"note: {note}")
    if world.is_main and "tensorboard" in config.destinations and run.state.progress == Progress():
        images = _augmented_sample(run)
        if len(images):
            run.loggers.images(images)


def announce_end(run: Run, stop_signal: int, point: RunPoint) -> None:
    """Log the result, where the time went and where the files are; a collective."""
    progress, log = run.state.progress, run.loggers.message
    for line in bad_image_lines([run.readers.train, run.readers.val], run.world):
        log(line)
    if stop_signal:
        done = f"in epoch {progress.epoch + 1} after {progress.step} steps, checkpoint saved"
        log(f"stopped by {signal.Signals(stop_signal).name} {done if run.position else 'before the first step'}")
    for line in _result(run) if run.world.is_main else ():
        log(line)
    if point.images_per_second:
        run.loggers.end(point)
    log(f"run folder   {shown_path(run.folder.path)}")
    if "tensorboard" in run.config.destinations:
        log(f"TensorBoard  tensorboard --logdir {shown_path(run.folder.tensorboard.parent)}")
    log(f"log          {shown_path(run.folder.text_log)}")
    cache = run.data.train.source.cache_folder
    if cache is not None and cache.is_relative_to(SHARED_MEMORY):
        log(f"memory       keeps decoded images for the next run; to free it: rm -r {cache}")
    if stop_signal:
        # The run saved all other settings.
        command = launch_command(run.config, run.world.size, run.world.local_size, FIELDS.keys() - {"log_dir"})
        log(f"to continue  {line_to_go_on(run.folder.name, command)}")


def _result(run: Run) -> list[str]:
    """Return lines about divergence, about the best epoch, and about its weights if they are in the run folder."""
    progress, lines = run.state.progress, []
    if progress.diverged_epochs_in_row:
        lines.append(
            f"the training diverged in epoch {progress.epoch - progress.diverged_epochs_in_row + 1}: start a new run "
            "with a lower --learning-rate, and --gradient-clipping 1 if you changed it"
        )
    if run.model.head_epochs >= run.config.epochs:
        lines.append(
            f"only the head was trained, for its {plural(run.model.head_epochs, 'epoch')}; to train the backbone too, "
            "use more --epochs or fewer --head-epochs"
        )
    best_by, name = run.config.best_by, SCORE_NAMES[run.config.best_by]
    if not progress.best_epoch:
        why = "every epoch diverged" if progress.diverged_epochs_in_row else f"no epoch has a finite {name}"
        return [*lines, f"no weights are saved: {why}"] if lines or progress.epoch else []
    best = f"{name} {show_score(best_by, merit(best_by, progress.best_score))}"
    best += f" on {len(run.data.val)} held-out images (best epoch: {progress.best_epoch}"
    if epoch_of(run.folder.weights) == progress.best_epoch:
        return [*lines, f"{best}; its weights are saved)", f"weights      {shown_path(run.folder.weights)}"]
    return [*lines, f"{best}; its weights are not in this run's folder)"]


def _warnings(run: Run) -> list[str]:
    config, plan = run.config, run.plan
    warnings = note_slow_bf16(run.precision, run.world.device)
    if note := quota_note():
        warnings.append(f"{note}: the ranks of this machine share {usable_cores()}")
    if not can_handle_signals():
        warnings.append(
            "this is not the main thread: Ctrl-C and SIGTERM do not stop the run; if the process ends, "
            f"--run-name {run.folder.name} --resume auto continues from the newest checkpoint"
        )
    if config.gradient_accumulation_steps > 1 and any(
        isinstance(m, _BatchNorm) for m in run.state.engine.module.modules()
    ):
        warnings.append(
            f"BatchNorm sees micro-batches of {config.batch_size}, not the global batch of {plan.global_batch}"
        )
    if padding := plan.steps_per_epoch * plan.global_batch - plan.num_samples:
        warnings.append(
            f"the last step of an epoch has {plural(plan.global_batch - padding, 'image')}; padding images, which "
            f"are ignored in loss and scores, fill it up to {plan.global_batch}"
        )
    if config.deterministic:
        warnings.append(
            "--deterministic repeats a run on the same hardware, number of ranks and versions only; an operation "
            "without a deterministic version still runs, with a warning"
        )
    warnings += [*run.task.notes(shown_path(run.folder.weights)), *schedule_notes(run.schedule)]
    if config.ema:
        warnings.append(f"the moving average of the weights is evaluated and saved, --ema {config.ema}")
    if run.model.head_epochs:
        all_of_them = ", that is, in the whole run" if run.model.head_epochs >= config.epochs else ""
        warnings.append(f"only the head learns for the first {plural(run.model.head_epochs, 'epoch')}{all_of_them}")
    return warnings


def _augmented_sample(run: Run) -> torch.Tensor:
    """Return the first training images of epoch 0 as the model sees them, float32 [N, 1 or 3, S, S] in 0..1."""
    images = []
    for draw_key in run.plan.draw_keys(0)[:AUGMENTED_IMAGES_SHOWN]:
        # The loader reports unreadable images on all ranks; this code runs only on rank 0.
        with contextlib.suppress(ImageError):
            images.append(run.data.train[(0, int(draw_key))][0])
    if not images:
        return torch.empty(0)
    pixels = viewable(unnormalized(torch.stack(images), run.data.preprocessing))
    return pixels.clamp(0, 1) if run.data.train.source.values == BYTES else stretched(pixels)
