"""The table of user commands, which run as scripts in a checkout, or as `python -m zerovision.commands NAME`."""

from __future__ import annotations

import os
import pkgutil
import sys
from typing import Any, NamedTuple

from zerovision.training.config.command_line import run_script


class Command(NamedTuple):
    """One entry of `COMMANDS`; the functions are imported when they are used."""

    read: str  # import path of the function that turns the command line into settings
    act: str  # import path of the function that acts on the settings and returns the exit code
    writes_product: bool = False  # see `run_script`
    may_have_ranks: bool = False  # whether a launcher may start the command once per rank

    def parse(self, words: list[str]) -> Any:
        """Return the settings of a command line."""
        return pkgutil.resolve_name(self.read)(words)

    def run(self, settings: Any) -> int:
        """Run the command; return the exit code."""
        if hasattr(settings, "look"):
            settings.look()  # before the slow imports
        return pkgutil.resolve_name(self.act)(settings)


USE, BESIDE = "zerovision.delivery", "zerovision.extras"
COMMANDS = {
    "audit_data": Command(f"{BESIDE}.settings:AuditSettings.read", f"{BESIDE}.audit.audit:run"),
    "bisect_runs": Command(f"{BESIDE}.settings:BisectSettings.read", f"{BESIDE}.bisect_runs:run"),
    "doctor": Command("zerovision.launch.doctor:DoctorSettings.read", "zerovision.launch.doctor:run"),
    "evaluate": Command(f"{USE}.settings:EvaluateSettings.read", f"{USE}.evaluate:run", may_have_ranks=True),
    "export": Command(f"{USE}.settings:ExportSettings.read", f"{USE}.export.export_model:run"),
    "pack": Command(f"{USE}.settings:PackSettings.read", f"{USE}.pack:run"),
    "plan": Command("zerovision.planning.machines:PlanSettings.read", "zerovision.planning.plan_command:plan"),
    "predict": Command(f"{USE}.settings:PredictSettings.read", f"{USE}.predict:run", writes_product=True),
    "publish": Command(f"{USE}.settings:PublishSettings.read", f"{USE}.publish:run"),
    "replay": Command(f"{BESIDE}.settings:ReplaySettings.read", f"{BESIDE}.replay:run"),
    "report": Command(f"{USE}.settings:ReportSettings.read", f"{USE}.report.page:run"),
    "serve": Command(f"{BESIDE}.settings:ServeSettings.read", f"{BESIDE}.serve:run"),
    "sweep": Command(f"{BESIDE}.settings:SweepSettings.read", f"{BESIDE}.sweep:run"),
    "train": Command("zerovision.commands.train:TrainSettings.read", "zerovision.commands.train:run"),
}


def run_command(name: str, verb: str = "") -> int:
    """Run a command with this process's arguments, report mistakes under `verb`, and return the exit code."""
    command = COMMANDS[name]
    return run_script(verb or name, command.parse, command.run, writes_product=command.writes_product)


def main(name: str, verb: str = "") -> int:
    """Run a command with this process's arguments and return the exit code, or exit the process if ranks may run it."""
    exit_code = run_command(name, verb)
    if COMMANDS[name].may_have_ranks:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # see train_distributed.py: shutting down Python while gloo's threads run may abort
    return exit_code
