"""Train one step of a run again, from the checkpoint before it, and show what it was given and what it did."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.commands import main

if __name__ == "__main__":
    sys.exit(main("replay"))
