"""`--batch-size auto`: finds the largest micro-batch that fits on every rank; the global batch stays the same.

The result is a multiple of 8 that divides a rank's share of the global batch and has passed a short trial on the run's
own ranks. The search starts with the smallest candidate, and uses the measured memory and the planner's predictions to
choose the next one. Training is bit-identical to a run with this number as `--batch-size`. If one of several ranks
runs out of memory in a trial, the run exits; its folder records the trial, and the next start continues the search.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zerovision.training.base.errors import AgreedError, AnotherStartNeededError
from zerovision.training.base.files import write_json
from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.run_folder import BATCH_SIZE, RunFolder
from zerovision.training.base.units import format_bytes, plural
from zerovision.training.checkpoint.shards import Snapshot
from zerovision.training.config import TrainConfig
from zerovision.training.config.global_batch import (
    MOST_IMAGES_ON_CPU,
    divided,
    few_steps_note,
    largest_divisor,
    micro_batches,
    usual_global_batch,
)
from zerovision.training.engines.settings import WAYS
from zerovision.training.observe.device_use import FILL, memory_room, peak_memory, reset_peak_memory, used_memory
from zerovision.training.out_of_memory import Rung, describe_failure, is_out_of_memory, next_rung
from zerovision.training.steps.carrier import Run
from zerovision.training.trial import (
    TrialStopped,
    earlier_result,
    free_memory,
    shortened,
    train_shortly,
    trial,
    trial_settings,
)
from zerovision.training.world.collectives import agreed, broadcast_object, gather_objects

STEPS = 2  # optimizer steps per trial: the first one chooses kernels and fills caches
TRIAL_FOLDER = "batch-size-trial"
# Settings outside the recipe that affect memory use.
OF_MEMORY = (
    *("strategy", "precision", "offload", "engine", "replicate_across", "activation_checkpointing", "compile"),
    *(name for way in WAYS for name in way.resumable),
)


class Trial(NamedTuple):
    """The memory that a trial of one micro-batch size used, on the rank closest to its limit."""

    is_out_of_memory: bool
    """Whether any rank ran out of memory."""
    taken_bytes: int
    """Peak number of bytes on top of those in use before the trial; if the trial failed, the peak up to the failure."""
    room_bytes: int
    """Number of bytes that were available to the process."""

    @property
    def fits(self) -> bool:
        """Whether the micro-batch fits, with some memory to spare."""
        return not self.is_out_of_memory and self.taken_bytes <= FILL * self.room_bytes

    def describe(self) -> str:
        """Return the outcome in words."""
        if self.is_out_of_memory:
            return "out of memory"
        if not self.fits:
            room = f"{100 * FILL:.0f} % of {format_bytes(self.room_bytes)}"
            return f"takes {format_bytes(self.taken_bytes)}, more than {room}"
        return f"fits with {int(100 * (1 - self.taken_bytes / self.room_bytes))} % to spare"


def choose_batch_size(run: Run) -> Run:
    """Return the run with `--batch-size auto` resolved to a number, and a note for the log; a collective.

    A run keeps the number that its first start found, even on a different number of ranks, if those ranks can share the
    global batch evenly. If the ranks cannot share the global batch evenly, or not even the smallest micro-batch fits,
    raise a UserError on all ranks; in the second case, raise a MemoryError instead if `--on-oom adapt` lets the
    launcher continue with smaller settings.
    """
    config, world = run.config, run.world
    if config.batch_size != "auto":  # a resumed run has the number of its checkpoint
        return run
    earlier = _earlier_result(config, run.folder) if world.is_main else None
    size, global_batch = broadcast_object(earlier, world) or (0, 0)
    if size and config.global_batch in (0, global_batch) and not global_batch % world.data.size:
        size, how = largest_divisor(global_batch // world.data.size, size), "found at the run's first start"
    else:
        global_batch = config.global_batch or usual_global_batch(world.data.size, len(run.data.train))
        try:
            size, how = _search(run, global_batch)
        except TrialStopped:  # the run itself is about to end
            size, how = micro_batches(global_batch, world.data.size)[0], "because the search was stopped"
    config = divided(config, size, global_batch, world.data.size)
    unit, units = world.units()
    product = f"x {units} x {plural(config.gradient_accumulation_steps, 'accumulation step')}"
    note = f"--batch-size auto is {size} per {unit} ({how}), {product} = global batch {global_batch}"
    note += few_steps_note(global_batch, world.data.size, len(run.data.train))
    return dataclasses.replace(run, config=config).noting(note)


def largest_that_fits(planned: Sequence[int], measure: Callable[[int], Trial]) -> int | None:
    """Return the index of the largest size that fits, or None if the smallest does not fit.

    `planned` contains the predicted bytes of each size, in ascending order; only their differences matter.
    """
    fitting, too_large, place = -1, len(planned), 0
    while fitting < place < too_large:
        found = measure(place)
        fitting, too_large = (place, too_large) if found.fits else (fitting, place)
        left = FILL * found.room_bytes - found.taken_bytes
        # The peak of a failed trial is too low to predict from.
        expected: Sequence[int] = () if found.is_out_of_memory else range(fitting + 1, too_large)
        places = [other for other in expected if planned[other] - planned[place] <= left]
        place = max(places, default=fitting if found.fits else too_large - 1)
    return fitting if fitting >= 0 else None


def _search(run: Run, global_batch: int) -> tuple[int, str]:
    """Return the batch size found and a description of the trials, and write both to the run's folder; a collective."""
    config, world, folder, start = run.config, run.world, run.folder, run.start
    most = MOST_IMAGES_ON_CPU if world.device.type == "cpu" else 0
    sizes = agreed(lambda: micro_batches(global_batch, world.data.size, most), world)
    configs = [divided(config, size, global_batch, world.data.size) for size in sizes]
    planned = broadcast_object(_plan(run, configs) if world.is_main else None, world)
    about = {"global_batch": global_batch, "ranks": world.size, "settings": trial_settings(config, *OF_MEMORY)}
    tried = broadcast_object(_earlier_trials(folder, about) if world.is_main else None, world)
    earlier, trials = {size: Trial(*found) for size, *found in tried}, dict[int, Trial]()

    def measure(place: int) -> Trial:
        size = sizes[place]
        start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
        if size not in earlier:
            attempt = dataclasses.replace(run, config=configs[place])
            earlier[size] = _try(attempt, lambda failed: _record(folder, about, trials | {size: failed}))
        return trials.setdefault(size, earlier[size])

    place = largest_that_fits(planned, measure)
    start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
    first_guess = [*trials][:2][-1]
    how = f"planned {first_guess}; " + ", ".join(f"{size}: {found.describe()}" for size, found in trials.items())
    if place is None:
        raise _does_not_fit(dataclasses.replace(run, config=configs[0]), trials[sizes[0]])
    if world.is_main:
        _record(folder, about | {"batch_size": sizes[place], "how": how, "possible": sizes, "planned": planned}, trials)
    return sizes[place], how


def _record(folder: RunFolder, about: dict[str, Any], trials: dict[int, Trial]) -> None:
    """Write the trials into the run's folder."""
    tried = [{"batch_size": size} | found._asdict() for size, found in trials.items()]
    with contextlib.suppress(OSError):  # e.g. on a full disk: a start before the first checkpoint then searches again
        write_json(folder.path / BATCH_SIZE, about | {"tried": tried})


def _earlier_trials(folder: RunFolder, about: dict[str, Any]) -> list[list[Any]]:
    """Return the batch size and the outcome of each trial that earlier starts of this search recorded."""
    with contextlib.suppress(TypeError, LookupError):
        tried = earlier_result(folder.path / BATCH_SIZE, about)["tried"]
        return [[one[key] for key in ("batch_size", *Trial._fields)] for one in tried]
    return []


def _earlier_result(config: TrainConfig, folder: RunFolder) -> list[int] | None:
    """Return the batch size and the global batch that an earlier start with these settings found, or None."""
    content = earlier_result(folder.path / BATCH_SIZE, {"settings": trial_settings(config, *OF_MEMORY)})
    found: list[Any] = [content.get("batch_size"), content.get("global_batch")]
    return found if all(type(number) is int and number > 0 for number in found) else None


def _plan(run: Run, configs: Sequence[TrainConfig]) -> list[int]:
    """Return the predicted number of bytes for each configuration, or zeros if the planner cannot predict it."""
    if run.start.plan_memory is not None:
        with contextlib.suppress(Exception):  # some networks cannot be analyzed without data: the trials decide
            return run.start.plan_memory(run, configs)
    return [0] * len(configs)


def _try(run: Run, record: Callable[[Trial], None]) -> Trial:
    """Run a trial of `STEPS` optimizer steps; a collective.

    If one of several ranks runs out of memory, it calls `record` and raises AnotherStartNeededError.
    """
    if run.config.learning_rate == "auto":  # resolved after the batch size
        run = run.changed(learning_rate=run.config.default_rate)
    config, world, is_short = run.config, run.world, False
    had, device = used_memory(world.device), world.device
    # Gathered before any rank allocates more, because the ranks of a machine share its free memory.
    rooms = gather_objects(memory_room(device, world.local_size), world)
    reset_peak_memory(device)
    with trial(run, TRIAL_FOLDER) as attempt:
        copy = Snapshot()  # stands for the copy of the state that stays in memory while a checkpoint is written
        copy.take(attempt.state.engine.state(), attempt.state.sums.state())
        plan, epochs = shortened(attempt.plan, STEPS)
        try:  # the last epoch has the largest images
            train_shortly(dataclasses.replace(attempt, plan=plan), [config.epochs - 1] * epochs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            is_short = True
            if world.size > 1:  # the other ranks wait for this one
                record(Trial(True, max(peak_memory(device) - had, 0), rooms[world.rank]))
                raise AnotherStartNeededError(
                    f"{describe_failure(error, world.rank)}: after a restart by a launcher, --batch-size auto "
                    f"continues below {config.batch_size} images per rank"
                ) from None
        taken = gather_objects(max(peak_memory(device) - had, 0), world)
    del attempt, copy
    free_memory(world)
    reset_peak_memory(device)  # the run reports its own peak
    worst = max(range(world.size), key=lambda rank: taken[rank] / max(rooms[rank], 1))
    return Trial(is_short, taken[worst], rooms[worst])


def _does_not_fit(run: Run, found: Trial) -> Exception:
    """Return the error for a model that does not fit even with the smallest micro-batch; a collective."""
    config, world = run.config, run.world
    text = f"--batch-size auto: {config.model_type} with {config.batch_size} images {found.describe()}"
    if config.on_oom == "adapt":
        return MemoryError(text)
    cure = _nearest_that_fits(run, found) if world.is_main else ""
    return AgreedError(f"{text}. {broadcast_object(cure, world)}.")


def _nearest_that_fits(run: Run, found: Trial) -> str:
    """Return a sentence that names the first settings down the ladder that are predicted to fit."""
    ladder, changes = [run.config], list[dict[str, Any]]([{}])
    ranks, has_gpus = run.ranks_per_state, run.world.device.type == "cuda"
    while (rung := next_rung(ladder[-1], ranks, has_gpus=has_gpus)) is not None:
        ladder.append(dataclasses.replace(ladder[-1], **rung.changes))
        changes.append(changes[-1] | rung.changes)
    planned = _plan(run, ladder)
    needed = max(found.taken_bytes, found.room_bytes if found.is_out_of_memory else 0)
    for change, bytes_planned in zip(changes[1:], planned[1:], strict=True):
        if not planned[0] or needed + bytes_planned - planned[0] <= FILL * found.room_bytes:
            return f"Expected to fit: {' '.join(Rung(change, '', start=run.config).flags)}"
    return "No setting saves enough memory: use a smaller --image-size or model, or more ranks"
