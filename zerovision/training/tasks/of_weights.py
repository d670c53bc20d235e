"""The task of trained weights, from their file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerovision.training.tasks.labels import OneLabel
from zerovision.training.tasks.multilabel.labels import SeveralLabels

THRESHOLDS = "thresholds"  # of the classes, in the metadata of weights that tell several labels


def task_of(metadata: Mapping[str, Any]) -> OneLabel:
    """Return the task of weights.

    Args:
        metadata: the result of `zerovision.training.checkpoint.weights.read_metadata`.
    """
    num_classes, thresholds = len(metadata["class_names"]), metadata["extra"].get(THRESHOLDS)
    if thresholds is None:
        return OneLabel(num_classes)
    return SeveralLabels(num_classes, np.array(thresholds, dtype=np.float64))
