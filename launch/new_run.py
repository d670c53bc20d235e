"""The check of a new run before any rank starts: whether its name is free and the ranks can share its batch."""

from __future__ import annotations

from collections.abc import Sequence

from training.base.errors import UserError
from training.config import TrainConfig
from training.config.global_batch import check_division
from training.observe.new_run import refuse_existing, run_folder


def check_new_run(config: TrainConfig, possible_ranks: Sequence[int]) -> None:
    """Refuse a run whose name another one has, and a global batch that the ranks cannot share.

    A run that goes on keeps the global batch of its checkpoint: that is for the ranks to check, which read it.

    Args:
        config: of the training.
        possible_ranks: numbers of ranks that the launch may use, the wanted one first.

    Raises:
        UserError: for the batch what the wanted number of ranks says, if no number can share it.
    """
    folder = run_folder(config)
    if config.run_name:
        refuse_existing(config, folder)
    if config.resume not in ("never", "auto") or (config.resume == "auto" and folder.has_checkpoint):
        return
    errors = []
    for ranks in possible_ranks:
        try:
            check_division(config, ranks)
        except UserError as error:
            errors.append(error)
        else:
            return
    raise errors[0]
