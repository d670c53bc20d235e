"""Determines the task of trained weights from their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerovision.training.tasks.labels import OneLabel
from zerovision.training.tasks.multilabel.labels import SeveralLabels

THRESHOLDS = "thresholds"  # key of the classes' thresholds in the metadata of weights for several labels


def task_of(metadata: Mapping[str, Any]) -> OneLabel:
    """Return the task for which weights were trained.

    Args:
        metadata: the result of `zerovision.training.checkpoint.weights.read_metadata`.
    """
    num_classes, thresholds = len(metadata["class_names"]), metadata["extra"].get(THRESHOLDS)
    if thresholds is None:
        return OneLabel(num_classes)
    return SeveralLabels(num_classes, np.array(thresholds, dtype=np.float64))
