"""Loads one folder as a data set in a process of its own, and prints what that took as JSON; see `scaling.py`."""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.training.data import DataOptions, load_data


def peak_bytes() -> int:
    """Return the most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Load a small set first, which imports all that is needed; then measure."""
    load_data(DataOptions(data="digits"))
    before, start = peak_bytes(), time.perf_counter()
    data = load_data(DataOptions(data=sys.argv[1], image_size=64))
    seconds = time.perf_counter() - start
    # What stays is what a worker process is handed: the list of files with their labels.
    index = sum(len(pickle.dumps(part.source)) for part in (data.train, data.val))
    print(json.dumps({"seconds": seconds, "index": index, "peak": peak_bytes() - before}))


if __name__ == "__main__":
    main()
