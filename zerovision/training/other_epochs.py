"""Resumes a run with another number of epochs than its checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import WEIGHTS
from zerovision.training.checkpoint.store import FoundCheckpoint, checkpoint_name, choose
from zerovision.training.config import FIELDS, TrainConfig
from zerovision.training.observe.best_weights import epoch_of
from zerovision.training.recipe.schedule import stable_epochs
from zerovision.training.world.collectives import broadcast_object
from zerovision.training.world.world import World


def before_decay(
    config: TrainConfig, found: FoundCheckpoint | None, world: World
) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return the checkpoint to resume from, and a note for the log if its number of epochs differs; a collective.

    A longer run returns to the start of the decay, if the schedule does not depend on the epochs until then. A
    checkpoint that the user named is kept.
    """
    epochs = found.manifest.config.get("epochs") if found else None
    if found is None or type(epochs) is not int or not 1 <= epochs <= FIELDS["epochs"].metadata["high"]:
        return found, []
    if epochs == config.epochs:
        return found, []
    saved = dataclasses.replace(config, epochs=epochs)
    change = f"--epochs {config.epochs} instead of {epochs}"
    goes_on = f"{change}: from now on, learning rate and mixing are those of a run of {config.epochs} epochs"
    start, progress = Progress(stable_epochs(saved)), found.manifest.progress
    if (
        saved.epochs > config.epochs
        or found.path.resolve() == Path(config.resume).expanduser().resolve()
        or start.epoch == 0
        or (progress.epoch, progress.step) <= (start.epoch, 0)
    ):
        return found, [goes_on]
    earlier, refused = choose([found.path.parent / checkpoint_name(start)], world)
    if earlier is None:
        reason = next(iter(refused.values()))
        return found, [f"{goes_on}; the checkpoint of epoch {start.epoch}, before the decay, cannot be used: {reason}"]
    note = f"{change}: going back to epoch {start.epoch}, the last before the learning rate decayed"
    progress = earlier.manifest.progress
    has_best = world.is_main and epoch_of(earlier.path.parent.parent / WEIGHTS) == progress.best_epoch
    if broadcast_object(has_best, world) or progress.best_epoch == 0:
        return earlier, [note]
    note += (
        f"; the weights of epoch {progress.best_epoch}, the best until then, are lost: those of the best later epoch "
        "are kept"
    )
    progress = dataclasses.replace(progress, best_epoch=0, best_score=Progress.best_score)
    return dataclasses.replace(earlier, manifest=dataclasses.replace(earlier.manifest, progress=progress)), [note]
