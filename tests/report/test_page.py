"""The report in a real browser: all of it is reachable, works and is legible, and nothing is requested."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import opened, start_chromium
from made_runs import RESTARTED, make_run
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.kit import ROOT, wait_until
from zerovision.delivery.report.page import write_report
from zerovision.extras.audit.audit import audit
from zerovision.extras.settings import AuditSettings

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "שלום \u202e עולם", "🐈‍⬛" * 5, "n" * 300]
FOCUSABLE = "a[href], button, summary, .canvas, .scroll[tabindex='0'], pre, .matrix td[tabindex='0']"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = start_chromium(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Paths of the page of a run, of a run with hostile names, and of three runs."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / name, learning_rate=rate) for name, rate in (("one", 0.5), ("two", 0.25))]
    hostile = make_run(folder / "'\"><b>three", [], class_names=HOSTILE, worst=4, command="echo '</script>'")
    found = {"single": runs[:1], "hostile": [hostile], "several": [*runs, hostile]}
    for name, chosen in found.items():
        write_report(chosen, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in found}


@pytest.fixture
def page(browser, pages):
    with opened(browser, pages["single"]) as page:
        yield page


def spoken(page) -> str:
    return page.locator("#spoken").text_content()


# The one with the most in the least room; all others in `make test-slow`.
QUICK = ("several", 360, "dark")
OTHERS = sorted({*product(("single", "several"), (360, 1280), ("light", "dark"))} - {QUICK})


@pytest.mark.parametrize(
    ("name", "width", "theme"), [QUICK, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_legible_everywhere(browser, pages, name, theme, width):
    check_legible(browser, pages[name], width, theme)


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """The page of an audit that has found something."""
    folder = tmp_path_factory.mktemp("audited")
    draws = np.random.default_rng(0)
    for number in range(12):
        (part := folder / "photos" / ("ant", "bee")[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (32, 32, 3), np.uint8)).save(part / f"{number}.png")
    shutil.copy(part / f"{number}.png", folder / "photos" / "ant")
    audit(AuditSettings(data=str(folder / "photos"), output=str(folder / "audit")))
    return folder / "audit" / "audit.html"


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)])
def test_an_audit_is_legible(browser, audited, theme, width):
    check_legible(browser, audited, width, theme)


def check_legible(browser, path: Path, width: int, theme: str) -> None:
    """See that a page is as wide as the window, has the theme's colours, and that axe finds nothing."""
    with opened(browser, path, width=width, color_scheme=theme) as page:
        for summary in page.locator("summary").all():
            summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        outside = page.evaluate(
            """width => [...document.querySelectorAll("body *")].filter((one) => {
              const box = one.getBoundingClientRect();
              const isOut = box.right > width + 1 || box.left < -1;
              return box.width && isOut && !one.closest(".scroll, .skip, .spoken, svg");
            }).map((one) => one.outerHTML.slice(0, 80))""",
            width,
        )
        assert outside == []
        brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0]")
        assert (brightness > 128) == (theme == "light")
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


def test_hostile_names_stay_text(browser, pages):
    with opened(browser, pages["hostile"]) as page:
        assert page.locator("#classes-run0 tbody th").all_text_contents() == [*HOSTILE[:4], "n" * 79 + "…"]
        assert page.locator("h1").text_content() == "'\"><b>three"
        assert page.locator("b b, h1 b").count() == 0
        assert page.evaluate("[...document.images].every((one) => one.complete && one.naturalWidth)")


def test_reads_values_by_keyboard_and_pointer(page):
    canvas = page.locator("#chart-loss .canvas")
    canvas.focus()
    page.keyboard.press("Home")
    # The first logging point: step 10 of 20, before any epoch was done.
    assert canvas.get_attribute("aria-valuetext") == "epoch 0.5, training, by step 0.4" == spoken(page)
    page.keyboard.press("ArrowRight")
    expected = "epoch 1, training, by step 0.2, training, by epoch 1, validation 2"
    assert canvas.get_attribute("aria-valuetext") == expected == spoken(page)
    page.keyboard.press("End")
    assert spoken(page) == "epoch 2, training, by step 0.125, training, by epoch 0.5, validation 1"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("PageDown")
    assert spoken(page).startswith("epoch 1.5,")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    readout = page.locator("#chart-loss .readout")
    assert readout.is_visible()
    assert readout.text_content().splitlines() == [
        "epoch 1",
        "training, by step 0.2",
        "training, by epoch 1",
        "validation 2",
    ]
    page.keyboard.press("Escape")
    assert not readout.is_visible()


def test_a_dot_lies_on_its_line(page):
    """The readout's dot is where Python drew the point."""
    page.locator("#chart-accuracy .canvas").focus()
    page.keyboard.press("End")
    dot = page.locator("#chart-accuracy .dot").first.bounding_box()
    across, down = page.locator("#chart-accuracy .canvas g path.line").first.evaluate(
        """line => { const end = line.getPointAtLength(line.getTotalLength()).matrixTransform(line.getScreenCTM());
          return [end.x, end.y]; }"""
    )
    assert dot["x"] + dot["width"] / 2 == pytest.approx(across, abs=1)
    assert dot["y"] + dot["height"] / 2 == pytest.approx(down, abs=1)


def test_switches_lines(page):
    button = page.locator("#chart-loss .legend button", has_text="validation")
    line = page.locator("#chart-loss g[data-switch='val_loss']")
    assert line.is_visible()
    button.click()
    assert (button.get_attribute("aria-pressed"), line.is_visible()) == ("false", False)
    page.locator("#chart-loss .canvas").focus()
    page.keyboard.press("End")
    assert "validation" not in spoken(page)
    button.press("Enter")
    assert (button.get_attribute("aria-pressed"), line.is_visible()) == ("true", True)


def test_switches_a_run_everywhere(browser, pages):
    with opened(browser, pages["several"]) as page:
        parts = page.locator("[data-switch='run1']:not(li)")
        visible = [part.is_visible() for part in parts.all()]
        assert len(visible) > 10
        assert sum(visible) > 10
        page.locator(".legend.sticky button").nth(1).click()
        assert not any(part.is_visible() for part in parts.all())
        assert page.locator("[data-switch='run0']:not(li)").first.is_visible()
        page.locator(".legend.sticky button").nth(1).click()
        assert [part.is_visible() for part in parts.all()] == visible
        assert page.locator("#settings tbody th").all_text_contents()[0] == "--learning-rate"


def test_sorts_tables(browser, tmp_path):
    names = [f"class {number}" for number in (2, 10, 1)]
    run = make_run(tmp_path / "run", class_names=names)
    scores = json.loads((run / "evaluation" / "scores.json").read_text())
    for one, value in zip(scores["classes"], (0.5, 0.25, 1.0), strict=True):
        one["f1"] = value
    (run / "evaluation" / "scores.json").write_text(json.dumps(scores))
    write_report([run], tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        rows, head = page.locator("#classes-run0 tbody th"), page.locator("#classes-run0 thead th")
        page.locator("#classes-run0 button", has_text="F1").click()
        assert rows.all_text_contents() == ["class 10", "class 2", "class 1"]
        assert head.last.get_attribute("aria-sort") == "ascending"
        page.locator("#classes-run0 button", has_text="F1").press("Enter")
        assert rows.all_text_contents() == ["class 1", "class 2", "class 10"]
        page.locator("#classes-run0 button", has_text="class").first.click()
        assert rows.all_text_contents() == ["class 1", "class 2", "class 10"]
        assert head.last.get_attribute("aria-sort") is None


def test_reads_the_confusion_matrix(page):
    cells = page.locator("#matrix-run0 tbody tr").first.locator("td")
    assert [cell.get_attribute("class").split()[0] for cell in cells.all()] == ["r7", "w3", "w0"]
    page.locator("#matrix-run0 td[tabindex='0']").focus()
    readout = page.locator("#matrix-run0-readout")
    assert readout.text_content() == "True cat, predicted cat: 2 of 3 (66.7 %)"
    page.keyboard.press("ArrowRight")
    assert readout.text_content() == "True cat, predicted dog: 1 of 3 (33.3 %)"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    assert readout.text_content() == "True cat, predicted cow: 0 of 3 (0.0 %)"
    page.locator("#matrix-run0 tbody tr").nth(2).locator("td").first.hover()
    assert readout.text_content() == "True cow, predicted cat: 1 of 3 (33.3 %)"


def test_enlarges_pictures_by_keyboard(page):
    dialog, buttons = page.locator("dialog"), page.locator(".images button")
    assert (buttons.count(), dialog.is_visible()) == (3, False)
    buttons.first.press("Enter")
    assert dialog.is_visible()
    large, small = (
        one.bounding_box()["width"] for one in (dialog.locator("img").first, buttons.first.locator("img").first)
    )
    assert large > 3 * small
    assert (dialog.locator("img").count(), dialog.locator(".classes").text_content()) == (2, "cat → predicted as  dog")
    page.keyboard.press("ArrowRight")
    assert (dialog.locator("img").count(), dialog.locator(".classes").text_content()) == (1, "dog → predicted as  cow")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert (dialog.locator("img").count(), dialog.locator(".classes").text_content()) == (2, "cat")
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert buttons.nth(2).evaluate("one => one === document.activeElement")


def test_remembers_the_theme(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    button = page.locator("#theme")
    button.click()
    assert (button.text_content(), page.evaluate(background)) == ("Theme: light", light)
    button.click()
    dark = page.evaluate(background)
    assert dark != light
    # Chromium, when busy, gives one in a hundred pages of a file a storage that is empty and kept nowhere: 11 of 1,000
    # loads beside five other browsers, whatever the time between writing and loading again.
    for _ in range(5):
        while button.text_content() != "Theme: dark":
            button.click()
        page.reload()
        if button.text_content() == "Theme: dark":
            break
    assert (button.text_content(), page.evaluate(background)) == ("Theme: dark", dark)


def test_copies_the_command(browser, pages):
    with opened(browser, pages["single"], permissions=["clipboard-read", "clipboard-write"]) as page:
        page.locator("button.copy").click()
        expect(page.locator("button.copy")).to_contain_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == (
            "bash scripts/launch_distributed.sh mobilenet ddp 2 16 2 --learning-rate=0.5"
        )


@pytest.mark.parametrize("name", ["single", pytest.param("several", marks=pytest.mark.slow)])
def test_everything_is_reached_with_the_keyboard(browser, pages, name):
    with opened(browser, pages[name]) as page:
        # The page takes areas that need no scrolling out of the order once they are laid out, which is before a frame.
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.evaluate(
            "selector => document.querySelectorAll(selector).forEach((one, place) => one.place = place)", FOCUSABLE
        )
        wanted = page.evaluate(
            """selector => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility())
              .map((one) => one.place)""",
            FOCUSABLE,
        )
        reached = []
        for _ in range(len(wanted) + 5):
            page.keyboard.press("Tab")
            place, style, width = page.evaluate(
                """() => { const one = document.activeElement, style = getComputedStyle(one);
                  return [one.place ?? -1, style.outlineStyle, parseFloat(style.outlineWidth)]; }"""
            )
            if place >= 0:
                reached.append(place)
                assert (style, width) == ("solid", 3)
        assert sorted(set(reached)) == wanted


@pytest.mark.parametrize("name", [pytest.param("single", marks=pytest.mark.slow), "several"])
def test_without_javascript(browser, pages, name):
    with opened(browser, pages[name], java_script_enabled=False, width=360) as page:
        assert page.locator("button").evaluate_all("them => them.filter((one) => one.offsetParent).length") == 0
        for line in page.locator("#chart-loss .canvas path.line").all():
            box = line.bounding_box()
            assert box["width"] > 100
            assert box["height"] > 20
        page.locator("summary").first.click()
        assert page.locator("#curves details table").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_printed_and_without_motion(browser, pages):
    with opened(browser, pages["single"], color_scheme="dark") as page:
        assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
        page.emulate_media(media="print")
        assert not page.locator("#theme").is_visible()
        assert page.locator("#chart-loss .canvas path.line").first.is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(253, 252, 249)"
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_follows_a_run(browser, tmp_path):
    now = time.time()
    lines = [{**line, "time": now} for line in RESTARTED]
    run = make_run(tmp_path / "run", lines[:2])
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), str(run), "--watch"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((run / "report.html").exists)
        with opened(browser, run / "report.html", width=360) as page:
            status, pause = page.locator(".status"), page.locator("#pause")
            assert "Running: step 20 of 40" in status.text_content()
            page.locator("#chart-loss-data summary").click()
            page.locator("#chart-loss .canvas").focus()
            page.evaluate("scrollTo({ top: 500, behavior: 'instant' })")
            append(run, lines[2:6])
            expect(status).to_contain_text("Running: step 30 of 40, epoch 1 of 2", timeout=15_000)
            assert page.locator("#chart-loss-data").get_attribute("open") is not None
            assert page.locator("#settings-other").get_attribute("open") is None
            assert page.evaluate("scrollY") == pytest.approx(500, abs=2)
            pause.click()
            append(run, lines[6:])
            wait_until(lambda: "Finished" in (run / "report.html").read_text(encoding="utf-8"))
            page.wait_for_timeout(4500)
            assert "Running" in status.text_content()
            pause.click()
            expect(status).to_contain_text("Finished: 2 epochs, 40 steps.", timeout=15_000)
            assert pause.count() == 0
            assert 'reloadSeconds": 0' in (run / "report.html").read_text(encoding="utf-8")
        output, errors = watcher.communicate(timeout=60)
        assert (watcher.returncode, errors) == (0, "")
        assert output.endswith(f"report       {run}/report.html\n")
    finally:
        watcher.kill()


def append(run: Path, lines) -> None:
    with (run / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
