"""Packs a data set into tar files of WebDataset's layout, with an index each, and checks what it wrote.

python scripts/pack.py ~/photos ~/packed                              # then --data ~/packed trains on them
python scripts/pack.py list.csv packed --shard-mb 100 -- --val-fraction 0.1
python scripts/pack.py torchvision:CIFAR10 cifar10

DATA is what --data of a training takes; arguments after -- are the training's own, such as --split-seed. Images keep
their bytes, names and parts; training images are shuffled. Exit code: 0 all is packed, 2 it could not be.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zerovision.training.config.command_line import OneLineParser, parse_args, run_script

LARGEST_SHARD_MB = 100_000


def pack(given: argparse.Namespace) -> int:
    """Pack the data that the command line names."""
    import zerovision.delivery.pack
    from zerovision.training.base.units import format_bytes
    from zerovision.training.data import data_options

    config, _ = parse_args([*given.training_arguments, f"--data={given.data}"])
    output = Path(os.path.expanduser(given.output))
    done = zerovision.delivery.pack.pack(data_options(config), output, given.shard_mb * 10**6)
    print(f"packed {done.images} images, {format_bytes(done.bytes)} in {done.shards} tar file(s), into {output}")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = OneLineParser("pack", __doc__)
    parser.add_argument("data", metavar="DATA", help="What --data of a training takes.")
    parser.add_argument("output", metavar="OUT", help="Folder of the tar files, a new one.")
    parser.add_number("--shard-mb", 1, LARGEST_SHARD_MB, default=256, help="Megabytes of one tar file, about.")
    given = parser.parse(arguments[:end])
    given.training_arguments = arguments[end + 1 :]
    return given


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("pack", parse, pack)


if __name__ == "__main__":
    sys.exit(main())
