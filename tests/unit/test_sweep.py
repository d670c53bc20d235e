"""Sweeps: which trials there are, which go on, and what is left of failures and stops; trainings are acted out."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import statistics
import subprocess
import threading
from pathlib import Path

import made_runs
import pytest

from tests.kit import wait_until
from zerovision.delivery.report.page import MOST_RUNS
from zerovision.extras import sweep as sweeps
from zerovision.extras.settings import SweepSettings
from zerovision.extras.sweep import best_trial, prepare, rows_of, write_page, write_table
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import REPO_ROOT

WORDS = ("basic_cnn", "ddp", "1", "32", "9", "--data", "digits")
# A launcher that trains to a top-1 that its rate decides, saves on SIGTERM and goes on from there.
ACTOR = """
import json, os, pathlib, signal, sys, time
words = dict(word.lstrip("-").split("=", 1) for word in sys.argv if "=" in word)
if words["learning-rate"] == "0.5":
    print("error: no such luck")
    sys.exit(1)
if words.get("hosts") == "node-2":
    print("ssh: no route")
    sys.exit(69)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
folder = pathlib.Path(words["log-dir"], "runs", words["run-name"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "line").write_text(" ".join(sys.argv))
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
with (folder / "starts").open("a") as starts:
    print(done, file=starts)
for epoch in range(done + 1, 10):
    if stopped:
        sys.exit(143)
    with metrics.open("a") as lines:
        top1 = float(words["learning-rate"]) * epoch
        print(json.dumps({"kind": "epoch", "epoch": epoch, "best_by": "top1", "score": top1}), file=lines)
    while str(epoch) in os.environ.get("RUNGS", "") and not stopped:  # however slow the machine is
        time.sleep(0.02)
"""


@pytest.fixture
def actor(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "actor.py"
    path.write_text(ACTOR)
    monkeypatch.setattr(sweeps, "LAUNCHER", path)
    return tmp_path


def made(folder: Path, *varied: str, name: str = "rates", **values) -> SweepSettings:
    words = values.pop("words", (*WORDS, f"--log-dir={folder}"))
    return SweepSettings(name=name, words=words, vary=varied, **values)


def best_of(running: sweeps.RunningSweep) -> str:
    """The flags of the best trial, which the first row of the table is of."""
    rows = rows_of(running)
    best = best_trial(rows)
    assert rows[0].values.items() <= best.values.items()
    return ",".join(best.values.values())


def acted(running: sweeps.RunningSweep, scores: list[list[float]], states: list[str]) -> sweeps.RunningSweep:
    """A sweep whose trials have had these scores, epoch by epoch."""
    for trial, top1, state in zip(running.trials, scores, states, strict=True):
        lines = [{"kind": "epoch", "epoch": n, "best_by": "top1", "score": one} for n, one in enumerate(top1, 1)]
        trial.folder.mkdir(parents=True)
        (trial.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        trial.epochs, trial.score = sweeps._progress(trial.folder)
        trial.state = state
    return running


def values_of(*varied: str, **values) -> list[dict[str, str]]:
    return list(sweeps._combinations(made(Path(), *varied, words=WORDS, **values)))


def test_a_grid_is_all_combinations():
    found = values_of("learning-rate=0.1,0.2", "--crop-scale=0.35,1|0.5,1")
    assert [list(one.values()) for one in found] == [
        ["0.1", "0.35,1"],
        ["0.1", "0.5,1"],
        ["0.2", "0.35,1"],
        ["0.2", "0.5,1"],
    ]


def test_two_dots_between_other_things_than_numbers_are_no_range():
    assert [one["data"] for one in values_of("data=/a/../b,/c")] == ["/a/../b", "/c"]


def test_draws_are_from_the_range_and_the_same_for_a_seed():
    ranges = ("learning-rate=0.0001..1:log", "weight-decay=0.1..0.3", "head-epochs=2..4", "optimizer=sgd,adamw")
    found = values_of(*ranges, trials=400, seed=3)
    assert found == values_of(*ranges, trials=400, seed=3) != values_of(*ranges, trials=400, seed=4)
    rates = [math.log10(float(one["learning-rate"])) for one in found]
    assert -4 <= min(rates) < max(rates) <= 0
    assert statistics.mean(rates) == pytest.approx(-2, abs=0.2)
    assert {one["head-epochs"] for one in found} == {"2", "3", "4"}
    assert {one["optimizer"] for one in found} == {"sgd", "adamw"}
    assert statistics.mean(float(one["weight-decay"]) for one in found) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("trials", [1, 3, 4, 9])
@pytest.mark.parametrize(("rates", "seeds"), [("0.001,0.01", "0,1"), ("0.001,0.01", "2..3")])
def test_no_combination_is_drawn_twice(rates, seeds, trials):
    """The draws stay in their order; if there are fewer combinations than trials, each is drawn once."""
    for seed in range(9):
        draws, drawn = random.Random(seed), []
        for _ in range(1000):
            rate = draws.choice(rates.split(","))
            drawn.append((rate, draws.choice(seeds.split(",")) if "," in seeds else str(draws.randint(2, 3))))
        found = values_of(f"learning-rate={rates}", f"seed={seeds}", trials=trials, seed=seed)
        assert [tuple(one.values()) for one in found] == list(dict.fromkeys(drawn))[:trials]
        assert len(found) == min(trials, 4)


def test_a_note_says_that_there_are_fewer_combinations_than_trials(actor, capfd):
    note = "note: --trials 5 drew only 2 different combinations\n"
    assert sweeps.run(made(actor, "learning-rate=0.01,0.02", trials=5)) == 0
    assert capfd.readouterr().out.startswith(note)
    assert sweeps.run(made(actor, "learning-rate=0.01,0.02", trials=2, name="both")) == 0
    assert "--trials" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("trials", "halving", "rungs"), [(9, 3, [1, 3, 9]), (4, 2, [3, 5, 9]), (3, 0, [9]), (27, 3, [1, 3, 9])]
)
def test_rungs(tmp_path, trials, halving, rungs):
    rates = "learning-rate=" + ",".join(str((number + 1) / 1000) for number in range(trials))
    assert prepare(made(tmp_path, rates, halving=halving)).rungs() == rungs


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_better_third_goes_on_and_a_failure_is_a_row(actor, jobs, monkeypatch):
    monkeypatch.setenv("RUNGS", "1 3")
    rates = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.5, 0.08]
    asked = made(actor, "learning-rate=" + ",".join(map(str, rates)), halving=3, jobs=jobs)
    running = prepare(asked)
    yielded = [(trial.number, trial.epochs, trial.state) for trial in running.run()]
    assert [number for number, *_ in yielded] == [*range(1, 10), 9, 7, 6, 9]  # each rung's in order of their scores
    assert [trial.epochs for trial in running.trials] == [*(1 if t not in (6, 7) else 3 for t in range(1, 8)), 0, 9]
    assert running.trials[7].state == "exit code 1: error: no such luck"
    assert [running.trials[index].state for index in (0, 8)] == ["paused", "finished"]
    assert best_of(running) == "0.08"
    starts = (actor / "runs" / "rates-9" / "starts").read_text().split()
    assert starts == ["0", "1", "3"]  # each rung goes on where the last one ended
    again = prepare(asked)  # nothing but the failure is left to do
    assert [(trial.number, trial.epochs, trial.state) for trial in again.run()][:9] == [
        (trial.number, trial.epochs, trial.state) for trial in running.trials
    ]
    assert (actor / "runs" / "rates-9" / "starts").read_text().split() == starts


def test_stopped_and_continued(actor):
    asked = made(actor, "learning-rate=" + ",".join(f"0.0{number}" for number in range(1, 9)))
    running = prepare(asked)
    trials = running.run()
    next(trials)
    running.stop()
    states = [trial.state for trial in trials]
    assert {*states} <= {"finished", "paused", "waiting"}  # a busy machine may finish some before the stop
    assert states[-1] == "waiting"
    assert running.trials[0].state == "finished"
    again = prepare(asked)
    assert [(trial.state, trial.epochs) for trial in again.run()] == [("finished", 9)] * 8


def test_a_stop_lets_the_trials_that_run_save(actor, monkeypatch):
    monkeypatch.setenv("RUNGS", "1")  # the trial waits for a signal
    running = prepare(made(actor, "learning-rate=0.01"))
    ended = []
    training = threading.Thread(target=lambda: ended.extend(running.run()), daemon=True)
    training.start()
    wait_until((actor / "runs" / "rates-1" / "metrics.jsonl").exists)
    running.stop()
    training.join(20)
    assert [(trial.state, trial.epochs) for trial in ended] == [("paused", 1)]


def test_each_line_of_a_trial_that_trains_is_parsed_once(tmp_path, monkeypatch):
    """Step lines name their epoch, too: of a long run there are a million."""
    parsed, loads = [], json.loads
    monkeypatch.setattr(sweeps.json, "loads", lambda line: (parsed.append(line), loads(line))[1])
    count = sweeps.EpochLines(tmp_path)
    assert count.look() == []
    with (tmp_path / "metrics.jsonl").open("w", buffering=1) as lines:
        for epoch in (1, 2, 3):
            for step in range(100):
                print(json.dumps({"kind": "step", "epoch": epoch, "step": step}), file=lines)
            line = json.dumps({"kind": "epoch", "epoch": epoch})
            for written, expected in ((line[:-5], epoch - 1), (line[-5:], epoch - 1), ("\n", epoch)):
                lines.write(written)
                lines.flush()
                assert [len(count.look()) for _ in range(5)] == [expected] * 5
    assert len(parsed) == 303


def test_a_mistake_leaves_no_file(tmp_path):
    """Others, and their lines, are in tests/references/errors.txt."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# nobody\n")
    for varied, words in (("learning-rate=fast", "--learning-rate"), ("seed=" + "0," * 1001, "more than 1000 combin")):
        with pytest.raises(UserError, match=words):
            prepare(made(tmp_path, varied))
    with pytest.raises(UserError, match="lists no machines"):
        next(prepare(made(tmp_path, "seed=0,1", hostfile=str(hostfile))).run())
    assert list(tmp_path.iterdir()) == [hostfile]


def test_another_line_under_the_name_and_runs_of_others_are_refused(actor, tmp_path):
    next(prepare(made(tmp_path, "learning-rate=0.01,0.02")).run())
    with pytest.raises(UserError, match="started with other arguments"):
        prepare(made(tmp_path, "learning-rate=0.01,0.03"))
    (tmp_path / "runs" / "other-1").mkdir(parents=True)
    (tmp_path / "runs" / "other-1" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="a run 'other-1' already exists"):
        prepare(made(tmp_path, "seed=0,1", name="other"))


def test_the_command_line():
    given = SweepSettings.read(["rates", "--vary", "seed=0,1", "--", *WORDS, "--", "x"])
    assert (given.vary, given.words) == (["seed=0,1"], (*WORDS, "--", "x"))


def test_seeds_and_folds_are_a_mean_and_a_deviation(tmp_path):
    running = prepare(made(tmp_path, "learning-rate=0.1,0.2", "seed=0,1"))
    acted(running, [[0.9], [0.8], [0.95], []], ["finished"] * 4)
    assert [(row.values, row.score("top1")) for row in rows_of(running)] == [
        ({"learning-rate": "0.1"}, "85.00 ± 7.07"),
        ({"learning-rate": "0.2"}, "95.00"),
    ]
    lower = dataclasses.replace(running, trials=running.trials[:3], best_by="loss")
    assert [row.values["learning-rate"] for row in rows_of(lower)] == ["0.1", "0.2"]
    running.folder.mkdir(parents=True)
    lines = write_table(running).read_text().splitlines()
    assert lines[0] == "run,learning-rate,seed,epochs,top1,state,seconds"
    assert lines[1:] == [
        "rates-1,0.1,0,1,0.9,finished,0.0",
        "rates-2,0.1,1,1,0.8,finished,0.0",
        "rates-3,0.2,0,1,0.95,finished,0.0",
        "rates-4,0.2,1,0,,finished,0.0",
    ]
    folds = acted(prepare(made(tmp_path, "folds=2:1,2:2", name="cross")), [[0.9], [0.8]], ["finished"] * 2)
    assert [(row.values, row.score("top1")) for row in rows_of(folds)] == [({}, "85.00 ± 7.07")]


def test_the_page_has_the_best_trials_side_by_side(tmp_path):
    running = prepare(made(tmp_path, "learning-rate=" + ",".join(f"0.{number:02}" for number in range(1, 12))))
    acted(running, [[number / 20] for number in range(11)], ["finished"] * 11)
    for number, trial in enumerate(running.trials):
        (trial.folder / "metrics.jsonl").write_text(json.dumps(made_runs.epoch(1, number / 20)) + "\n")
    running.folder.mkdir(parents=True)
    page = write_page(running, rows_of(running)).read_text()
    title = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)[1]
    assert f"{MOST_RUNS} runs compared" in title
    names = list(dict.fromkeys(re.findall(r"rates-\d+", page)))
    assert names == [f"rates-{number:02}" for number in range(11, 11 - MOST_RUNS, -1)]


def test_without_a_score_there_is_no_page(tmp_path):
    running = prepare(made(tmp_path, "learning-rate=0.1,0.2"))
    assert write_page(acted(running, [[], []], ["exit code 1"] * 2), rows_of(running)) is None


def test_the_state_survives_what_is_no_state(actor):
    asked = made(actor, "learning-rate=0.01")
    list(prepare(asked).run())
    state = actor / "sweeps" / "rates" / "001.json"
    saved = json.loads(state.read_text())
    assert saved["epochs"] == 9
    state.write_text("{")
    with pytest.raises(UserError, match="cannot be used"):
        prepare(asked)
    for other in ({"values": {"learning-rate": "0.02"}}, {"run_name": "rates-01"}):  # drawn by an earlier version
        state.write_text(json.dumps(saved | other))
        with pytest.raises(UserError, match=r"cannot be used \(001.json is of another combination\)"):
            prepare(asked)


def test_rungs_compare_their_own_epochs_and_a_later_failure_is_tried_again(tmp_path):
    running = prepare(made(tmp_path, "learning-rate=0.01,0.02,0.03,0.04", halving=2))
    scores = [
        [0.1, 0.1, 0.1, 0.9, 0.9],
        [0.2, 0.2, 0.2],
        [0.3, 0.3, 0.3],
        [0.4],
    ]  # 1 went too far, 4 failed early
    acted(running, scores, ["paused", "paused", "exit code 1: error", "exit code 1: error"])
    assert [trial.number for trial in running._better(running._arrived(running.trials, 3), running.trials)] == [3, 2]


FAILS, NO = "exit code 1: error", math.nan


@pytest.mark.parametrize(
    ("halving", "scores", "states", "best"),
    [
        # Early stopping, or the number of epochs, ended the first trial.
        (0, [[0.9, 1.0], [0.4] * 9], ["finished"] * 2, 0),
        (0, [[0.4] * 9, [0.9, 1.0, 0.2]], ["finished", "diverged"], 1),
        # One that failed or was stopped is not complete; without any complete one they are compared all the same.
        (0, [[0.9] * 8, [0.4, 0.4]], [FAILS, "finished"], 1),
        (0, [[0.9] * 8, [0.4, 0.4]], ["paused", "finished"], 1),
        (0, [[0.4] * 8, [0.9, 0.4]], ["paused"] * 2, 1),
        # What is not a number is worse than every number.
        (0, [[NO, NO], [0.1] * 2], ["finished"] * 2, 1),
        (0, [[NO, 0.2], [0.1] * 2], ["finished"] * 2, 0),
        # Rungs after 3, 5 and 9 epochs: the second was given up after 5, though it is ahead of the winner's end.
        (2, [[0.1] * 3, [0.1, 0.1, 0.5, 0.5, 0.5], [0.2, 0.2, 0.4, 0.6, 0.6, *[0.6] * 4], [0.1] * 3], None, 2),
        # The first stopped by itself, and was given up at the first rung; then it is in no comparison after it.
        (2, [[0.3, 0.3], [0.4] * 5, [0.5] * 9, [0.1] * 3], ["finished", "paused", "finished", "paused"], 2),
        (2, [[0.6, 0.9], [0.4] * 5, [0.5] * 9, [0.1] * 3], ["finished", "paused", "finished", "paused"], 0),
        # Stopped in the first rung: the one that ended by itself in it is compared with the others that are there.
        (2, [[0.3, 0.3], [0.4] * 3, [0.9] * 2, []], ["finished", "paused", "paused", "waiting"], 1),
    ],
)
def test_the_best_is_compared_at_its_rung_whatever_its_epochs(tmp_path, halving, scores, states, best):
    rates = [f"0.0{number}" for number in range(1, len(scores) + 1)]
    running = prepare(made(tmp_path, "learning-rate=" + ",".join(rates), halving=halving))
    acted(running, scores, states or ["paused", "paused", "finished", "paused"])
    assert best_of(running) == rates[best]


def test_the_best_trial_is_one_of_the_best_combination(tmp_path):
    """A single seed may be lucky: the command is of the row that stands first in the table."""
    running = prepare(made(tmp_path, "learning-rate=0.01,0.02", "seed=0,1,2"))
    scores = [[0.9], [0.5], [0.5], [0.7], [0.8], [0.7]]
    acted(running, scores, ["finished"] * 6)
    assert best_of(running) == "0.02,1"


def test_machines_get_as_many_trials_as_slots_and_one_that_is_down_no_more(actor, capfd):
    """The actor's machine node-2 cannot be reached."""
    path = actor / "hostfile"
    path.write_text("node-1 slots=5\nnode-2 slots=2\n")
    words = ("basic_cnn", "ddp", "2", *WORDS[3:], f"--log-dir={actor}")
    asked = made(actor, "learning-rate=0.01,0.02,0.03,0.04", words=words, hostfile=str(path))
    assert [(place.host, place.variables["CUDA_VISIBLE_DEVICES"]) for place in sweeps._places(2, asked)] == [
        ("node-1", "0,1"),
        ("node-1", "2,3"),
        ("node-2", "0,1"),
    ]
    assert [trial.state for trial in prepare(asked).run()] == ["finished"] * 4
    assert capfd.readouterr().err.count("node-2: exit code 69: ssh: no route") == 1
    assert "launch_multi_node.sh basic_cnn ddp 1 2 32 9" in (actor / "runs" / "rates-1" / "line").read_text()
    path.write_text("node-2 slots=2\n")
    asked = dataclasses.replace(asked, name="lost")
    assert [trial.state for trial in prepare(asked).run()] == ["exit code 69: no machine is left"] * 4
    path.write_text("node-1 slots=1\n")
    with pytest.raises(UserError, match="2 GPUs per node requested, but node-1 has slots=1"):
        next(prepare(asked).run())


@pytest.mark.slow
def test_the_best_trial_is_the_run_that_its_command_trains(tmp_path):
    """A trial that was stopped at two rungs has the bytes of one that was not."""
    words = ("basic_cnn", "ddp", "2", "32", "3", f"--log-dir={tmp_path}", "--report=false", "--tensorboard=false")
    running = prepare(made(tmp_path, "learning-rate=0.001,0.01", words=words, halving=2))
    assert running.rungs() == [2, 3]
    list(running.run())
    (best,) = (trial for trial in running.trials if trial.values["learning-rate"] == best_of(running))
    assert sorted(trial.epochs for trial in running.trials) == [2, 3]
    assert best.epochs == 3
    command = ["bash", "scripts/launch_distributed.sh", *words, *best.flags, "--run-name=alone"]
    subprocess.run(command, cwd=REPO_ROOT, check=True)
    alone, swept = ((tmp_path / "runs" / name / "model.safetensors").read_bytes() for name in ("alone", best.run_name))
    assert alone == swept
