"""Finds the first step at which two runs that should be equal differ, and lists other differences."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("bisect_runs"))
