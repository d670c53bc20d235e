"""The sizes of a mesh of ranks; imports no torch, as the launchers check them too."""

from __future__ import annotations

from zerovision.training.base.errors import UserError


def data_ranks(ranks: int, tensor: int, pipeline: int = 1) -> int:
    """Return how many groups of ranks read different images; arguments as of `mesh.form_mesh`.

    Raises:
        UserError: if the ranks cannot be divided so.
    """
    sizes = {"--tensor-parallel": tensor, "--pipeline-parallel": pipeline}
    groups, rest = divmod(ranks, tensor * pipeline)
    if rest or not groups:
        whole = tensor * pipeline
        fitting = f"{groups * whole} or {(groups + 1) * whole}" if groups else f"{whole}"
        raise UserError(
            f"{' x '.join(f'{flag} {size}' for flag, size in sizes.items() if size > 1)}: {ranks} rank(s) cannot be "
            f"divided into groups of {whole}, start {fitting} ranks."
        )
    return groups
