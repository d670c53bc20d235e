"""The report as a file: hostile names, its size, bad input, watching, colours; and the end of a run that writes it."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import time

import numpy as np
import pytest
from made_runs import RESTARTED, event, make_run, step

from tests.training.commands import command_here
from zerovision.delivery import pages
from zerovision.delivery.evaluation_files import leave_files
from zerovision.delivery.pages import TEMPLATE
from zerovision.delivery.report.charts import rate_search_chart
from zerovision.delivery.report.page import watch, write_report
from zerovision.delivery.report.run_files import read_history
from zerovision.training.auto_learning_rate import describe_search
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import LEARNING_RATE, RunFolder

LARGEST_PAGE_BYTES = 2_000_000
HOSTILE = [
    "<script>document.title='taken'</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "{{ 7 * 7 }} {% raw %}",
    "emoji 🐈‍⬛ and שלום עולם",
    "turned \u202e around",
    "undecodable \udcff",
    "n" * 300,
]


class Tags(html.parser.HTMLParser):
    """Collects tags with their attributes, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_hostile_names_are_text(tmp_path):
    lines = [*RESTARTED, event("checkpoint_failed", 16, 40, name=HOSTILE[0], error=HOSTILE[1])]
    run = make_run(tmp_path / "run", lines, class_names=HOSTILE, command=HOSTILE[2], worst=7)
    scores = json.loads((run / "evaluation" / "scores.json").read_text())
    for number, one in enumerate(scores["worst"]):
        one["name"] = HOSTILE[number]
    (run / "evaluation" / "scores.json").write_text(json.dumps(scores))
    twin = make_run(tmp_path / "<img src=x onerror=alert(1)>", lines)
    for folders in ([run], [run, twin]):
        write_report(folders, tmp_path / "page.html")
        page = Tags()
        page.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert [attributes for tag, attributes in page.tags if tag == "script"] == [
            {"type": "application/json", "id": "data"},
            {},
        ]
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
        assert all(source.startswith("data:image/") for source in sources)
        for name in (*HOSTILE[:2], HOSTILE[3], HOSTILE[4], HOSTILE[5], "undecodable ?", "n" * 79 + "…"):
            assert name in page.text
        assert "49" not in page.text.split("Classes")[0].split("Result")[0]


def many_steps(number: int, every: int) -> list[dict]:
    random = np.random.default_rng(0).lognormal(size=(number // every, 2)).tolist()
    return [
        step(every * (place + 1), 1.0, steps=every, loss=loss, gradient_norm=norm, steps_per_epoch=5000)
        for place, (loss, norm) in enumerate(random)
    ]


def test_a_page_stays_small(tmp_path):
    names = [f"{number}{'n' * 300}" for number in range(1000)]
    large = make_run(tmp_path / "large", many_steps(1_000_000, 20), class_names=names, worst=24)
    write_report([large], tmp_path / "large.html")
    assert 100_000 < (tmp_path / "large.html").stat().st_size < LARGEST_PAGE_BYTES
    forty = [f"{number}{'ש' * 300}" for number in range(40)]
    runs = [
        make_run(tmp_path / f"run{number}", many_steps(40_000, 20), class_names=forty, worst=24) for number in range(8)
    ]
    write_report(runs, tmp_path / "many.html")
    assert 100_000 < (tmp_path / "many.html").stat().st_size < LARGEST_PAGE_BYTES
    with pytest.raises(UserError, match="at most 8"):
        write_report([*runs, large], tmp_path / "many.html")


@pytest.mark.parametrize("missing", ["environment.json", "metrics.jsonl", "evaluation/scores.json", "all"])
def test_missing_files_are_named(tmp_path, missing):
    run = make_run(tmp_path / "run")
    for name in ["environment.json", "metrics.jsonl", "evaluation/scores.json"] if missing == "all" else [missing]:
        (run / name).unlink()
    write_report([run], tmp_path / "page.html")
    write_report([run, make_run(tmp_path / "whole")], tmp_path / "both.html")
    for page in ("page.html", "both.html"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert (f"{missing} is missing" if missing != "all" else "metrics.jsonl is missing") in text


def test_an_unfinished_last_line_is_ignored(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "ti')
    assert list(read_history(run / "metrics.jsonl").steps) == [10, 20, 30, 40]


BAD_LINES = [
    "{half",
    "[]",
    '"step"',
    '{"kind": "step"}',
    "\x00",
    json.dumps(step(50, 1.0, loss="low")),
    json.dumps(event("end", 0, 1)),
    "[" * 100_000,
]


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_damaged_line_is_named(tmp_path, line):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(UserError, match=rf"metrics.jsonl, line {len(RESTARTED) + 1}, is damaged") as caught:
        write_report([run], tmp_path / "page.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


DAMAGED = {
    "evaluation/scores.json": ["{", "[]", '{"classes": 3}', "{}"],
    LEARNING_RATE: ["[]", "{}", '{"tried": [[1]], "suggested": 1}', '{"tried": [], "suggested": null}'],
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name in DAMAGED for content in DAMAGED[name]])
def test_a_damaged_file_is_named(tmp_path, name, content):
    run = make_run(tmp_path / "run")
    (run / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}' is damaged"):
        write_report([run], tmp_path / "page.html")


STRANGE = [None, "text", -1, 0, 1e308, float("nan"), float("inf"), [], {}, True, "\udcff", 10**400]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_change_of_a_file_gives_a_page_or_one_line(tmp_path, seed):
    random = np.random.default_rng(seed)
    run = make_run(tmp_path / "run")
    files = [run / name for name in ("config.json", "environment.json", "evaluation/scores.json")]
    pages, messages = 0, []
    for _ in range(30):
        lines = [dict(line) for line in RESTARTED]
        for _ in range(random.integers(0, 3)):
            line = lines[random.integers(len(lines))]
            line[list(line)[random.integers(len(line))]] = STRANGE[random.integers(len(STRANGE))]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        file = files[random.integers(len(files))]
        before = file.read_text()
        content = json.loads(before)
        content[list(content)[random.integers(len(content))]] = STRANGE[random.integers(len(STRANGE))]
        file.write_text(json.dumps(content))
        try:
            write_report([run], tmp_path / "page.html")
            data = re.search(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(encoding="utf-8"))
            json.loads(data[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
            pages += 1
        except UserError as error:
            messages.append(str(error))
        file.write_text(before)
    assert pages
    assert messages
    assert not any("\n" in message for message in messages)


def test_the_command_writes_where_it_says(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    result = command_here("report", str(run))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"report       {run}/report.html\n"
    monkeypatch.chdir(tmp_path)
    result = command_here("report", str(run), str(make_run(tmp_path / "other")))
    differ = "run and other are not compared: scripts/evaluate.py run writes which images it classifies correctly.\n"
    assert (result.returncode, result.stdout) == (0, f"{differ}report       report.html\n")
    assert "2 runs compared" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_full_disk_leaves_the_page_as_it_was(tmp_path, small_disk):
    run = make_run(tmp_path / "run")
    output = small_disk / "page.html"
    output.write_text("the old page")
    with pytest.raises(UserError, match="No space left"):
        write_report([run], output)
    assert output.read_text() == "the old page"
    assert os.listdir(small_disk) == ["page.html"]


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    run, output = make_run(tmp_path / "run", None), tmp_path / "page.html"
    waiting = [[{**line, "time": 4e9} for line in lines] for lines in (RESTARTED[:5], RESTARTED[5:])]
    polls = []

    def append_lines(seconds: float) -> None:
        polls.append('http-equiv="refresh"' in output.read_text(encoding="utf-8"))
        if waiting:
            with (run / "metrics.jsonl").open("a") as stream:
                stream.writelines(json.dumps(line) + "\n" for line in waiting.pop(0))

    monkeypatch.setattr(time, "sleep", append_lines)
    watch([run], output)
    assert polls[:2] == [True, True]
    assert not any(polls[2:])
    assert len(polls) == 5
    text = output.read_text(encoding="utf-8")
    assert "Finished: 2 epochs, 40 steps." in text
    assert 'http-equiv="refresh"' not in text


def test_watching_ends_with_ctrl_c(tmp_path, monkeypatch):
    lines = [{**line, "time": 4e9} for line in RESTARTED[:5]]

    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", press)
    watch([make_run(tmp_path / "run", lines)], tmp_path / "page.html")
    assert 'http-equiv="refresh"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.2."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_contrast(theme):
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", (TEMPLATE / "style.css").read_text())
    colours = {name: luminance(pair[theme]) for name, *pair in found}

    def contrast(one: str, other: str) -> float:
        low, high = sorted((colours[one], colours[other]))
        return (high + 0.05) / (low + 0.05)

    for text in ("ink", "soft"):
        assert contrast(text, "paper") >= 4.5
        assert contrast(text, "wash") >= 4.5
    for ground in ("heat", "miss"):
        assert contrast("ink", ground) >= 4.5
    for line in [f"c{number}" for number in range(1, 9)] + ["focus"]:
        assert contrast(line, "paper") >= 3, line


def test_a_search_for_a_learning_rate_is_a_curve_over_rates(tmp_path):
    tried = {1e-3: [3.0, 2.0], 1e-2: [3.0, 1.0], 1e-1: [None, math.nan]}
    folder, output = make_run(tmp_path / "run"), tmp_path / "report.html"
    (folder / LEARNING_RATE).write_text(json.dumps(describe_search(1e-2, tried), allow_nan=False))
    write_report([folder], output)
    chart = rate_search_chart(describe_search(1e-2, tried))
    assert [text for _, text in chart["x_axis"].ticks] == [pages.number(rate, 1) for rate in tried]
    assert chart["lines"][0]["path"].startswith("M0 ")  # at the left edge, and the next in the middle
    assert "L500 " in chart["lines"][0]["path"]
    assert chart["lines"][0]["path"].count("L") == 1, "a rate that is too high has no loss"
    assert chart["marks"] == [pytest.approx(50)]
    page = output.read_text()
    assert 'id="chart-rate_search"' in page
    assert chart["caption"] in page
    flat = rate_search_chart(describe_search(None, {1e-3: [2.0, 2.0]}))
    assert flat["marks"] == []
    assert flat["caption"].endswith("none clearly lowered the loss, so no rate is suggested.")
    assert rate_search_chart(describe_search(None, {1e-3: [None, None]})) is None, "nothing to draw"


@pytest.fixture
def folder(tmp_path):
    """A run without weights and without an evaluation, as one that was stopped in its first epoch."""
    folder = RunFolder(tmp_path, "run")
    make_run(folder.path, class_names=None)
    return folder


def leave(folder, **changes):
    return leave_files(folder, {"val": None}, **({"with_card": False, "with_report": True} | changes))


def test_a_report_that_cannot_be_written_is_a_note(folder):
    assert leave(folder) == [f"report       {folder.path}/report.html"]
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    folder.metrics.write_text("damaged\n")
    (note,) = leave(folder)
    assert note.startswith("note: the report could not be written (UserError: ")
    assert (folder.path / "report.html").read_text(encoding="utf-8") == page


def test_a_model_card_that_cannot_be_written_is_a_note(folder):
    report, note = leave(folder, with_card=True)
    assert report == f"report       {folder.path}/report.html"
    assert note.startswith("note: the model card could not be written (UserError: weights file ")


def test_without_a_report(folder):
    assert leave(folder, with_report=False) == []
    assert not (folder.path / "report.html").exists()
    assert json.loads((folder.path / "config.json").read_text())["report"] is True
