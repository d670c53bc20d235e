"""A run that goes on with another number of epochs than its checkpoint was made with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import WEIGHTS
from zerovision.training.checkpoint.store import FoundCheckpoint, checkpoint_name, choose
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.observe.best_weights import epoch_of
from zerovision.training.recipe.schedule import build_schedule, schedule_names, stable_epochs
from zerovision.training.world.collectives import broadcast_object
from zerovision.training.world.world import World

# May change on a resume, and change the bytes.
ROUNDING = ("precision", "batch_size", "threads_per_rank", "engine", "strategy", "offload", "tensor_parallel")
SHARDING = ("replicate_across", "deepspeed_config")  # the same, but not under PyTorch's engine


def before_decay(
    config: TrainConfig, found: FoundCheckpoint | None, world: World
) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return the checkpoint to resume from, and notes for the log; a collective.

    A longer run goes back to where the rate began to decay, if it is the schedule's that until then does not depend on
    the epochs. A checkpoint that the user named stays.
    """
    saved = _with_saved_epochs(config, found)
    if (
        found is None
        or saved is None
        or saved.epochs >= config.epochs
        or found.path.resolve() == Path(config.resume).expanduser().resolve()
    ):
        return found, []
    start = Progress(stable_epochs(saved))
    progress = found.manifest.progress
    if start.epoch == 0 or (progress.epoch, progress.step) <= (start.epoch, 0):
        return found, []
    earlier, refused = choose([found.path.parent / checkpoint_name(start)], world)
    if earlier is None:
        reason = next(iter(refused.values()))
        return found, [f"the checkpoint of epoch {start.epoch}, before the decay, cannot be used: {reason}"]
    notes = [f"going back to epoch {start.epoch}, the last before the learning rate decayed"]
    progress = earlier.manifest.progress
    has_best = world.is_main and epoch_of(earlier.path.parent.parent / WEIGHTS) == progress.best_epoch
    if broadcast_object(has_best, world) or progress.best_epoch == 0:
        return earlier, notes
    notes.append(
        f"the weights of epoch {progress.best_epoch}, the best until then, are gone: those of the best epoch after it "
        "are kept"
    )
    progress = dataclasses.replace(progress, best_epoch=0, best_score=Progress.best_score)
    return dataclasses.replace(earlier, manifest=dataclasses.replace(earlier.manifest, progress=progress)), notes


def note_other_epochs(
    config: TrainConfig,
    found: FoundCheckpoint | None,
    plan: BatchPlan,
    head_epochs: int,
    engine: str,
    compiles: str = "",
) -> list[str]:
    """Return a note for the log if the epochs are not those of the checkpoint: whether that changes what came before.

    Args:
        config: this run's.
        found: the checkpoint, which fits.
        plan: this run's.
        head_epochs: epochs in which only the head is trained.
        engine: this run's.
        compiles: what `--compile` a run that began with these epochs needs for the same code; '' for none.
    """
    saved = _with_saved_epochs(config, found)
    if found is None or saved is None or saved.epochs == config.epochs:
        return []
    steps = plan.position(found.manifest.progress)
    before, now = (
        build_schedule(settings, plan.steps_per_epoch, plan.global_batch, head_epochs) for settings in (saved, config)
    )
    is_same = all(before.learning_rates(step) == now.learning_rates(step) for step in range(steps))
    if config.mixup_off_epochs:
        last_mixed = min(saved.epochs, config.epochs) - config.mixup_off_epochs
        is_same &= steps <= last_mixed * plan.steps_per_epoch
    if config.has_islands:  # the last round of a run ends with it
        is_same &= steps % config.local_steps == 0 or steps < min(saved.epochs, config.epochs) * plan.steps_per_epoch
    change = f"--epochs {config.epochs} instead of {saved.epochs}"
    if is_same and (changed := _changes_of_bytes(config, found, plan, engine)):
        return [f"{change}: the bytes may not be those of a run that began with {config.epochs}, because of {changed}"]
    if is_same:
        same_code = f" and --compile {compiles}" if compiles else ""
        return [f"{change}: the bytes will be those of a run that began with {config.epochs}{same_code}"]
    cure = "" if "wsd" in schedule_names(config) else "; --schedule wsd can be extended exactly"
    return [
        f"{change}: from here on learning rate and mixing are those of a run of {config.epochs} epochs, up to here "
        f"they were not{cure}"
    ]


def _changes_of_bytes(config: TrainConfig, found: FoundCheckpoint, plan: BatchPlan, engine: str) -> str:
    """Return what may give other bytes than if the run had begun with it; "" for nothing."""
    names, saved = [*ROUNDING, *(() if engine == "torch" else SHARDING)], found.manifest.config
    changed = [FLAG_OF[name] for name in names if saved.get(name, FIELDS[name].default) != getattr(config, name)]
    if plan.world_size != len(found.manifest.shards) and (engine != "torch" or config.sync_batchnorm):
        changed.append("the other number of ranks")
    return ", ".join(changed)


def _with_saved_epochs(config: TrainConfig, found: FoundCheckpoint | None) -> TrainConfig | None:
    """Return the configuration with the checkpoint's epochs; None if it has none that can be."""
    epochs = found.manifest.config.get("epochs") if found else None
    if type(epochs) is not int or not 1 <= epochs <= FIELDS["epochs"].metadata["high"]:
        return None
    return dataclasses.replace(config, epochs=epochs)
