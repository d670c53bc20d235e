"""Starts a machine's ranks and their launcher once: forwards signals, and kills processes that do not exit."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from zerovision.launch.node_launcher import NodeLauncher
from zerovision.launch.process_tree import POLL_SECONDS, HeartbeatFolder, LaunchProcesses, shell_exit_code
from zerovision.launch.rank_monitor import AGREED_CODES, STOP_CODES, Death, RankMonitor, how_it_ended
from zerovision.training.base.control_groups import oom_kills
from zerovision.training.base.errors import OUT_OF_MEMORY_EXIT_CODE, USER_ERROR_EXIT_CODE
from zerovision.training.base.heartbeat import SLOW_IMPORT_S

LOOK_SECONDS = 0.25  # between two checks of the ranks
LEFTOVER_SECONDS = 5.0  # helpers such as multiprocessing's resource tracker end a moment after their parent
REPEAT_SECONDS = 0.5  # `timeout` and terminals may send two signals for one request to stop
DEAD_RANK_SECONDS = 5.0  # time for the other ranks to print and exit; they may wait for the dead rank in a collective
NO_RANK_SECONDS = 2 * SLOW_IMPORT_S  # time limit for the first rank to start; the launcher may import modules for all
KERNEL_KILL_SECONDS = 60.0  # a failure this soon after the kernel has killed a process is put down to a lack of memory
LAUNCHER_SECONDS = 3.0  # time for a launcher to notice that its ranks have ended
HANG_CODE = 124  # the exit code of `timeout`
# Exit codes after which another start would end the same way.
FINAL_CODES = AGREED_CODES | {USER_ERROR_EXIT_CODE, OUT_OF_MEMORY_EXIT_CODE}
# Signal that the launch receives -> signal that its ranks receive.
PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}


def receive_signals(note: Callable[[int], object] = lambda _number: None) -> list[int]:
    """Install handlers that append the signals in `PASSED_ON` to a list and call `note`; return the list."""
    received: list[int] = []

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        note(number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, receive)
    return received


@dataclass(frozen=True)
class Ending:
    """How one start of the launcher ended."""

    code: int  # in the shell's form
    reason: str = ""  # without a trailing period
    is_final: bool = True  # whether no start with the same settings may follow
    # After a hang, whether the hung rank's process was running rather than stopped, and the rank's step: the machine
    # with the smallest value is the most likely cause.
    hang_order: tuple[bool, int] | None = None


class NodeRun:
    """One start of the launcher and its ranks, from the first process to the last."""

    def __init__(
        self,
        launch: LaunchProcesses,
        launcher: NodeLauncher,
        folder: HeartbeatFolder,
        received: list[int],
        stop_timeout_s: float,
    ) -> None:
        """Prepare a start; signal handlers append received signals to `received`."""
        self.monitor = RankMonitor(launcher, folder)
        self._launch, self._launcher, self._folder, self._received = launch, launcher, folder, received
        self._stop_timeout_s = stop_timeout_s  # for the ranks to save and exit after a signal
        self._sent = 0  # the signal sent to stop the ranks, or 0 if none
        self._deadline = math.inf  # when the ranks are killed
        self._oom_kills = 0  # number of processes that the kernel has killed to free memory
        self._kernel_killed = -math.inf  # when the last such kill was noticed
        self._cause: Death | None = None  # a rank's failure that was noticed while the launcher was running
        self._is_abandoned = False

    def run(self, command: list[str], environment: dict[str, str]) -> Ending:
        """Start the ranks; return when their processes have ended, including the launcher if no start can follow."""
        child = self._launcher
        self._oom_kills = oom_kills()
        child.start(command, environment)
        give_up = time.monotonic() + NO_RANK_SECONDS
        was_asked = False
        while child.poll() is None or child.living_ranks():
            if self._received and not was_asked:
                was_asked = True
                if not self._pass_on():  # the launcher is still starting, or already exiting: nothing to save
                    self._launch.kill()
                    return Ending(0 if self._is_done() else 128 + self._sent)
            elif child.returncode is not None and not self._sent:
                print("the launcher ended before its ranks: stopping them", file=sys.stderr)
                self._send(signal.SIGTERM)
            self.monitor.look()
            self._count_oom_kills()
            if child.poll() is None and not self._sent:
                self._cause = self.monitor.first_failure()
            waits = self._sent or self.monitor.first_failure()  # ranks that wait for a dead rank are killed below
            if not waits and (hung := self.monitor.hung()):
                hang_order = (not self.monitor.is_stopped(hung[0].rank), hung[0].step)
                self.monitor.report_hang(hung)
                self._launch.kill(spared_pid=child.pid)
                return Ending(HANG_CODE, f"rank {hung[0].rank} hung", False, hang_order)
            if not child.ranks and time.monotonic() > give_up:
                self._launch.kill()
                return Ending(HANG_CODE, f"the launcher hung: no rank started in {NO_RANK_SECONDS:.0f} s", False)
            self._end_what_is_late()
            time.sleep(LOOK_SECONDS)
        self.monitor.look()
        self._cause = self._cause and self.monitor.first_failure()
        assert child.returncode is not None
        ending = self._ending(child.returncode, was_asked)
        self._end_leftovers(at_once=not ending.is_final)
        return ending

    def abandon(self) -> None:
        """Make `run` kill every process immediately and return; called from another thread."""
        self._is_abandoned = True

    def _pass_on(self) -> int:
        """Forward the first received signal to the ranks; return the number of running ranks."""
        living = self._send(PASSED_ON[signal.Signals(self._received[0])])
        if living:
            time.sleep(REPEAT_SECONDS)
            self._received.clear()
        return living

    def _send(self, number: int) -> int:
        self._sent = number
        self._deadline = time.monotonic() + self._stop_timeout_s
        return self._launcher.signal_ranks(number)

    def _end_what_is_late(self) -> None:
        """Kill ranks that have not exited in time, and a launcher that does not exit after its ranks."""
        now = time.monotonic()
        if failure := self.monitor.first_failure():
            self._deadline = min(self._deadline, failure.seconds + DEAD_RANK_SECONDS)
        elif self.monitor.all_ended():
            self._deadline = min(self._deadline, now + DEAD_RANK_SECONDS)
        is_late = now > self._deadline + LAUNCHER_SECONDS
        if self._is_abandoned or is_late or (self._sent and signal.SIGINT in self._received):
            self._launch.kill()
        elif now > self._deadline:
            self._launcher.signal_ranks(signal.SIGKILL)  # the launcher then exits with the code of the first failure

    def _ending(self, launcher_code: int, was_asked: bool) -> Ending:
        """Return how the start ended, from the launcher's exit code (-n: signal n) and the last heartbeats."""
        if self._is_done() and (launcher_code == 0 or self.monitor.all_ended(0)):
            return Ending(0)
        code = shell_exit_code(launcher_code) or 1
        passed_on = launcher_code > 0 and code > 128
        reason = f"{'a rank' if passed_on else 'the launcher'} {how_it_ended(launcher_code)}"
        if launcher_code == 0:
            reason += ", but rank 0 did not report that training is done"
        by_itself = launcher_code > 0
        failure = self._cause or (self.monitor.first_failure() if by_itself and not self._sent else None)
        if failure:
            reason = failure.describe(launcher_code)
            if failure.code and failure.code != -signal.SIGTERM:  # a launcher ends the other ranks with SIGTERM
                code = shell_exit_code(failure.code)
        elif by_itself or was_asked:  # otherwise the ranks exited because the launcher was killed
            code = next((stop for stop in STOP_CODES if self.monitor.all_ended(stop)), code)
        self._count_oom_kills()
        # The kernel may have killed any process: the launcher, or a rank's worker, after which the rank exits.
        if not was_asked and code not in FINAL_CODES and time.monotonic() - self._kernel_killed < KERNEL_KILL_SECONDS:
            which = ", the kernel's," if code == 128 + signal.SIGKILL else " after the kernel had killed a process"
            code, reason = OUT_OF_MEMORY_EXIT_CODE, f"{reason}{which} because memory ran out"
        return Ending(code, reason, is_final=was_asked or code in FINAL_CODES)

    def _count_oom_kills(self) -> None:
        if (kills := oom_kills()) > self._oom_kills:
            self._oom_kills, self._kernel_killed = kills, time.monotonic()

    def _is_done(self) -> bool:
        """Return whether training is done: on rank 0's machine, rank 0 reports it; elsewhere, all ranks exit with 0."""
        return self._folder.has_succeeded() if 0 in self._launcher.ranks else self.monitor.all_ended(0)

    def _end_leftovers(self, at_once: bool) -> None:
        if at_once:
            self._launch.kill(spared_pid=self._launcher.pid)
            return
        self._launcher.close()
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while self._launch.processes() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._launch.kill()
