"""The numbers of the report against sums made by hand, and what it does with bad input."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_runs import GLOBAL_BATCH, RESTARTED, START, end, epoch, event, make_run, step

from delivery.report.curves import Line, draw, thin
from delivery.report.facts import command_to_repeat, differences, key_figures, settings, surroundings
from delivery.report.history import History, read_history
from delivery.report.incidents import find_incidents
from delivery.report.judgement import class_table, confusion
from delivery.report.page import TEMPLATE, write_report
from delivery.report.run_files import read_run
from delivery.report.samples import wrong_samples
from delivery.report.spending import spend_memory, spend_time
from delivery.report.status import PATIENCE_SECONDS, find_status
from delivery.report.watch import watch
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
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


def history_of(lines) -> History:
    history = History(GLOBAL_BATCH)
    for line in lines:
        history.add(line)
    return history


def seconds_of(history: History) -> dict[str, float]:
    """Add up the spans of all processes."""
    total: dict[str, float] = {}
    for process in history.processes:
        for name, seconds in process.spans().items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def test_all_time_counts_and_the_later_line_of_a_step_holds():
    history = history_of(RESTARTED)
    assert list(history.steps) == [10, 20, 30, 40]
    assert list(history.columns["loss"]) == [0.4, 0.2, 0.25, 0.125]
    # Before the kill: 4 s in intervals, of which a quarter was data; then the end line's 2.5 s.
    assert seconds_of(history) == pytest.approx(
        {"data": 1.0 + 0.625, "forward": 3.0 + 1.875, "evaluation": 0.5 + 0.5, "saving": 0.25}
    )
    assert (history.repeated_steps, history.repeated_seconds) == (10, 2.0)
    assert [process.gap_seconds for process in history.processes] == [0.0, 7.0]
    assert history.memory_bytes_per_rank == [3000, 2500]
    spent = spend_time(history)
    assert {part.name: part.text for part in spent.parts}["restarting"] == "7.0\u202fs"
    assert spent.total == "14.8\u202fs"
    assert sum(part.share_of_all for part in spent.parts) == pytest.approx(1.0)


def test_a_resume_within_an_interval_repeats_a_part_of_it():
    history = history_of([step(10, 1.0), step(20, 2.0), event("resume", 5, 15), step(20, 0.5, steps=5), step(30, 1.0)])
    assert list(history.steps) == [10, 20, 30]
    assert (history.repeated_steps, history.repeated_seconds) == (5, 1.0)
    assert seconds_of(history) == pytest.approx({"data": 4.5 / 4, "forward": 13.5 / 4})


def test_a_run_that_began_anew_without_a_checkpoint():
    history = history_of([step(10, 1.0, at=1), step(20, 1.0, at=2), step(10, 1.0, at=9)])
    assert list(history.steps) == [10]
    assert (history.repeated_steps, history.repeated_seconds) == (20, 2.0)
    assert [process.gap_seconds for process in history.processes] == [0.0, 6.0]


def test_epochs_after_a_resume_are_forgotten():
    lines = [step(20, 1.0), epoch(1, 0.5), step(40, 1.0), epoch(2, 0.9), event("resume", 9, 20)]
    assert sorted(history_of(lines).epochs) == [1]
    assert history_of(lines).best_epoch["val_top1"] == 0.5


def test_old_lines_without_the_new_fields():
    old = {
        name: value
        for name, value in epoch(1, 0.5).items()
        if name not in ("evaluation_seconds", "memory_bytes_per_rank")
    }
    history = history_of([step(20, 1.0, time_shares={}), old])
    assert history.memory_bytes_per_rank == [1000]
    assert any("not recorded" in remark for remark in spend_time(history_of([step(20, 1.0), old])).remarks)
    assert spend_time(history) is None


@pytest.mark.parametrize("seed", range(3))
def test_thinning_keeps_the_extremes_of_each_column(seed):
    random = np.random.default_rng(seed)
    x, y = np.arange(5000.0), random.normal(size=5000)
    y[[17, 3333]] = 1e6, -1e6
    y[random.integers(0, 5000, 200)] = np.nan
    y[2000:2100] = np.nan
    columns = 50
    kept_x, kept_y = map(np.array, thin(x, y, columns))
    kept_y = kept_y.astype(float)
    assert len(kept_x) <= 2 * columns + 2
    assert (np.diff(kept_x) > 0).all()
    for column in range(columns):
        low, high = 4999 * column / columns, 4999 * (column + 1) / columns
        inside = (x >= low) & (x < high)
        kept = kept_y[(kept_x >= low) & (kept_x < high)]
        if np.isfinite(y[inside]).any():
            assert (np.nanmin(kept), np.nanmax(kept)) == (np.nanmin(y[inside]), np.nanmax(y[inside]))
        else:
            assert np.isnan(kept).all()
            assert len(kept)


def test_a_few_points_are_all_kept_and_gaps_stay():
    assert thin([1, 2, 3], [1.0, float("inf"), 3.0], 10) == ([1, 2, 3], [1.0, None, 3.0])


def test_a_line_is_drawn_where_its_values_lie():
    chart = draw("a", "A", [Line("a", 1, [0, 1, 2, 4], [0.0, 5.0, float("nan"), 10.0], "a")], from_zero=True)
    (line,) = chart.lines
    assert line["path"] == "M0 1000L250 500M1000 0"
    assert (chart.y_axis.low, chart.y_axis.high) == (0, 10)
    assert [text for _, text in chart.x_axis.ticks] == ["0", "1", "2", "3", "4"]
    log = draw("b", "B", [Line("b", 1, [0, 1, 2], [0.01, 0.1, 1.0], "b")], may_be_log=True)
    assert log.y_axis.is_log
    assert log.lines[0]["path"] == "M0 1000L500 500L1000 0"


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-5.0, -5.0], [1e-300, 1e300], [float("nan")], []])
def test_strange_values_make_no_chart_or_a_sound_one(values):
    chart = draw("a", "A", [Line("a", 1, list(range(len(values))), values, "a")], may_be_log=True)
    if not np.isfinite(values).any():
        assert chart is None
        return
    assert all(0 <= place <= 100.001 for place, _ in [*chart.x_axis.ticks, *chart.y_axis.ticks])
    assert all(0 <= float(number) <= 1000 for number in re.findall(r"[\d.]+", chart.lines[0]["path"].replace("h0", "")))


FINISHED = [step(40, 1.0), epoch(1, 0.5), epoch(2, 0.5), end(40, 1.0)]


@pytest.mark.parametrize(
    ("lines", "later", "config", "word"),
    [
        (FINISHED, 1e6, {}, "finished"),
        ([step(20, 1.0), epoch(1, 0.5), end(20, 1.0)], 1e6, {}, "stopped"),
        ([step(20, 1.0), epoch(1, 0.5), epoch(2, 0.25), end(20, 1.0)], 1e6, {"early_stopping_patience": 1}, "finished"),
        ([step(20, 1.0)], PATIENCE_SECONDS - 1, {}, "going on"),
        ([step(20, 1.0)], PATIENCE_SECONDS + 1, {}, "broken off"),
        ([step(20, 1.0), end(20, 1.0), event("resume", 0, 20)], 5, {}, "going on"),
        ([], 5, {}, "not begun"),
    ],
)
def test_status(tmp_path, lines, later, config, word):
    run = read_run(make_run(tmp_path / "run", lines, **config))
    if word == "finished" and config:
        run = dataclasses.replace(run, config=run.config | {"epochs": 9})
    assert find_status(run, START + later).word == word


def test_key_figures_and_settings(tmp_path):
    run = read_run(make_run(tmp_path / "run", learning_rate=0.5))
    figures = {figure.name: figure for figure in key_figures(run)}
    assert figures["top-1 accuracy"].value == "66.67\u202f%"
    assert figures["top-1 accuracy"].remark == "6 of 9 images, epoch 2 of 2"
    assert figures["training time"].value == "6.8\u202fs"  # 4 + 0.25 before the kill, 2.5 after it
    assert figures["images per second"].value == "267"  # 50 steps of 32 images in 6 s
    assert figures["peak memory"].value == "3.00\u202fkB"
    rows = settings(run)
    assert [(row.name, row.value, row.default) for row in rows if row.differs] == [
        ("--epochs", "2", "30"),
        ("--learning-rate", "0.5", "0.001"),
    ]
    assert [row.differs for row in rows] == sorted((row.differs for row in rows), reverse=True)
    assert command_to_repeat(run) == "bash scripts/launch_distributed.sh mobilenet ddp 2 16 2 --learning-rate 0.5"
    newer = dataclasses.replace(run, config=run.config | {"of_tomorrow": 1})
    assert command_to_repeat(newer) == "scripts/train_distributed.py --epochs 2"
    other = read_run(make_run(tmp_path / "other", learning_rate=0.25))
    assert differences([rows, settings(other)]) == [("--learning-rate", ["0.5", "0.25"])]
    assert differences([surroundings(run), surroundings(other)]) == []


def test_without_scores_the_best_epoch_speaks(tmp_path):
    figures = {figure.name: figure for figure in key_figures(read_run(make_run(tmp_path / "run", class_names=None)))}
    assert figures["top-1 accuracy"].value == "75.00\u202f%"
    assert figures["top-1 accuracy"].remark == "10 images, epoch 2 of 2"


def test_incidents():
    found = find_incidents(history_of(RESTARTED))
    assert [(row.kind, row.step) for row in found.rows] == [("resumed", 20), ("slow rank", 30), ("skipped step", 35)]
    assert "rank 1 (host node): 400 ms of work a step, the others 200 ms (median)" in found.rows[1].words
    assert [name for name, _ in found.lanes] == ["restarts", "skipped steps", "slow ranks", "checkpoints"]
    assert found.lanes[0][1] == [50.0]
    assert found.summary[0] == "1 resume, 1 skipped step and 1 warning of a slow rank."
    assert find_incidents(History(None)).rows == []


def test_classes_and_confusion(tmp_path):
    scores = read_run(make_run(tmp_path / "run")).scores
    found = confusion(scores)
    assert [[cell.samples for cell in row] for row in found.matrix] == [[2, 1, 0], [0, 2, 1], [1, 0, 2]]
    assert [(cell.shade, cell.is_right) for cell in found.matrix[0]] == [(7, True), (3, False), (0, False)]
    assert found.pairs[0] == ("cat", "dog", 1, "33.3\u202f%")
    many = read_run(make_run(tmp_path / "many", class_names=[f"c{number}" for number in range(1000)])).scores
    many["classes"][777]["f1"] = 0.0
    table = class_table(many)
    assert (len(table.rows), table.left_out, table.rows[0][0]) == (100, 900, "c777")
    assert confusion(many).matrix == []
    assert (len(confusion(many).pairs), confusion(many).pairs_left_out) == (20, 980)


def test_only_wrong_samples_are_shown(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    (run.worst_pictures / "001.png").write_bytes(b"no picture")
    shown = wrong_samples(run)
    assert [(sample.true, sample.predicted) for sample in shown] == [("cat", "dog"), ("dog", "cow")]
    assert [sample.picture[:16] for sample in shown] == ["data:image/jpeg;", ""]


def test_memory_of_many_ranks():
    history = History(None)
    history.memory_bytes_per_rank = [1_000_000 + rank for rank in range(100)]
    spent = spend_memory(history)
    assert [part.name for part in spent.parts] == [f"rank {rank}" for rank in range(99, 91, -1)]
    assert spent.remarks


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
        make_run(tmp_path / f"run{number}", many_steps(40_000, 20), class_names=forty, worst=24) for number in range(12)
    ]
    write_report(runs, tmp_path / "many.html")
    assert 100_000 < (tmp_path / "many.html").stat().st_size < LARGEST_PAGE_BYTES
    with pytest.raises(UserError, match="at most 12"):
        write_report([*runs, large], tmp_path / "many.html")


@pytest.mark.parametrize("missing", ["environment.json", "metrics.jsonl", "evaluation/scores.json", "all"])
def test_what_is_missing_is_said(tmp_path, missing):
    run = make_run(tmp_path / "run")
    for name in ["environment.json", "metrics.jsonl", "evaluation/scores.json"] if missing == "all" else [missing]:
        (run / name).unlink()
    write_report([run], tmp_path / "page.html")
    write_report([run, make_run(tmp_path / "whole")], tmp_path / "both.html")
    for page in ("page.html", "both.html"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert (f"{missing} is missing" if missing != "all" else "metrics.jsonl is missing") in text


def test_a_half_last_line_is_passed_over(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "ti')
    assert list(read_history(run / "metrics.jsonl", GLOBAL_BATCH).steps) == [10, 20, 30, 40]


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
    with pytest.raises(UserError, match=rf"metrics.jsonl, line {len(RESTARTED) + 1}: is damaged") as caught:
        write_report([run], tmp_path / "page.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"classes": 3}', "{}"])
def test_damaged_scores_are_named(tmp_path, content):
    run = make_run(tmp_path / "run")
    (run / "evaluation" / "scores.json").write_text(content)
    with pytest.raises(UserError, match=r"scores.json' is damaged"):
        write_report([run], tmp_path / "page.html")


STRANGE = [None, "text", -1, 0, 1e308, float("nan"), float("inf"), [], {}, True, "\udcff", 10**400]


@pytest.mark.parametrize("seed", range(4))
def test_any_change_of_a_file_gives_a_page_or_one_line(tmp_path, seed):
    random = np.random.default_rng(seed)
    run = make_run(tmp_path / "run")
    files = [run / name for name in ("config.json", "environment.json", "evaluation/scores.json")]
    pages, told = 0, []
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
            told.append(str(error))
        file.write_text(before)
    assert pages
    assert told
    assert not any("\n" in line for line in told)


def report(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=60)


def test_the_script_writes_where_it_says(tmp_path):
    run = make_run(tmp_path / "run")
    result = report(str(run))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"report       {run}/report.html\n"
    result = report(str(run), str(make_run(tmp_path / "other")), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "report       report.html\n")
    assert "2 runs compared" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_mistakes_are_one_line(tmp_path):
    run = make_run(tmp_path / "run")
    for words, told in (
        ([str(tmp_path / "nothing")], "is neither"),
        ([str(run), "--output", str(tmp_path / "missing" / "page.html")], "cannot be written"),
        ([str(run), "--output", str(tmp_path)], "is a folder"),
        ([str(run), "--wach"], "--watch"),
    ):
        result = report(*words)
        assert result.returncode == 2
        assert re.fullmatch(rf"report: .*{re.escape(told)}.*\n", result.stderr), result.stderr


def test_a_full_disk_leaves_the_page_as_it_was(tmp_path, small_disk):
    run = make_run(tmp_path / "run")
    output = small_disk / "page.html"
    output.write_text("the old page")
    with pytest.raises(UserError, match="No space left"):
        write_report([run], output)
    assert output.read_text() == "the old page"
    assert os.listdir(small_disk) == ["page.html"]


def test_watching_ends_with_the_run(tmp_path):
    run, output = make_run(tmp_path / "run", None), tmp_path / "page.html"
    waiting = [[{**line, "time": 4e9} for line in lines] for lines in (RESTARTED[:5], RESTARTED[5:])]
    polls = []

    def go_on(seconds: float) -> None:
        polls.append('http-equiv="refresh"' in output.read_text(encoding="utf-8"))
        if waiting:
            with (run / "metrics.jsonl").open("a") as stream:
                stream.writelines(json.dumps(line) + "\n" for line in waiting.pop(0))

    watch([run], output, print, sleep=go_on)
    assert polls[:2] == [True, True]
    assert not any(polls[2:])
    assert len(polls) == 5
    text = output.read_text(encoding="utf-8")
    assert "Finished: 2 epochs, 40 steps." in text
    assert 'http-equiv="refresh"' not in text


def test_watching_ends_with_ctrl_c(tmp_path):
    lines = [{**line, "time": 4e9} for line in RESTARTED[:5]]

    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    watch([make_run(tmp_path / "run", lines)], tmp_path / "page.html", print, sleep=press)
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


def test_the_report_needs_no_torch():
    code = "import sys, delivery.report.watch, delivery.trained_model; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        == "False\n"
    )
