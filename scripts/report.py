"""Writes the report of a run, or of several runs side by side: a single HTML file that works offline."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("report"))
