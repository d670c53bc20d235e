"""The flags of `evaluate.py` and `export.py` that choose the images."""

from __future__ import annotations

import argparse

from training.data import BAD_IMAGES_USAGE, DATASETS


def add_image_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the flags that name the images to look at, for `delivery.evaluation_data.EvaluationChoice`.

    Args:
        parser: of a script that takes a finished model.
        verb: what is done with the images, such as "evaluate".
    """
    usages = ", ".join(entry.usage for entry in DATASETS.values())
    parser.add_argument("--data", default="", help=f"Images to {verb} it on: {usages}; default: the run's own.")
    parser.add_argument("--data-root", default="", help="Folder of torchvision data sets; default: the run's own.")
    parser.add_argument(
        "--bad-images", default="", metavar="MODE", help=f"{BAD_IMAGES_USAGE}, as in training; default: the run's."
    )
    parser.add_argument(
        "--allow-missing-classes",
        action="store_true",
        help=f"{verb.capitalize()} on data that lacks some of the model's classes.",
    )
