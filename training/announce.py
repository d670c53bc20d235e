"""What a run says about itself at its start and at its end."""

from __future__ import annotations

import contextlib
import signal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from delivery.best_weights import epoch_of
from training.bad_images import bad_image_lines
from training.checkpoint.manifest import Progress
from training.data.images import ImageError
from training.loggers import RunPoint
from training.optim import schedule_notes
from training.parts import Parts
from training.run_folder import shown_path

AUGMENTED_IMAGES_SHOWN = 16


def announce_start(parts: Parts, progress: Progress) -> None:
    """Log what is about to be trained, on what, and what the user may not expect."""
    config, world, plan, say = parts.config, parts.world, parts.settings.plan, parts.loggers.message
    say(f"run {parts.folder.name}: {config.model_type}, {config.strategy}, {parts.precision}, {world.describe()}")
    unit = "GPU" if world.device.type == "cuda" else "CPU rank"
    say(
        f"global batch {plan.global_batch} = {config.batch_size} per {unit} x {world.size} {unit}s x "
        f"{config.gradient_accumulation_steps} accumulation step(s); {plan.steps_per_epoch} steps per epoch; "
        f"peak learning rate {parts.settings.schedule.peak:.3g}"
    )
    data = parts.data
    say(
        f"data {config.data}: {len(data.train)} training and {len(data.val)} validation images, "
        f"{len(data.class_names)} classes, {data.preprocessing['image_size']} pixels, augmentation {data.augmentation}"
    )
    for note in [*data.notes, *parts.built.notes, *_warnings(parts)]:
        say(f"note: {note}")
    if world.is_main and config.tensorboard and progress == Progress():
        images = _augmented_sample(parts)
        if len(images):
            parts.loggers.images(images)


def announce_end(parts: Parts, progress: Progress, stop_signal: int, point: RunPoint) -> None:
    """Log the result, where the time went and where everything lies; a collective."""
    say = parts.loggers.message
    for line in bad_image_lines([parts.train_loader, parts.val_loader], parts.world):
        say(line)
    if stop_signal:
        name, again = signal.Signals(stop_signal).name, f"--run-name {parts.folder.name} --resume auto"
        if parts.position(progress) == 0:
            say(f"stopped by {name} before the first step; start with {again}")
        else:
            done = f"in epoch {progress.epoch + 1} after {progress.step} steps"
            say(f"stopped by {name} {done}, checkpoint saved; go on with {again}")
    if parts.world.is_main:
        for line in _result(parts, progress):
            say(line)
    if point.images_per_second:
        parts.loggers.end(point)
    say(f"run folder   {shown_path(parts.folder.path)}")
    say(f"TensorBoard  tensorboard --logdir {shown_path(parts.folder.tensorboard.parent)}")
    say(f"log          {shown_path(parts.folder.text_log)}")


def _result(parts: Parts, progress: Progress) -> list[str]:
    """Return what came out: that the training has diverged, the best epoch, and its weights if they are there."""
    lines = []
    if progress.diverged_epochs_in_row:
        first = progress.epoch - progress.diverged_epochs_in_row + 1
        lines.append(
            f"the training has diverged in epoch {first}: start a new run with a lower --learning-rate, and with "
            "--gradient-clipping 1 if it was changed"
        )
    if not progress.best_epoch:
        return [*lines, "no weights are saved: no epoch was sound"] if lines else []
    top1 = f"top-1 {progress.best_top1:.4f} on {len(parts.data.val)} held-out images (best epoch: {progress.best_epoch}"
    if epoch_of(parts.folder.weights) == progress.best_epoch:
        return [*lines, f"{top1}; its weights are saved)", f"weights      {shown_path(parts.folder.weights)}"]
    return [*lines, f"{top1}; its weights are not in this run's folder)"]


def _warnings(parts: Parts) -> list[str]:
    config, plan = parts.config, parts.settings.plan
    warnings = []
    if config.gradient_accumulation_steps > 1 and any(isinstance(m, _BatchNorm) for m in parts.engine.module.modules()):
        warnings.append(
            f"BatchNorm sees micro-batches of {config.batch_size}, not the global batch of {plan.global_batch}"
        )
    padding = plan.steps_per_epoch * plan.global_batch - plan.num_samples
    if padding:
        warnings.append(
            f"the last step of an epoch has {plan.global_batch - padding} samples, "
            f"filled up to {plan.global_batch} with images of weight 0"
        )
    if config.deterministic:
        warnings.append(
            "--deterministic repeats a run on the same hardware, number of ranks and versions only; an operation "
            "without a deterministic version runs all the same, and warns by its name"
        )
    warnings += schedule_notes(parts.settings.schedule)
    if parts.head_epochs:
        warnings.append(f"only the head learns for the first {parts.head_epochs} epoch(s)")
    return warnings


def _augmented_sample(parts: Parts) -> torch.Tensor:
    """Return the first training images of epoch 0 as the model sees them, float32 [N, 3, S, S] in 0..1."""
    images = []
    for index in parts.settings.plan.permutation(0)[:AUGMENTED_IMAGES_SHOWN]:
        # An unreadable image is the loader's to report, on all ranks; this runs on rank 0 alone.
        with contextlib.suppress(ImageError):
            images.append(parts.data.train[(0, int(index))][0])
    mean, std = (torch.tensor(parts.data.preprocessing[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (torch.stack(images) * std + mean).clamp(0, 1) if images else torch.empty(0)
