"""Take the pictures of a run's report that the documentation shows: python -m tests.report.pictures RUN"""

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
# name, width in pixels, theme, height, the section at the top
PICTURES = (
    ("report_light", 1280, "light", 1500, ""),
    ("report_dark", 1280, "dark", 1500, "#confusion"),
    ("report_phone", 360, "light", 1100, "#curves"),
)


def main() -> None:
    """Write the pictures into docs/images."""
    run = find_run(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        write_report([run], page_file)
        browser = start_chromium(playwright)
        for name, width, theme, height, section in PICTURES:
            with opened(browser, page_file, width=width, color_scheme=theme) as page:
                page.set_viewport_size({"width": width, "height": height})
                if section:
                    page.locator(section).evaluate("one => scrollTo(0, one.getBoundingClientRect().top + scrollY)")
                else:
                    page.locator("#chart-loss .canvas").hover()
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            path = IMAGES / f"{name}.png"
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size // 1000} kB")
        browser.close()


if __name__ == "__main__":
    main()
