"""Where the package and what belongs to it lie, in a checkout and in an installed copy."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[2]  # not resolved: models/ is a link
_IS_CHECKOUT = (PACKAGE.parent / "scripts" / "train_distributed.py").is_file()
CHECKOUT = PACKAGE.parent if _IS_CHECKOUT else None  # None: an installed copy
REPO_ROOT = CHECKOUT or PACKAGE  # with requirements.txt and deepspeed_configs/
ENTRIES = CHECKOUT / "scripts" if CHECKOUT else PACKAGE / "commands"
LAUNCH = PACKAGE / "launch"
PRESET_FOLDER = PACKAGE / "presets"


def log_folder() -> Path:
    """Return the folder of what runs leave: logs/ of the checkout, or of the current folder."""
    return (CHECKOUT or Path.cwd()) / "logs"
