"""Serves a model as a web page on this machine: drop an image to see its labels and what led to the first label."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("serve"))
