"""Saves checkpoints while training continues: the state is copied immediately, and a thread writes the copy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError

from zerovision.training.base.errors import CANNOT_SAVE_EXIT_CODE, AgreedError, RunEnded, UserError, one_line
from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.progress import Progress
from zerovision.training.base.units import format_bytes
from zerovision.training.checkpoint.manifest import Manifest, ShardFacts, shard_name
from zerovision.training.checkpoint.shards import Snapshot, write_shard
from zerovision.training.checkpoint.store import checkpoint_name, commit, discard, temporary_folder
from zerovision.training.observe.observer import Observer
from zerovision.training.recipe.schedule import stable_epochs
from zerovision.training.steps.carrier import Run
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.world.collectives import broadcast_object, error_on_any_rank, gather_objects

BYTES = 4  # of a weight in fp32
SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 120.0
GIVE_UP_SECONDS = 600.0  # of failed saves; in this time, somebody may free disk space, or a file server may restart
GIVE_UP_SECONDS_OF_STOP = 60.0  # the person or scheduler that asked a run to stop is waiting for its end


@dataclass
class _Save:
    """One save, running or done; `error` and `is_last_try` are the same on all ranks."""

    name: str
    position: int
    is_best: bool
    stall_seconds: float  # for which training waited for the previous save and for the copy
    seconds: float = 0.0
    error: str | None = None
    is_last_try: bool = False  # saves have failed for so long that the run ends


class Saver(Observer):
    """Saves the checkpoints of one run; every rank has a saver."""

    span = "saving"

    def __init__(self, run: Run, identity: dict[str, Any], guard: NonFiniteGuard) -> None:
        self._run, self._identity, self._guard = run, identity, guard  # `run` has no observers yet
        self._folder, self._config, self._state, self._world = run.folder.checkpoints, run.config, run.state, run.world
        self._loggers, self._heartbeat, self._frozen = run.loggers, run.start.heartbeat, run.model.frozen
        self._patience_s = SLOW_PHASE * run.config.hang_timeout
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._running: _Save | None = None
        self._unsaved_best: Callable[[], None] | None = None
        self._backoff = Backoff()
        self._has_given_up = False
        self._failed_position = 0
        self._last_start = time.monotonic()

    def before_step(self, position: int) -> None:
        """Request a save when the minutes between two saves have passed or a failed save is due for a retry.

        Rank 0's clock decides; the other ranks learn about the decision from rank 0.
        """
        if not self._world.is_main:
            return
        minutes, now = self._config.save_every_minutes, time.monotonic()
        if minutes > 0 and now - self._last_start >= 60 * minutes:
            self._last_start = now
            self._run.start.stop.request_save()
        elif now >= self._backoff.retry_at:
            self._backoff.retry_at = math.inf  # one retry after each failure
            self._run.start.stop.request_save()

    def between_steps(self, *, save_due: bool, failed: bool) -> None:
        """Save a checkpoint if one is due and no rank has failed; a collective."""
        self.note_outcome()
        every = self._config.save_every_steps
        if save_due or (every > 0 and self._run.position % every == 0):
            self._guard.settle()
            if any(gather_objects(failed, self._world)):
                self.wait()  # for the previous save
            else:
                self.save()

    def after_epoch(self, write_best: Callable[[], None] | None) -> None:
        self.save(write_best)

    def check_room(self, *, is_new: bool) -> str:
        """Return a note if the disk has too little space for all checkpoints to keep, otherwise ''; a collective.

        Args:
            is_new: whether the run has no checkpoint yet, and was not restarted by its launcher.

        Raises:
            UserError: on all ranks, if the disk has too little space for the weights and one checkpoint of a new run.
        """
        state, left_out = self._state.engine.state(), self._frozen.names if self._frozen else ()
        shards = [shard for shard in state.shards if shard.name not in left_out]
        own = [tensor.nbytes for shard in shards for tensor in shard.tensors.values()]
        each = sum(gather_objects(sum(own), self._world))
        weights = BYTES * sum(map(math.prod, state.shapes.values()))
        free = 0
        if self._world.is_main:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self._folder).free
        free = broadcast_object(free, self._world)
        sizes = f"the weights take {format_bytes(weights)}, a checkpoint {format_bytes(each)}"
        cure = "free space there, or use another --log-dir"
        if is_new and free < weights + each:
            raise AgreedError(f"{self._folder.parent} has {format_bytes(free)} free: {sizes}: {cure}.")
        kept = self._config.keep_last + 2  # while one is written, all others and the best epoch's remain
        if free < weights + kept * each:
            return f"{self._folder.parent} has {format_bytes(free)} free for up to {kept} checkpoints: {sizes}: {cure}"
        return ""

    def save(self, write_best: Callable[[], None] | None = None) -> None:
        """Copy the current state and start to write the copy; a collective.

        Args:
            write_best: function that writes the best epoch's weights, called only on rank 0; None if the state is not
                that of the best epoch.

        Raises:
            RunEnded: on all ranks, if saves have failed for `GIVE_UP_SECONDS`.
        """
        start = self._last_start = time.monotonic()
        self.wait()
        if write_best is not None:
            self._unsaved_best = write_best
        engine, progress = self._state.engine, self._state.progress
        state = engine.state()
        facts = {
            "progress": progress,
            "identity": self._identity,
            "config": dataclasses.asdict(self._config),
            "applied_steps": state.applied_steps,
            "loss_scale": engine.loss_scale.state() if engine.loss_scale else None,
            "parameters": {name: list(shape) for name, shape in state.shapes.items()},
            "data_ranks": self._world.data.size,
            "frozen": self._frozen.facts if self._frozen else None,
        }
        # Ranks with the same images have equal sums, and ranks with the same layers have equal buffers, so only one of
        # these ranks saves them.
        sums = self._state.sums.state() if self._world.replica.is_main else None
        saved = state if state.saves_buffers else dataclasses.replace(state, buffers={})
        self._snapshot.take(saved, sums, self._frozen.names if self._frozen else (), self._world.data.rank)
        if self._snapshot.copied is not None:
            engine.wait_before_change(self._snapshot.copied)
        save = self._running = _Save(
            checkpoint_name(progress),
            position=self._run.plan.position(progress),
            is_best=write_best is not None,
            stall_seconds=time.monotonic() - start,
        )
        self._thread = threading.Thread(target=self._write, args=(save, facts), name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no memory for the thread's stack, or too many threads: training waits
            self._thread = None
            self._write(save, facts)

    def note_outcome(self) -> None:
        """Log a save that has ended since the last call; cheap enough to be called at every step."""
        if self._running is None or (self._thread is not None and self._thread.is_alive()):
            return
        save, self._thread, self._running = self._running, None, None
        self._backoff.note(failed=save.error is not None)
        self._has_given_up = save.is_last_try
        values = {"step": save.position, "name": save.name}
        if save.error is None:
            self._unsaved_best = None
            times = {"stall_seconds": round(save.stall_seconds, 4), "seconds": round(save.seconds, 3)}
            self._loggers.event("checkpoint", values | times)
            if self._world.is_main:
                self._heartbeat.checkpoint_saved(save.position)
            return
        self._failed_position = save.position
        self._loggers.event("checkpoint_failed", values | {"error": save.error})
        self._loggers.message(
            f"checkpoint {save.name} could not be saved ({save.error}): the previous one is kept"
            + ("" if save.is_last_try else f"; the next attempt follows within {self._backoff.delay_s():.0f} s")
        )

    def finish(self, *, is_stop: bool = False) -> None:
        """Wait for the running save, and retry with the current state while saves fail; a collective.

        A signal ends the wait between attempts: one last attempt follows immediately, and a second signal skips it. If
        this attempt fails, or saves have failed for `GIVE_UP_SECONDS` (`GIVE_UP_SECONDS_OF_STOP` if the run was asked
        to stop), RunEnded is raised on all ranks.
        """
        self.wait()
        if is_stop:
            self._backoff.give_up_s = GIVE_UP_SECONDS_OF_STOP
        while self._backoff.is_failing:
            self.save()
            self.wait()
            if self._backoff.is_failing:
                delay_s = self._backoff.delay_s()
                self._heartbeat.beat("save", self._failed_position, self._patience_s + delay_s)
                if self._run.start.stop.wait(self._world, delay_s, self._failed_position, is_stopping=is_stop):
                    self._loggers.message("signal: the last attempt to save; a second signal skips it")
                    self._backoff.give_up_s = 0.0

    def wait(self) -> None:
        """Wait for the running save; raise `RunEnded` if saves have failed for too long."""
        if self._thread is not None:
            self._heartbeat.beat("save", self._running.position if self._running else -1, self._patience_s)
            self._thread.join()
        self.note_outcome()
        if self._has_given_up:
            raise RunEnded(
                f"checkpoints could not be saved in {self._folder} for {self._backoff.failing_s():.0f} s "
                "(the log says why); make room there and start again with --resume auto.",
                CANNOT_SAVE_EXIT_CODE,
                self._failed_position,
            )

    def _write(self, save: _Save, facts: dict[str, Any]) -> None:
        """Write this rank's shard, agree on success with the other ranks, and commit the checkpoint; a collective.

        This method runs in the thread. Its messages use `World.save_group`, so that they never mix with the messages of
        the training steps.
        """
        start = time.monotonic()
        try:
            save.error = self._write_and_commit(save, facts)
            if save.error is not None:
                self._agree(lambda: discard(self._folder, save.name), only_main=True)
                has_expired = self._backoff.is_failing and self._backoff.failing_s() >= self._backoff.give_up_s
                verdicts = gather_objects(has_expired, self._world, self._world.save_group)
                save.is_last_try = verdicts[0]  # by rank 0's clock
        except Exception as error:  # if a rank died, the agreement fails, and so will the training steps
            save.error = one_line(f"{type(error).__name__}: {error}")
        save.seconds = time.monotonic() - start

    def _write_and_commit(self, save: _Save, facts: dict[str, Any]) -> str | None:
        temporary = temporary_folder(self._folder, save.name)
        own: list[ShardFacts] = []

        def prepare() -> None:
            discard(self._folder, save.name)
            temporary.mkdir(parents=True)
            if self._frozen:
                self._frozen.link_into(temporary)

        def commit_all() -> None:
            # Before the checkpoint, because a run that resumes from it assumes that these weights were written.
            if self._unsaved_best is not None:
                self._unsaved_best()
            manifest = Manifest(shards=tuple(ShardFacts(*row) for row in rows), **facts)
            # The checkpoint from which a run with more epochs continues; see `resume.before_decay`.
            kept = checkpoint_name(Progress(stable_epochs(self._config)))
            keep_last = self._config.keep_last
            commit(self._folder, save.name, manifest, is_best=save.is_best, keep_last=keep_last, kept=kept)

        error = self._agree(prepare, only_main=True)
        if error is None:
            path = temporary / shard_name(self._world.rank)
            error = self._agree(lambda: own.append(write_shard(path, self._snapshot)))
        if error is None:
            row = [own[0].bytes, own[0].sha256]
            rows = gather_objects(row, self._world, self._world.save_group)
            error = self._agree(commit_all, only_main=True)
        return error

    def _agree(self, action: Callable[[], None], *, only_main: bool = False) -> str | None:
        """Run `action`; return the first failing rank's error, or None, on all ranks; a collective of `save_group`."""
        error = None
        try:
            if self._world.is_main or not only_main:
                action()
        except (OSError, SafetensorError, UserError) as failure:
            error = f"rank {self._world.rank}: {one_line(failure)}"
        except Exception as failure:  # any error, because the other ranks wait for the outcome
            error = f"rank {self._world.rank}: {type(failure).__name__}: {one_line(failure)}"
        return error_on_any_rank(error, self._world, self._world.save_group)


class Backoff:
    """Exponential backoff after failed saves, on one rank's clock.

    The next attempt follows when saves have been failing for twice as long as at the last attempt.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # time of the first failure since the last success
        self.retry_at = math.inf  # time of the next attempt, if one is due
        self.give_up_s = GIVE_UP_SECONDS  # number of seconds of failing saves after which no attempt follows

    @property
    def is_failing(self) -> bool:
        """Whether the last save failed."""
        return self._since is not None

    def note(self, *, failed: bool) -> None:
        """Record whether a save failed."""
        if not failed:
            self._since, self.retry_at = None, math.inf
            return
        if self._since is None:
            self._since = time.monotonic()
        self.retry_at = time.monotonic() + self.delay_s()

    def failing_s(self) -> float:
        """Return the number of seconds for which saves have been failing."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def delay_s(self) -> float:
        """Return the number of seconds between a failure now and the next attempt."""
        left_s = max(self.give_up_s - self.failing_s(), 0.0)
        return min(max(self.failing_s(), SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS, left_s)
