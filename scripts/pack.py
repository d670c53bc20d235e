"""Packs a data set into tar files in WebDataset's layout, each with an index, and checks the files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("pack"))
