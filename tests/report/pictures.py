"""Take the pictures of a run's report and of an audit for the docs: python -m tests.report.pictures RUN AUDIT"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.report.browsing import opened, start_chromium
from zerovision.delivery.report.page import write_report
from zerovision.delivery.trained_model import find_run

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
COLOURS = 256
WIDTH, HEIGHT = 1280, 1500


def main() -> None:
    """Write the pictures into docs/images."""
    run = find_run(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        write_report([run], report)
        browser = start_chromium(playwright)
        for name, page_file, pointed_at in (
            ("report_light", report, "#chart-loss .canvas"),
            ("audit", Path(sys.argv[2]), "h1"),
        ):
            with opened(browser, page_file, width=WIDTH, color_scheme="light") as page:
                page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
                page.locator(pointed_at).hover()
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            path = IMAGES / f"{name}.png"
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size // 1000} kB")
        browser.close()


if __name__ == "__main__":
    main()
