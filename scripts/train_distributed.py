"""Trains an image classifier: the entry point that every launcher starts once per rank."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands.train_distributed import main

if __name__ == "__main__":
    sys.exit(main())
