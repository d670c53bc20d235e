"""Saving while training goes on: the state is copied at once, and written by a thread beside the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from training.checkpoint.manifest import Manifest, ShardFacts, shard_name
from training.checkpoint.retries import GIVE_UP_SECONDS_OF_STOP, FailedSaves
from training.checkpoint.shards import Snapshot, write_shard
from training.checkpoint.store import checkpoint_name, commit, discard, temporary_folder
from training.errors import CANNOT_SAVE_EXIT_CODE, RunEnded, one_line
from training.observe.heartbeat import HeartbeatWriter
from training.observe.loggers import Loggers
from training.parallel.collectives import gather_objects
from training.parallel.exchange import flag, optional, row_of, text, whole_number
from training.parallel.world import World
from training.state import TrainState


@dataclass(frozen=True)
class SaveSettings:
    """What stays the same over all saves of a run.

    Attributes:
        folder: the run's checkpoints folder.
        identity: see `Manifest.identity`.
        config: see `Manifest.config`.
        every_steps: optimizer steps between two saves, 0 for none.
        every_minutes: minutes between two saves, 0 for none.
        keep_last: newest checkpoints to keep.
        patience_s: seconds that training may wait for a save before the rank counts as hung.
        steps_per_epoch: optimizer steps of one epoch.
    """

    folder: Path
    identity: dict[str, Any]
    config: dict[str, Any]
    every_steps: int
    every_minutes: float
    keep_last: int
    patience_s: float
    steps_per_epoch: int


@dataclass
class _Save:
    """One save under way, or done; `error` and `is_last_try` are the same on all ranks."""

    name: str
    position: int
    is_best: bool
    stall_seconds: float  # that training stood still: waiting for the save before, and copying
    seconds: float = 0.0
    error: str | None = None
    is_last_try: bool = False  # saves have failed for so long that the run ends


class Saver:
    """Saves checkpoints of one run; every rank has one and calls it at the same steps."""

    def __init__(
        self,
        settings: SaveSettings,
        state: TrainState,
        world: World,
        loggers: Loggers,
        heartbeat: HeartbeatWriter,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._state, self._world = settings, state, world
        self._loggers, self._heartbeat = loggers, heartbeat
        self._clock, self._sleep = clock, sleep
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._running: _Save | None = None
        self._unsaved_best: Callable[[], None] | None = None
        self._failures = FailedSaves(clock)
        self._has_given_up = False
        self._failed_position = 0
        self._last_start = clock()

    def is_due_by_time(self) -> bool:
        """Return once that the minutes between two saves are over, or that a failed one is to be tried again.

        By rank 0's clock; the other ranks hear of it from there.
        """
        if not self._world.is_main:
            return False
        minutes, now = self._settings.every_minutes, self._clock()
        if minutes > 0 and now - self._last_start >= 60 * minutes:
            self._last_start = now
            return True
        return self._failures.take_retry()

    def is_due_by_steps(self, position: int) -> bool:
        """Say whether a save is due after `position` steps of the run; the same on all ranks."""
        return self._settings.every_steps > 0 and position % self._settings.every_steps == 0

    def save(self, write_best: Callable[[], None] | None = None) -> None:
        """Copy the current state and begin to write it; a collective.

        Args:
            write_best: given if this is the best epoch: writes its weights; called on rank 0 alone.

        Raises:
            RunEnded: on all ranks, if saves have failed for `GIVE_UP_SECONDS`.
        """
        start = self._last_start = self._clock()
        self._wait()
        if write_best is not None:
            self._unsaved_best = write_best
        engine, progress = self._state.engine, self._state.progress
        facts = {
            "progress": progress,
            "identity": self._settings.identity,
            "config": self._settings.config,
            "applied_steps": engine.applied_steps(),
            "loss_scale": engine.loss_scale.state() if engine.loss_scale else None,
            "parameters": engine.parameter_shapes(),
        }
        # Last: reading the count above may wait for the GPU, and would then wait for the copies, too.
        self._snapshot.take(engine, self._state.sums.state())
        save = _Save(
            checkpoint_name(progress),
            position=progress.epoch * self._settings.steps_per_epoch + progress.step,
            is_best=write_best is not None,
            stall_seconds=self._clock() - start,
        )
        self._running = save
        self._thread = threading.Thread(target=self._write, args=(save, facts), name="checkpoint", daemon=True)
        self._thread.start()

    def note_outcome(self) -> None:
        """Log a save that has ended since the last call; called at every step, costs nothing while none has."""
        if self._thread is None or self._thread.is_alive() or self._running is None:
            return
        save, self._thread, self._running = self._running, None, None
        self._failures.note(failed=save.error is not None)
        self._has_given_up = save.is_last_try
        if save.error is None:
            self._unsaved_best = None
            self._loggers.event(
                "checkpoint",
                {
                    "step": save.position,
                    "name": save.name,
                    "stall_seconds": round(save.stall_seconds, 4),
                    "seconds": round(save.seconds, 3),
                },
            )
            if self._world.is_main:
                self._heartbeat.checkpoint_saved(save.position)
            return
        self._failed_position = save.position
        self._loggers.event("checkpoint_failed", {"step": save.position, "name": save.name, "error": save.error})
        self._loggers.message(
            f"checkpoint {save.name} could not be saved ({save.error}): the one before it stays"
            + ("" if save.is_last_try else f", the next try comes within {self._failures.delay_s():.0f} s")
        )

    def finish(self, *, is_stop: bool = False) -> None:
        """Wait for the running save; if it failed, save the current state again and again. A collective.

        Args:
            is_stop: whether the run was asked to stop, and should not let anybody wait for long.

        Raises:
            RunEnded: on all ranks, if saves have failed for `GIVE_UP_SECONDS`, or `GIVE_UP_SECONDS_OF_STOP`.
        """
        self._wait()
        if is_stop:
            self._failures.give_up_s = GIVE_UP_SECONDS_OF_STOP
        while self._failures:
            self.save()
            self._wait()
            if self._failures:
                delay_s = self._failures.delay_s()
                self._heartbeat.beat("save", self._failed_position, self._settings.patience_s + delay_s)
                self._sleep(delay_s)

    def _wait(self) -> None:
        """Wait for the save under way; raise if saves have failed for too long."""
        if self._thread is not None:
            self._heartbeat.beat("save", self._running.position if self._running else -1, self._settings.patience_s)
            self._thread.join()
        self.note_outcome()
        if self._has_given_up:
            raise self._cannot_save()

    def _cannot_save(self) -> RunEnded:
        return RunEnded(
            f"checkpoints could not be saved in {self._settings.folder} for {self._failures.last_s():.0f} s "
            "(the log says why); make room there and start again with --resume auto.",
            CANNOT_SAVE_EXIT_CODE,
            self._failed_position,
        )

    def _write(self, save: _Save, facts: dict[str, Any]) -> None:
        """Write this rank's shard, agree with the other ranks, and commit; the thread's work, a collective of its own.

        Its messages travel over `World.save_group`, so that they never meet those of the training steps.
        """
        start = self._clock()
        folder = self._settings.folder
        try:
            save.error = self._write_and_commit(save, facts)
            if save.error is not None:
                self._agree((lambda: discard(folder, save.name)) if self._world.is_main else None)
                verdicts = gather_objects(self._failures.are_too_many(), flag, self._world, self._world.save_group)
                save.is_last_try = verdicts[0]  # by rank 0's clock
        except Exception as error:  # a rank that died takes the agreement with it; the steps will notice, too
            save.error = one_line(f"{type(error).__name__}: {error}")
        save.seconds = self._clock() - start

    def _write_and_commit(self, save: _Save, facts: dict[str, Any]) -> str | None:
        folder, name, world = self._settings.folder, save.name, self._world
        temporary = temporary_folder(folder, name)
        shard: list[ShardFacts] = []

        def prepare() -> None:
            discard(folder, name)
            temporary.mkdir(parents=True)

        def commit_all() -> None:
            # Before the checkpoint: a run that resumes from it takes these weights for written.
            if self._unsaved_best is not None:
                self._unsaved_best()
            manifest = Manifest(shards=tuple(shards), **facts)
            commit(folder, name, manifest, is_best=save.is_best, keep_last=self._settings.keep_last)

        error = self._agree(prepare if world.is_main else None)
        if error is None:
            error = self._agree(lambda: shard.append(write_shard(temporary / shard_name(world.rank), self._snapshot)))
        if error is None:
            own = [shard[0].bytes, shard[0].sha256]
            rows = gather_objects(own, row_of(whole_number, text), world, world.save_group)
            shards = [ShardFacts(*row) for row in rows]
            error = self._agree(commit_all if world.is_main else None)
        return error

    def _agree(self, action: Callable[[], None] | None) -> str | None:
        """Do something on some ranks; return the first failing rank's reason on all. A collective of the save group."""
        error = None
        try:
            if action is not None:
                action()
        except (OSError, SafetensorError) as failure:
            error = f"rank {self._world.rank}: {one_line(failure)}"
        errors = gather_objects(error, optional(text), self._world, self._world.save_group)
        return next((message for message in errors if message is not None), None)
