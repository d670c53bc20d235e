"""Train one line with several values of its flags, and compare: a grid, or random draws; all, or the better ones only.

python scripts/sweep.py rates --vary learning-rate=0.001,0.003,0.01 --vary seed=0,1 -- mobilenet ddp 2 16 12
python scripts/sweep.py wide --vary learning-rate=0.0003..0.03:log --vary weight-decay=0..0.2 --trials 9 --halving 3 \\
    -- basic_cnn ddp 2 16 9 --data digits

python scripts/sweep.py rates --hostfile hostfile.txt --vary seed=0,1,2,3 -- mobilenet ddp 2 16 12

After -- stand the words and flags of scripts/launch_distributed.sh. The same line again goes on where it was stopped.
Exit code: 0 every trial is done, 1 some have failed (each is a row), 2 a mistake, 130 or 143 stopped.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from zerovision.training.base.errors import UserError
from zerovision.training.base.points import show_score
from zerovision.training.base.run_folder import shown_path
from zerovision.training.base.units import plural
from zerovision.training.config.command_line import OneLineParser

LAUNCHED = "--"


def sweep(given: argparse.Namespace) -> int:
    """Train the trials, print each as it comes to a rung, and print and write the table."""
    from zerovision.extras.sweep import FAILED, SCRIPT, Sweep, prepare
    from zerovision.extras.sweep_table import best_trial, rows_of, write_table
    from zerovision.launch.arguments import with_flags
    from zerovision.training.world.signals import handling_stop_signals

    asked = Sweep(given.name, tuple(given.words), tuple(given.vary), given.trials, given.halving, given.seed)
    running, received = prepare(asked), []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        running.stop()

    with handling_stop_signals(stop):
        for trial in running.run(given.jobs, given.hostfile):
            score = (
                "no epoch"
                if trial.score is None
                else f"{show_score(running.best_by, trial.score)} after {plural(trial.epochs, 'epoch')}"
            )
            print(f"{trial.run_name}  {' '.join(trial.flags)}  {score}, {trial.state}", flush=True)
    rows = rows_of(running)
    best = best_trial(rows)
    command = shlex.join(["bash", f"scripts/{SCRIPT}", *with_flags(SCRIPT, asked.words, best.flags)]) if best else ""
    table = write_table(running)
    for row in rows:
        print(
            f"{row.score(running.best_by):>14}  {' '.join(f'--{flag}={value}' for flag, value in row.values.items())}"
        )
    print(f"best         {command}\ntable        {shown_path(table)}")
    if received:
        return 128 + received[0]
    return int(any(trial.state.startswith(FAILED) for trial in running.trials))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    own, separator, words = arguments, "", []
    if LAUNCHED in arguments:
        place = arguments.index(LAUNCHED)
        own, separator, words = arguments[:place], LAUNCHED, arguments[place + 1 :]
    parser = OneLineParser("sweep", __doc__)
    parser.add_argument("name", metavar="NAME", help="Of the sweep; its runs are NAME-1, NAME-2, ...")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FLAG=VALUES",
        help="A flag and its values: V1,V2 (V1|V2 if they hold commas), LOW..HIGH, or LOW..HIGH:log.",
    )
    parser.add_number("--trials", 0, 1000, default=0, help="Combinations to draw; 0: all of them.")
    parser.add_number(
        "--halving",
        0,
        10,
        default=0,
        help="Go on with one in so many after each rung of epochs, 2 or more; 0: with all.",
    )
    parser.add_number("--jobs", 1, 64, default=1, help="Trials at a time, each on GPUs, or cores, of its own.")
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="Machines that train in place of this one (lines of 'name slots=N'), over ssh: as many trials at a time"
        " as their slots allow.",
    )
    parser.add_number("--seed", 0, 2**31 - 1, default=0, help="Of the draws.")
    if own and not separator and not {"-h", "--help"} & set(own):
        raise UserError("the line to train is missing: -- MODEL STRATEGY GPUS BATCH_SIZE EPOCHS [FLAGS], at the end.")
    given = parser.parse(own)
    if given.halving == 1:
        raise UserError("--halving 1 would go on with all: give 2 or more, or 0.")
    if given.hostfile and given.jobs > 1:
        raise UserError("--jobs with --hostfile: the slots say how many trials at a time: leave --jobs out.")
    given.words = words
    return given
