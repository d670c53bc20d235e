"""Slurm's scontrol, which shows and changes jobs."""

from __future__ import annotations

import subprocess

from training.base.errors import UserError

SCONTROL_SECONDS = 60


def scontrol(*arguments: str, stderr: int | None = None) -> str | None:
    """Run Slurm's scontrol; return its output, None if it fails."""
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=SCONTROL_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def host_names(node_list: str) -> list[str]:
    """Return the hosts of a job, as `scontrol` reads 'node[01-04]'; raise a UserError if it cannot."""
    names = scontrol("show", "hostnames", node_list, stderr=subprocess.DEVNULL)
    if not names:
        raise UserError(f"SLURM_JOB_NODELIST {node_list!r}: scontrol cannot read it.")
    return names.split()
