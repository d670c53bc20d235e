"""What scripts share beside the trainer: their mistakes are one line, and flags that several have."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from training.data import BAD_IMAGES_USAGE, DATASETS
from training.errors import SECONDS_FOR_RANK_0_TO_SPEAK, USER_ERROR_EXIT_CODE, UserError, nearest


def run_script(
    name: str, parse: Callable[[list[str]], argparse.Namespace], action: Callable[[argparse.Namespace], int]
) -> int:
    """Parse the command line, do what it says, and return the exit code: 2 and one line for a user's mistake.

    Args:
        name: of the script, put before its messages.
        parse: from the words of the command line to their meaning; may raise SystemExit.
        action: does the work and returns the exit code.
    """
    try:
        return action(parse(sys.argv[1:]))
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks as soon as one has failed: rank 0 speaks first.
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
        return USER_ERROR_EXIT_CODE
    except ModuleNotFoundError as error:
        cure = "type 'make setup', and .venv/bin/python instead of python"
        print(f"{name}: {sys.executable} has no module {error.name!r}: {cure}.", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130


class OneLineParser(argparse.ArgumentParser):
    """A parser whose mistakes are a `UserError`, with the name that was probably meant, and no page of usage."""

    def __init__(self, name: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"{name}.py", description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake, for `run_script` to tell."""
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        hint = nearest(unknown[1], self._option_string_actions) if unknown else ""
        raise UserError(f"{message.rstrip('.')}.{hint} `--help` lists all flags.")


def add_image_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the flags that name the images to look at, for `delivery.evaluation_data.EvaluationChoice`.

    Args:
        parser: of a script that takes a finished model.
        verb: what is done with the images, such as "judge".
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


def positive_type(largest: int) -> Callable[[str], int]:
    """Return what reads a whole number from 1 to `largest`, for argparse."""

    def read(word: str) -> int:
        if not (word.isascii() and word.isdigit()) or not 1 <= int(word) <= largest:
            raise argparse.ArgumentTypeError(f"{word!r}: expected a whole number from 1 to {largest}")
        return int(word)

    return read


batch_size_type = positive_type(65_536)
