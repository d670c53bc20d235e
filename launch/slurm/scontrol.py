"""Slurm's scontrol: what it knows of jobs and nodes."""

from __future__ import annotations

import subprocess

from training.errors import UserError

SCONTROL_SECONDS = 60


def scontrol(*words: str, complaints: int | None = None) -> str | None:
    """Run Slurm's scontrol; return what it prints, None where it fails; `complaints` is where its stderr goes."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, timeout=SCONTROL_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def host_names(node_list: str) -> list[str]:
    """Return the hosts of a job, as `scontrol` reads 'node[01-04]'; raise a UserError where it cannot."""
    names = scontrol("show", "hostnames", node_list, complaints=subprocess.DEVNULL)
    if not names:
        raise UserError(f"SLURM_JOB_NODELIST {node_list!r}: scontrol cannot read it.")
    return names.split()
