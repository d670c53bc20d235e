"""Take the pictures of a terminal for the docs, with what commands print: python -m tests.report.terminals"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from tests.report.browsing import start_chromium
from tests.report.pictures import COLOURS, IMAGES

# name, what is typed
TERMINALS = (
    ("train", "zerovision train digits --effort seconds"),
    ("terminal", "zerovision launch mobilenet ddp 1 16 12 --run-name digits"),
)
COLUMNS, PIXELS = 112, 1180


def printed(line: str, folder: str) -> str:
    """Return what a command prints, whose logs are in a folder that is not shown."""
    logs = f" --log-dir={folder}/logs"
    command = [sys.executable, "-m", "zerovision.cli", *shlex.split(line + logs)[1:]]
    environment = os.environ | {"PYTHONPATH": str(IMAGES.parents[1])}
    said = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    return said.replace(logs, "").replace(f"{folder}/", "")


def main() -> None:
    """Write the pictures into docs/images; the runs of the commands are removed."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = start_chromium(playwright)
        for name, line in TERMINALS:
            console = Console(record=True, width=COLUMNS, file=io.StringIO())
            (own := Path(folder) / name).mkdir()
            console.print(Text(f"$ {line}\n{printed(line, str(own))}".rstrip()))
            page = browser.new_page(viewport={"width": PIXELS, "height": 400})
            page.route("**/*", lambda route: route.abort())  # the fonts that the picture would fetch
            style = "<style>body { margin: 0 } svg { display: block }</style>"
            page.set_content(style + console.export_svg(title="zerovision"))
            picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
