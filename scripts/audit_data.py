"""Looks for mistakes in a data set: scenes that are in two parts or have two labels, and altered copies of images."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("audit_data"))
