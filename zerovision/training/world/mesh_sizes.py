"""Checks the sizes of a mesh of ranks; does not import torch, because launchers also use this module."""

from __future__ import annotations

import math
from collections.abc import Mapping

from zerovision.training.base.errors import UserError
from zerovision.training.base.units import plural


def data_ranks(ranks: int, mesh: Mapping[str, int]) -> int:
    """Return the number of groups of ranks that read different images; see `mesh.form_mesh` for the arguments.

    Raises:
        UserError: if the ranks cannot be divided into this mesh.
    """
    whole = math.prod(mesh.values())
    groups, rest = divmod(ranks, whole)
    if rest or not groups:
        flags = " x ".join(f"--{name.replace('_', '-')} {size}" for name, size in [*mesh.items()][::-1])
        fitting = f"{groups * whole} or {(groups + 1) * whole}" if groups else f"{whole}"
        raise UserError(f"{flags}: {plural(ranks, 'rank')} cannot form groups of {whole}: start {fitting} ranks.")
    return groups
