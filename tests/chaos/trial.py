"""One training under faults: start, wait, inject, start again where a fault ends the launch, and judge the end."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil

from tests.chaos.case import SURVIVAL_FLAGS, Watch, run_folder
from tests.chaos.compare import differences
from tests.chaos.disk import small_disk
from tests.chaos.faults import FAULTS, NothingToHitError, Target
from tests.chaos.processes import POLL_SECONDS, kill_all, processes_of, ranks_of
from tests.chaos.records import Draw, Injection, TrialResult
from zerovision.launch.process_tree import is_alive

# From a signal to the end of the launch, and of every process of it. Data workers that are still importing block
# SIGTERM.
GRACE_SECONDS = 60.0
LEFTOVER_SECONDS = 10.0  # from the end of a launch that no signal ended to the end of every process of it
PATIENCE_SECONDS = 240.0  # without any progress
SETTLE_SECONDS = 1.0  # after a fault that spares the ranks, what they had under way is no proof of recovery
STEPS_UNTIL_STOP = 10  # a stop signal is agreed on within two steps


class MissedError(Exception):
    """The training did not do what was promised."""


class Trial:
    """Runs one training under the drawn faults.

    Args:
        result: number, case and folder; filled in while it runs.
        oracle: the uninterrupted run's folder.
        disk: where to mount a small disk: the log folder or the checkpoints folder; None for none.
        say: prints a line.
    """

    def __init__(self, result: TrialResult, oracle: Path, disk: Path | None, say: Callable[[str], None]) -> None:
        self.result = result
        self._oracle, self._disk, self._say = oracle, disk, say
        self._mark = uuid.uuid4().hex
        self._log_dir = result.folder / "logs"
        self._watch = Watch(run_folder(self._log_dir))
        self._finished = False
        self._rng = Random(f"ranks-{result.number}")

    def run(self, draws: list[Draw], deadline: float) -> TrialResult:
        """Inject the faults that are due before `deadline` (of `time.time`), let the training finish, and judge it."""
        start = time.time()
        self.result.folder.mkdir(parents=True)
        with contextlib.ExitStack() as at_the_end:
            if self._disk:
                at_the_end.enter_context(small_disk(self._disk))
            at_the_end.callback(kill_all, self._mark)
            try:
                self._start()
                for draw in draws:
                    if time.time() > deadline or not self._inject(draw):
                        self.result.unused.append(draw.kind)
                self._tick_until(lambda: False)
                self.result.differences = differences(run_folder(self._log_dir), self._oracle)
            except MissedError as error:
                self.result.miss = str(error)
            if self._disk and not self.result.identical:
                kill_all(self._mark)
                shutil.copytree(self._disk, self.result.folder / "disk")
        self.result.seconds = time.time() - start
        return self.result

    def _start(self) -> None:
        output, ranks = self.result.folder / "output.log", self._rng.choice(self.result.case.ranks)
        self._launch = self.result.case.start(ranks, self._mark, self._log_dir, output, *SURVIVAL_FLAGS)
        self._launcher = psutil.Process(self._launch.pid)
        self._started_at = time.time()
        self.result.ranks.append(ranks)

    def _inject(self, draw: Draw) -> bool:
        """Wait for the moment and inject; return False where the training finished before."""
        self._tick_until(lambda: self._is_moment(draw))
        due = time.time() + draw.delay_s
        self._tick_until(lambda: time.time() > due)
        target = Target(self._mark, self._launcher, self._watch.checkpoints, self._disk, draw.rng)
        while not self._finished:
            ranks, at, where = [seen.process for seen in ranks_of(self._mark)], time.time(), self._where()
            try:
                text = FAULTS[draw.kind].inject(target)
            except NothingToHitError:
                self._tick()
                target = Target(self._mark, self._launcher, self._watch.checkpoints, self._disk, draw.rng)
                continue
            for earlier in self._pending():
                earlier.overtaken = True
            self.result.injections.append(Injection(draw.kind, f"{text} {where}", at, ranks, time.time()))
            self._say(f"{text} {where}")
            return True
        return False

    def _is_moment(self, draw: Draw) -> bool:
        last = self.result.injections[-1:]
        since = last[0].calm_at if last else self._started_at
        is_starting = (
            since and self._watch.last_progress() <= since and not (last and any(map(is_alive, last[0].ranks)))
        )
        if draw.at_start_up and is_starting:
            return bool(ranks_of(self._mark))
        progress = self._watch.last_save if FAULTS[draw.kind].needs == "checkpoint" else self._watch.last_progress
        return not self._pending() and progress() > since

    def _where(self) -> str:
        starting = self._pending() or self._watch.last_progress() < self._started_at
        return f"during start-up, {self._watch.position()} reached" if starting else f"at {self._watch.position()}"

    def _pending(self) -> list[Injection]:
        return [injection for injection in self.result.injections if not injection.recovered_at]

    def _tick_until(self, condition: Callable[[], bool]) -> None:
        while not self._finished and not condition():
            self._tick()

    def _tick(self) -> None:
        time.sleep(POLL_SECONDS)
        self._note_recovery()
        code = self._launch.poll()
        if code is None:
            self._check_patience()
        else:
            self._after_end(128 - code if code < 0 else code)

    def _note_recovery(self) -> None:
        now = time.time()
        for injection in self._pending():
            if injection.calm_at:
                if self._watch.last_progress() > injection.calm_at:
                    self._check_launched_again(injection)
                    injection.recovered_at = now
            elif injection.fault.spares_ranks:
                if now > injection.done_at + SETTLE_SECONDS:
                    injection.calm_at = now
            elif not any(map(is_alive, injection.ranks)):
                injection.calm_at = now

    def _check_patience(self) -> None:
        now, pending = time.time(), self._pending()
        must_end = [injection for injection in pending if injection.fault.must_end]
        if must_end and now > must_end[0].done_at + GRACE_SECONDS and self._started_at < must_end[0].at:
            raise MissedError(f"after '{must_end[0].text}' the launch had not ended in {GRACE_SECONDS:.0f} s")
        last = max([self._watch.last_progress(), self._started_at, *(injection.done_at for injection in pending)])
        if now > last + PATIENCE_SECONDS:
            raise MissedError(f"no progress for {PATIENCE_SECONDS:.0f} s, {self._watch.position()} reached")

    def _after_end(self, code: int) -> None:
        self._check_no_process()
        open_faults = self._pending()
        # Named in the message: what spares the ranks may end a training later.
        open_faults += [last for last in self.result.injections[-1:] if last.fault.spares_ranks]
        if code == 0:
            self._check_stopped()
            for injection in self._pending():
                injection.recovered_at = time.time()
            self._finished = True
        elif any(code in injection.fault.ends_with for injection in open_faults):
            self._start()
        else:
            after = f"after '{open_faults[-1].text}'" if open_faults else "before any fault"
            raise MissedError(f"{after} the launch ended with exit code {code}")

    def _check_no_process(self) -> None:
        waits = [time.time() + LEFTOVER_SECONDS]
        waits += [injection.done_at + GRACE_SECONDS for injection in self._pending() if injection.fault.must_end]
        while living := processes_of(self._mark):
            if time.time() > max(waits):
                names = "; ".join(f"pid {seen.process.pid}: {' '.join(seen.words)[:200]}" for seen in living)
                raise MissedError(f"the launch has ended, these processes of it have not: {names}")
            time.sleep(POLL_SECONDS)

    def _check_launched_again(self, injection: Injection) -> None:
        if injection.fault.must_end and self._started_at < injection.at:
            raise MissedError(f"after '{injection.text}' the launch started new ranks instead of ending")

    def _check_stopped(self) -> None:
        """Raise where a training that was told to stop went on to its end instead."""
        for injection in self._pending():
            later = [entry for entry in self._watch.steps() if entry["time"] > injection.done_at]
            if injection.fault.must_end and len(later) > STEPS_UNTIL_STOP:
                raise MissedError(f"after '{injection.text}' the training went on for {len(later)} steps, to its end")
