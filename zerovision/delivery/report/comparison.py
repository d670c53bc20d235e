"""Whether two runs differ: McNemar's exact test on the validation images that both have judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerovision.delivery.pages import clip, number, plural
from zerovision.delivery.report.run_files import names_of
from zerovision.delivery.trained_model import read_json
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import EVALUATION, SCORES

SIGNIFICANT = 0.05


class Judged(NamedTuple):
    """The images of an evaluation, as a hash, and whether the model is right on each: bool [N]."""

    images: str
    right: np.ndarray


def compare(folders: Sequence[Path]) -> list[str]:
    """Return a sentence on each run beside the first: whether they differ by more than chance explains.

    Raises:
        UserError: if the scores of a run are damaged.
    """
    if len(folders) < 2:
        return []
    names, judged = [clip(name) for name in names_of(folders)], [_read_judged(folder) for folder in folders]
    return [_compare(names[0], judged[0], *other) for other in zip(names[1:], judged[1:], strict=True)]


def mcnemar(right: np.ndarray, other: np.ndarray) -> tuple[int, int, float]:
    """Return on how many images each of two models alone is right, and the probability of that or more by chance.

    McNemar 1947 (https://doi.org/10.1007/BF02295996), in its exact form: of the images on which one alone is right, it
    is either of them with the same probability if they do not differ. Dietterich 1998
    (https://doi.org/10.1162/089976698300017197) recommends the test for models that were trained once.

    Args:
        right: bool [N], whether the first one is right.
        other: the same of the second one.
    """
    from scipy.stats import binomtest  # seconds, which a page of one run does not take

    alone, other_alone = int((right & ~other).sum()), int((other & ~right).sum())
    either = alone + other_alone
    return alone, other_alone, float(binomtest(alone, either).pvalue) if either else 1.0


def _compare(name: str, judged: Judged | None, other_name: str, other: Judged | None) -> str:
    pair = f"{name} and {other_name}"
    if judged is None or other is None:
        lacking = name if judged is None else other_name
        return f"{pair} are not compared: scripts/evaluate.py {lacking} writes on which images it is right."
    if (judged.images, len(judged.right)) != (other.images, len(other.right)):
        return f"{pair} are not compared: they were judged on different images."
    alone, other_alone, chance = mcnemar(judged.right, other.right)
    verdict = "differ" if chance < SIGNIFICANT else "do not differ by more than chance explains"
    return (
        f"{pair} {verdict}: of {plural(len(judged.right), 'image')}, {name} alone is right on {alone} and {other_name} "
        f"alone on {other_alone} (McNemar's exact test, p = {number(chance, 2)})."
    )


def _read_judged(folder: Path) -> Judged | None:
    path = folder / EVALUATION / SCORES
    found = read_json(path).get("judged") if path.is_file() else None
    try:
        return None if found is None else Judged(str(found["images"]), np.array([*found["right"]]) == "1")
    except (LookupError, TypeError) as error:
        raise UserError(f"'{path}' is damaged ({error!r}). Restore it, or remove it.") from None
