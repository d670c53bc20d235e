"""Saves that fail: training goes on, they are tried again, and only lasting failure ends a run. No time passes here."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import signal
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_checkpoints import ALONE, IDENTITY, PretendedRank, holds_weights_of, newest

from tests.kit import train
from zerovision.training.base.errors import CANNOT_SAVE_EXIT_CODE, USER_ERROR_EXIT_CODE, RunEnded, UserError
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint import store
from zerovision.training.checkpoint.store import TrainState
from zerovision.training.config import TrainConfig
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.steps import saver as saver_module
from zerovision.training.steps.carrier import Run, RunModel, Start
from zerovision.training.steps.saver import Saver
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.world import signals
from zerovision.training.world.signals import StopRequest

pytestmark = pytest.mark.usefixtures("no_sync")
WEIGHTS = "model.safetensors"
STEPS_PER_EPOCH = 10


class Training:
    """One second a step, saves after every `every_steps`; the disk takes nothing in the given seconds."""

    def __init__(self, folder: Path, monkeypatch, full=(), every_steps=1) -> None:
        self.now, self.attempts = 1000.0, []
        self._full = [(self.now + begin, self.now + end) for begin, end in full]
        for name in ("write_shard", "commit"):
            monkeypatch.setattr(saver_module, name, self._refusing(getattr(saver_module, name), name == "write_shard"))
        config = TrainConfig(save_every_steps=every_steps, save_every_minutes=0.0, keep_last=2)
        plan = BatchPlan(STEPS_PER_EPOCH, 1, 1, 1, seed=0)
        self.folder, self.engine = folder, PretendedRank()
        self.engine.applied_steps = 9
        self.sums = ScoreSums(2, ALONE.device)
        self.sums.restore(self.engine.epoch_sums)
        self.state = TrainState(self.engine, self.sums, Progress())
        start, paths = Start(), SimpleNamespace(checkpoints=folder)
        run = Run(
            config=config, world=ALONE, start=start, folder=paths, plan=plan, model=RunModel(None), state=self.state
        )
        guard = SimpleNamespace(settle=lambda: None)
        for module in (saver_module, signals):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        self.saver = Saver(run, IDENTITY, guard)
        self.step, self.stop, self.signal_at = 0, start.stop, math.inf

    def _refusing(self, write, counts):
        def refuse_or_write(*arguments, **options):
            if counts:
                self.attempts.append(self.now - 1000.0)
            if any(begin <= self.now < end for begin, end in self._full):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*arguments, **options)

        return refuse_or_write

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)
        if self.now - 1000.0 >= self.signal_at:
            self.signal_at = math.inf
            self.stop._remember(signal.SIGTERM, None)

    @property
    def progress(self) -> Progress:
        return Progress(epoch=self.step // STEPS_PER_EPOCH, step=self.step % STEPS_PER_EPOCH)

    def train(self, steps: int) -> None:
        """Do as the loop does after each step: ask at a step, save at the next, as the answer travels one step."""
        asked = False
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + 1.0
            self.saver.before_step(self.step)
            answer, asked = asked, self.stop.poll(ALONE).save_due
            self.state.progress = self.progress
            self.saver.between_steps(save_due=answer, failed=False)
            if self.saver._thread is not None:
                self.saver._thread.join()  # a save takes less than a step

    def save(self, write_best=None) -> None:
        self.state.progress = self.progress
        self.saver.save(write_best)
        self.saver._thread.join()  # a save takes less than a step

    def finish(self, **options) -> None:
        self.state.progress = self.progress
        self.saver.finish(**options)

    def newest_step(self) -> int:
        progress = newest(self.folder)[0].manifest.progress
        return progress.epoch * STEPS_PER_EPOCH + progress.step


def test_a_disk_full_for_six_seconds_ends_no_run_though_saves_are_due_each_second(tmp_path, monkeypatch):
    training = Training(tmp_path, monkeypatch, full=[(4.5, 10.5)])
    training.train(10)
    assert training.newest_step() == 4
    training.train(3)
    training.finish()
    assert training.newest_step() == 13
    assert training.attempts == [float(second) for second in range(1, 14)]


def test_a_failed_save_is_tried_again_long_before_the_next_is_due(tmp_path, monkeypatch):
    training = Training(tmp_path, monkeypatch, full=[(0, 45)], every_steps=10_000)
    training.train(2)
    training.save()
    training.train(100)
    waits = [later - earlier for earlier, later in itertools.pairwise(training.attempts)]
    assert waits[0] <= 3  # a second, and a step or two until all ranks know
    assert all(earlier <= later <= 3 * earlier + 3 for earlier, later in itertools.pairwise(waits)), waits
    assert 45 <= training.attempts[-1] < 90
    assert training.newest_step() == int(training.attempts[-1])  # the state of then, not that of the failure
    assert training.now == 1102.0  # no waiting


def test_only_lasting_failure_ends_a_run_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch):
    training = Training(tmp_path, monkeypatch, full=[(3.5, 10_000)])
    training.train(602)
    with pytest.raises(RunEnded, match=r"for 60\d s .* make room there") as ended:
        training.train(5)
    assert ended.value.exit_code == CANNOT_SAVE_EXIT_CODE
    assert training.newest_step() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step-00000-0000002", "step-00000-0000003"]


def test_the_weights_of_the_best_epoch_are_written_by_a_later_save(tmp_path, monkeypatch):
    training = Training(tmp_path / "checkpoints", monkeypatch, full=[(0, 3.5)])
    best = tmp_path / WEIGHTS
    training.train(1)
    training.save(lambda: best.write_text("epoch 1"))
    training.train(2)
    assert not best.exists()
    training.train(1)
    assert best.read_text() == "epoch 1"


def test_whatever_a_write_ends_with_the_other_ranks_hear_of_it(tmp_path, monkeypatch):
    def fail() -> None:
        raise MemoryError("no room for a copy")

    training = Training(tmp_path, monkeypatch)
    assert training.saver._agree(fail) == "rank 0: MemoryError: no room for a copy"


@pytest.mark.parametrize(("full_s", "is_stop", "is_saved"), [(500, False, True), (50, True, True), (500, True, False)])
def test_the_last_save_waits_for_room_but_a_stop_not_for_long(tmp_path, monkeypatch, full_s, is_stop, is_saved):
    training = Training(tmp_path, monkeypatch, full=[(5.5, 5.5 + full_s)])
    training.train(8)
    if is_saved:
        training.finish(is_stop=is_stop)
    else:
        with pytest.raises(RunEnded):
            training.finish(is_stop=is_stop)
        assert training.now <= 1000 + 8 + 65
    assert training.newest_step() == (8 if is_saved else 5)


@pytest.mark.parametrize("is_stop", [False, True], ids=["finished", "stopped before"])
@pytest.mark.parametrize(("full_s", "is_saved"), [(20, True), (10_000, False)])
def test_a_signal_ends_the_waiting_at_once_after_one_more_try(tmp_path, monkeypatch, is_stop, full_s, is_saved):
    training = Training(tmp_path, monkeypatch, full=[(5.5, 5.5 + full_s)])
    if is_stop:  # this one is what is waited for
        training.stop._remember(signal.SIGTERM, None)
        training.stop._times[0] -= 60
    training.train(8)
    # The tries come after 1, 2, 4, 8, ... s of failing since second 6: 22 lies between two, the next comes at 38.
    training.signal_at = 25.6 if is_saved else 30.0
    if is_saved:
        training.finish(is_stop=is_stop)
    else:
        with pytest.raises(RunEnded) as ended:
            training.finish(is_stop=is_stop)
        assert ended.value.exit_code == CANNOT_SAVE_EXIT_CODE
    assert training.now - 1000 == pytest.approx(25.6 if is_saved else 30, abs=0.5)
    assert training.attempts[-1] == pytest.approx(training.now - 1000, abs=0.5), "the last try"
    assert training.newest_step() == (8 if is_saved else 5)


def test_a_second_signal_ends_without_saving_but_not_the_same_one_passed_on(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    stop = StopRequest()
    stop._remember(signal.SIGTERM, None)
    assert stop.wait(ALONE, 600.0, 7, is_stopping=False), "one from before the waiting ends it, too"
    stop._remember(signal.SIGINT, None)
    assert not left, "within a second: a launcher has passed on what the terminal had sent to all"
    stop._times[0] -= 60
    with pytest.raises(RunEnded, match="without saving") as ended:
        stop._remember(signal.SIGINT, None)
    assert (ended.value.exit_code, ended.value.step) == (130, 7)
    stop._times[:] = [0.0]
    stop.wait(dataclasses.replace(ALONE, size=2), 600.0, 7, is_stopping=False)
    stop._remember(signal.SIGINT, None)
    assert left == [130], "a rank of several waits for none"


def test_a_commit_that_fails_half_way_keeps_what_was_good(tmp_path, monkeypatch):
    """The disk fills up between the new checkpoint's name and the pointer at it; the old one must not be gone yet."""
    training = Training(tmp_path, monkeypatch)
    training.train(2)
    point = store._point
    with monkeypatch.context() as patch:
        patch.setattr(store, "_point", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        training.train(3)
    assert store._point is point
    found, _ = newest(tmp_path)
    assert holds_weights_of(found, 0)
    assert training.newest_step() == 2
    training.train(1)
    assert training.newest_step() == 6


Usage = namedtuple("Usage", "free")


def test_a_disk_without_room_for_a_checkpoint_is_said_before_the_first_step(tmp_path, monkeypatch):
    training = Training(tmp_path / "run" / "checkpoints", monkeypatch)
    training.train(1)
    weights = 4 * sum(map(math.prod, training.engine.state().shapes.values()))
    each = 3 * weights  # with two moments
    (shard,) = newest(training.folder)[0].path.glob("shard-*")
    assert each <= shard.stat().st_size <= each + 2000, "what a save really writes has some facts besides"

    def with_free(free, **given):
        monkeypatch.setattr(saver_module.shutil, "disk_usage", lambda _: Usage(free))
        return training.saver.check_room(**given)

    line = rf"^{tmp_path}/run has 479 B free: the weights take 120 B, a checkpoint 360 B: free space there, or use ano"
    with pytest.raises(UserError, match=line):
        with_free(weights + each - 1, is_new=True)
    few = "free for up to 4 checkpoints"
    assert few in with_free(0, is_new=False), "a run that goes on may get room"
    assert few in with_free(weights + each, is_new=True)
    assert few in with_free(weights + 4 * each - 1, is_new=True)
    assert with_free(weights + 4 * each, is_new=True) == ""


def test_a_run_that_could_not_be_saved_is_refused_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saver_module.shutil, "disk_usage", lambda _: Usage(1000))
    folder = train(tmp_path, code=USER_ERROR_EXIT_CODE, data="fake", image_size=8, batch_size=125, cache="off")
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith(f"error: {folder} has 1 kB free: the weights take ")
    assert not folder.exists()
