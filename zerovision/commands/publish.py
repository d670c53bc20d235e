"""Sends a finished run's model to the Hugging Face hub: weights, model card, names of the classes, timm's config.json.

python scripts/publish.py digits my-team/digits --dry-run   # lists what would be sent, without a network
python scripts/publish.py digits my-team/digits             # private, unless --public; the token is HF_TOKEN's, or hf's
"""

from __future__ import annotations

import argparse
import sys

from zerovision.training.config.command_line import OneLineParser, run_script


def publish(given: argparse.Namespace) -> int:
    """Publish the model that the command line names."""
    from zerovision.delivery.trained_model import find_model

    find_model(given.model)  # before the slow imports
    import zerovision.delivery.publish

    for line in zerovision.delivery.publish.publish(**vars(given)):
        print(line)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("publish", __doc__)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or its safetensors file.")
    parser.add_argument("repository", metavar="ORG/NAME", help="On the hub; made if there is none.")
    parser.add_argument("--public", dest="is_public", action="store_true", help="A new one is public, not private.")
    parser.add_argument("--dry-run", action="store_true", help="Say what would be sent, without a network.")
    return parser.parse(arguments)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("publish", parse, publish)


if __name__ == "__main__":
    sys.exit(main())
