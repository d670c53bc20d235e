"""Recommends a strategy before a run, predicts whether the run fits into memory, and prints the command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("plan"))
