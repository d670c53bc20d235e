"""Open the report in a headless Chromium that can reach nothing but the file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def start_chromium(playwright: Playwright) -> Browser:
    """Start the system's Chromium with a new profile; skip the test if there is none."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine: bash tests/report/install_chromium.sh")
    return playwright.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))


@contextmanager
def opened(browser: Browser, path: Path, *, width: int = 1280, **options: Any) -> Iterator[Page]:
    """Open a page from a file; fail if it logs an error or requests anything but itself."""
    # Without motion: nothing may move while it is measured.
    settings = {"viewport": {"width": width, "height": 900}, "reduced_motion": "reduce"} | options
    context = browser.new_context(**settings)
    context.set_default_timeout(60_000)
    faults: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("requestfailed", lambda request: faults.append(f"failed: {request.url[:200]}"))
    url = path.as_uri()
    page.on(
        "request",
        lambda request: None if is_own(request.url, url) else faults.append(f"requested: {request.url[:200]}"),
    )
    page.route("**/*", lambda route: route.continue_() if is_own(route.request.url, url) else route.abort())
    page.goto(url)
    try:
        yield page
        assert faults == []
    finally:
        context.close()


def is_own(url: str, page: str) -> bool:
    """Return whether an address is the page itself, or a data URI."""
    return url.partition("#")[0] == page or url.startswith("data:")
