"""The numbers of the report against sums made by hand."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from made_runs import RESTARTED, START, end, epoch, event, make_run, step

from zerovision.delivery.report.charts import Frame, Line, draw, single_run_charts, thin
from zerovision.delivery.report.per_class import MOST_IMAGES, class_table, confusion, sample_images
from zerovision.delivery.report.run_facts import (
    SILENT_SECONDS,
    command_of,
    differences,
    environment_facts,
    find_incidents,
    find_status,
    key_figures,
    memory_breakdown,
    settings,
    time_breakdown,
)
from zerovision.delivery.report.run_files import History, count_global_batch, read_run


def history_of(lines) -> History:
    history = History()
    for line in lines:
        history.add(line)
    return history


def line_of(x, y) -> Line:
    return Line("a", 1, np.array(x, dtype=float), np.array(y, dtype=float), "a")


def figures_of(run) -> dict:
    return {figure.name: figure for figure in key_figures(run)}


def seconds_of(history: History) -> dict[str, float]:
    """Add up the spans of all processes."""
    total: dict[str, float] = {}
    for process in history.processes:
        for name, seconds in process.spans().items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def test_all_lines_count_for_the_time_and_the_latest_for_the_curves():
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
    time = time_breakdown(history)
    assert {row.name: row.text for row in time.rows}["restarting"] == "7 s"
    assert time.total == "14.8 s"
    assert sum(row.share_of_total for row in time.rows) == pytest.approx(1.0)


def test_the_logged_seconds_of_an_interval_are_its_time():
    """In 10 steps of 32 an interval at the end of an epoch may have 300 images, the rest is padding."""
    lines = [step(10, 2.0), step(20, 1.0) | {"images_per_second": 300.0}, step(30, 4.0)]
    history = history_of(lines)
    assert list(history.columns["interval_seconds"]) == [2.0, 1.0, 4.0]
    assert (history.logged_seconds, history.logged_images) == (7.0, 320 + 300 + 320)


@pytest.mark.parametrize(
    ("config", "ranks", "images"),
    [
        ({}, 4, 64),
        ({"tensor_parallel": 2}, 4, 32),
        ({"pipeline_parallel": 4, "gradient_accumulation_steps": 8}, 4, 128),
        ({"tensor_parallel": 2, "pipeline_parallel": 3}, 12, 32),
        ({"tensor_parallel": "two"}, 4, None),
    ],
)
def test_ranks_that_share_a_batch_count_it_once(config, ranks, images):
    assert count_global_batch({"batch_size": 16} | config, {"ranks": ranks}) == images


@pytest.mark.parametrize(
    ("busy", "lines"),
    [
        ({"a": 0.5}, {"cores of the machine, by all programs": "50.00 %"}),
        (
            {"a": 0.5, "b": 0.25, "c": 0.75},
            {"cores of the idlest machine": "25.00 %", "cores of the busiest machine": "75.00 %"},
        ),
        ({}, {}),
    ],
)
def test_cores_and_disk_are_curves(busy, lines):
    changes = {"cpu_utilization": busy, "disk_free_bytes": 7e9} if busy else {}
    charts = {chart["key"]: chart for chart in single_run_charts(history_of([step(20, 1.0, **changes)]))}
    drawn = charts["use"]["lines"] if busy else []
    assert {line["name"]: line["last"].replace("\u202f", " ") for line in drawn} == lines
    assert charts.keys() >= {"use", "disk"} if busy else charts.keys().isdisjoint({"use", "disk"})
    assert not busy or charts["disk"]["lines"][0]["last"] == "7.000"


def test_an_epoch_without_a_step_has_no_training_curve():
    """As of a head that is solved for."""
    for changes, lines in (({"train_loss": None, "train_top1": None}, 1), ({}, 2)):
        assert len(single_run_charts(history_of([epoch(1, 0.5, **changes)]))[0]["lines"]) == lines


def test_a_resume_within_an_interval_repeats_a_part_of_it():
    history = history_of([step(10, 1.0), step(20, 2.0), event("resume", 5, 15), step(20, 0.5, steps=5), step(30, 1.0)])
    assert list(history.steps) == [10, 20, 30]
    assert (history.repeated_steps, history.repeated_seconds) == (5, 1.0)
    assert seconds_of(history) == pytest.approx({"data": 4.5 / 4, "forward": 13.5 / 4})


def test_a_start_that_found_nothing_left_to_train_is_none():
    lines = [*FINISHED, event("resume", 100, 40), event("resume", 1e5, 40), step(60, 1.0, at=1e5 + 1), end(60, 1.0)]
    history = history_of(lines)
    assert [(start.gap_seconds, start.follows_failure) for start in history.processes] == [(0, False), (1e5, False)]
    assert "restarting" not in {row.name for row in time_breakdown(history).rows}


def test_a_run_that_began_anew_without_a_checkpoint():
    history = history_of([step(10, 1.0, at=1), step(20, 1.0, at=2), step(10, 1.0, at=9)])
    assert list(history.steps) == [10]
    assert (history.repeated_steps, history.repeated_seconds) == (20, 2.0)
    assert [process.gap_seconds for process in history.processes] == [0.0, 6.0]


def test_epochs_after_a_resume_are_forgotten():
    lines = [step(20, 1.0), epoch(1, 0.5), step(40, 1.0), epoch(2, 0.9), event("resume", 9, 20)]
    assert sorted(history_of(lines).epochs) == [1]
    assert history_of(lines).best_epoch["val_top1"] == 0.5
    for best_by, best in (("loss", 2), ("auroc", 1)):
        chosen = [epoch(number, 0.5, best_by=best_by, score=score) for number, score in ((1, 0.9), (2, 0.2), (3, 0.4))]
        history = history_of([step(20, 1.0), *chosen])
        assert history.best_epoch["epoch"] == best
        caption = single_run_charts(history)[1]["caption"]
        assert {"loss": "with loss 0.2000", "auroc": "with AUROC 90.00"}[best_by] in caption


@pytest.mark.parametrize("seed", range(3))
def test_thinning_keeps_the_extremes_of_each_column(seed):
    random = np.random.default_rng(seed)
    x, y = np.arange(5000.0), random.normal(size=5000)
    y[[17, 3333]] = 1e6, -1e6
    y[random.integers(0, 5000, 200)] = np.nan
    y[2000:2100] = np.nan
    columns = 50
    _, _, kept_x, kept_y, *_ = thin(line_of(x, y), columns)
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
    line = thin(line_of([1, 2, 3], [1.0, float("inf"), 3.0]), 10)
    np.testing.assert_array_equal(line.x, [1, 2, 3])
    np.testing.assert_array_equal(line.y, [1.0, np.nan, 3.0])


def test_a_line_is_drawn_where_its_values_lie():
    chart = draw("a", "A", [line_of([0, 1, 2, 4], [0.0, 5.0, float("nan"), 10.0])], Frame(from_zero=True))
    (line,) = chart["lines"]
    assert line["path"] == "M0 1000L250 500M1000 0"
    assert (chart["y_axis"].low, chart["y_axis"].high) == (0, 10)
    assert [text for _, text in chart["x_axis"].ticks] == ["0", "1", "2", "3", "4"]
    log = draw("b", "B", [line_of([0, 1, 2], [0.01, 0.1, 1.0])], Frame())
    assert log["y_axis"].is_log
    assert log["lines"][0]["path"] == "M0 1000L500 500L1000 0"


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-5.0, -5.0], [1e-300, 1e300], [float("nan")], []])
def test_strange_values_make_no_chart_or_a_sound_one(values):
    chart = draw("a", "A", [line_of(range(len(values)), values)], Frame())
    if not np.isfinite(values).any():
        assert chart is None
        return
    assert all(0 <= place <= 100.001 for place, _ in [*chart["x_axis"].ticks, *chart["y_axis"].ticks])
    path = chart["lines"][0]["path"].replace("h0", "")
    assert all(0 <= float(number) <= 1000 for number in re.findall(r"[\d.]+", path))


GAVE_UP = [step(20, 1.0), event("gave_up", 1, 24, exit_code=65, reason="3 steps in a row were skipped")]
EARLY = [step(20, 1.0), epoch(1, 0.5), epoch(2, 0.25), end(20, 1.0)]
FINISHED = [step(40, 1.0), epoch(1, 0.5), epoch(2, 0.5), end(40, 1.0)]
WHY = "the validation loss is nan"
DIVERGED = [
    *FINISHED[:2],
    epoch(2, 0.75, val_loss=float("nan"), diverged=WHY),
    event("diverged", 1, 40, epoch=2, reason=WHY),
    end(40, 1.0),
]


@pytest.mark.parametrize(
    ("lines", "later", "config", "word"),
    [
        (FINISHED, 1e6, {}, "finished"),
        (DIVERGED, 1e6, {}, "diverged"),
        ([step(20, 1.0), epoch(1, 0.5), end(20, 1.0)], 1e6, {}, "stopped"),
        (EARLY, 1e6, {"early_stopping_patience": 1}, "finished"),
        ([step(20, 1.0)], SILENT_SECONDS - 1, {}, "running"),
        ([step(20, 1.0)], SILENT_SECONDS + 1, {}, "crashed"),
        ([step(20, 1.0), end(20, 1.0), event("resume", 0, 20)], 5, {}, "running"),
        ([*FINISHED, event("resume", 9e5, 40)], 1e6, {}, "finished"),
        ([*EARLY, event("resume", 9e5, 40)], 1e6, {"early_stopping_patience": 1}, "finished"),
        (GAVE_UP, 1e6, {}, "gave up"),
        ([*GAVE_UP, event("resume", 0, 20)], 5, {}, "running"),
        ([], 5, {}, "not started"),
    ],
)
def test_status(tmp_path, lines, later, config, word):
    run = read_run(make_run(tmp_path / "run", lines, **config))
    if word == "finished" and config:
        run = dataclasses.replace(run, config=run.config | {"epochs": 9})
    assert find_status(run, START + later).word == word


def test_a_diverged_epoch_is_never_the_best_and_is_an_incident(tmp_path):
    run = read_run(make_run(tmp_path / "run", DIVERGED, class_names=None))
    assert run.history.best_epoch["epoch"] == 1
    assert find_status(run).sentence == f"Diverged: after epoch 2 of 2 {WHY}; the best epoch that did not diverge is 1."
    found = find_incidents(run.history)
    assert [row[1:] for row in found["rows"]] == [(40, "diverged", f"epoch 2: {WHY}")]
    assert found["summary"][0] == "1 diverged epoch."


def test_key_figures_and_settings(tmp_path):
    run = read_run(make_run(tmp_path / "run", learning_rate=0.5))
    figures = figures_of(run)
    assert figures["top-1 accuracy"].value == "66.67\u202f%"
    assert figures["top-1 accuracy"].remark == "95\u202f% interval [35.42, 87.94]; 6 of 9 images, epoch 2 of 2"
    assert figures["training time"].value == "6.75 s"  # 4 + 0.25 before the kill, 2.5 after it
    assert figures["images per second"].value == "267"  # 50 steps of 32 images in 6 s
    assert figures["peak memory"].value == "3 kB"
    assert "batch size found" not in figures
    assert ("top-5 accuracy" in figures, "val_top5" in run.history.epochs[1]) == (False, False), "of 3 classes"
    run = read_run(make_run(tmp_path / "six", class_names=list("abcdef")))
    assert "top-5 accuracy" in figures_of(run)
    assert "val_top5" in run.history.epochs[1]
    run = read_run(tmp_path / "run")
    (run.folder / "batch_size.json").write_text('{"batch_size": 16, "how": "planned 24; 8: fits"}')
    found = figures_of(read_run(run.folder))["batch size found"]
    assert (found.value, found.remark) == ("16", "planned 24; 8: fits")
    rows = settings(run)
    assert [(row.name, row.value, row.default) for row in rows if row.differs] == [
        ("--epochs", "2", "30"),
        ("--learning-rate", "0.5", "0.001"),
    ]
    assert [row.differs for row in rows] == sorted((row.differs for row in rows), reverse=True)
    assert command_of(run) == "bash scripts/launch_distributed.sh mobilenet ddp 2 16 2 --learning-rate=0.5"
    newer = dataclasses.replace(run, config=run.config | {"of_tomorrow": 1})
    assert command_of(newer) == "scripts/train_distributed.py --epochs 2"
    other = read_run(make_run(tmp_path / "other", learning_rate=0.25))
    assert differences([rows, settings(other)]) == [("--learning-rate", ["0.5", "0.25"])]
    assert differences([environment_facts(run), environment_facts(other)]) == []


def test_a_nested_environment_is_flattened(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    model = {"model_type": "vgg", "num_classes": 10, "stem_stride_changed": {"conv_stem": [2, 1]}}
    rows = environment_facts(
        dataclasses.replace(run, environment={"model": model, "cpu_cores": 2, "packages": {"a_b": "1"}})
    )
    assert [(row.name, row.value) for row in rows] == [
        ("model type", "vgg"),
        ("model num classes", "10"),
        ("model stem stride changed conv stem", "2, 1"),
        ("cpu cores", "2"),
        ("packages a b", "1"),
    ]


def test_the_caption_compares_losses_from_two_epochs_on(tmp_path):
    captions = [
        single_run_charts(history_of([step(10, 1.0), step(20, 1.0), *epochs]))[0]["caption"]
        for epochs in ([epoch(1, 0.5)], [epoch(1, 0.5), epoch(2, 0.5)])
    ]
    assert captions[0].startswith("2.00 after epoch 1 on the validation images. The training loss")
    assert captions[1].startswith("From 2.00 after epoch 1 to 1.00 after epoch 2 on the validation images; lowest in")


@pytest.mark.parametrize(
    ("values", "caption"),
    [((45.42, 45.41), "At the end: free 45.41."), ((45.0, 44.0), "From 45.00 to 44.00; between 44.00 and 45.00.")],
)
def test_a_line_that_hardly_moves_has_no_range(values, caption):
    lines = [Line("free", 1, np.arange(2.0), np.array(values), "disk")]
    assert draw("disk", "Free space", lines, Frame())["caption"] == caption


def test_without_scores_the_figures_are_of_the_best_epoch(tmp_path):
    found = figures_of(read_run(make_run(tmp_path / "run", class_names=None)))["top-1 accuracy"]
    assert (found.value, found.remark) == ("75.00\u202f%", "10 images, epoch 2 of 2")


def test_the_islands_of_each_round_are_those_of_the_last_time_it_was_taken(tmp_path):
    """The second round was taken by four, and again by three after a resume."""
    run = read_run(make_run(tmp_path / "run"))
    for number, islands in ((1, 4), (2, 4), (2, 3), (3, 3)):
        line = {"time": 0, "kind": "outer_step", "step": 5 * number, "round": number}
        run.history.add(line | {"islands": islands, "sent_bytes": 1000})
    figure = figures_of(run)["islands"]
    assert (figure.value, figure.remark) == ("4 in 1 round, 3 in 2 rounds", "rank 0 sent 3 kB in outer steps")


def test_the_balance_of_a_pipeline_is_that_of_its_latest_start(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    first = {"time": 0, "kind": "pipeline", "step": 0, "cuts": ["a", "b"], "stage_shares": [0.5, 0.3, 0.2]}
    latest = first | {"cuts": ["c"], "stage_shares": [0.6, 0.4]}
    run.history.add(first | {"wait_share": 0.5})
    run.history.add(latest | {"wait_share": 0.2})
    figure = figures_of(run)["a pipeline's ranks wait"]
    assert figure.value == "20\u202f%"
    assert figure.remark.endswith("stages begin at the input, c, and take 60\u202f%, 40\u202f%")
    run.history.add(latest | {"members": ["vgg, mobilenet", "vgg"], "wait_share": 0.17})
    figure = figures_of(run)["ranks with members wait"]
    assert (figure.value, figure.remark.partition("; ")[2]) == (
        "17\u202f%",
        "ranks have members vgg, mobilenet | vgg, and take 60\u202f%, 40\u202f%",
    )


def test_incidents():
    found = find_incidents(history_of(RESTARTED))
    kinds = [(20, "resumed"), (30, "slow rank"), (32, "wrong gradient"), (35, "skipped step")]
    assert [row[1:3] for row in found["rows"]] == kinds
    assert found["rows"][2][3] == "rank 0 (host node) or rank 1 (host other), first in stem.weight"
    assert "rank 1 (host node): 400 ms of work per step, 200 ms in the other ranks (median)" in found["rows"][1][3]
    lanes = dict(found["lanes"])
    assert [*lanes] == ["restarts", "skipped steps", "wrong gradients", "slow ranks", "checkpoints"]
    assert lanes["restarts"] == [50.0]
    assert found["summary"][0] == "1 resume, 1 skipped step, 1 wrong gradient and 1 warning of a slow rank."
    assert find_incidents(History())["rows"] == []


def test_classes_and_confusion(tmp_path):
    scores = read_run(make_run(tmp_path / "run")).scores
    found = confusion(scores)
    assert [[samples for samples, _ in row] for row in found["matrix"]] == [[2, 1, 0], [0, 2, 1], [1, 0, 2]]
    assert [shade for _, shade in found["matrix"][0]] == [7, 3, 0]
    assert found["pairs"][0] == ("cat", "dog", 1, "33.3\u202f%")
    many = read_run(make_run(tmp_path / "many", class_names=[f"c{number}" for number in range(1000)])).scores
    many["classes"][777]["f1"] = 0.0
    table = class_table(many)
    assert (len(table["rows"]), table["left_out"], table["rows"][0][0]) == (100, 900, "c777")
    assert confusion(many)["matrix"] == []
    assert (len(confusion(many)["pairs"]), confusion(many)["left_out"]) == (20, 980)


def test_only_misclassified_images_are_shown(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    (run.folder / "evaluation/worst/001.png").write_bytes(b"no picture")
    shown = sample_images(run.folder, run.scores, "worst", MOST_IMAGES)
    assert [(image["label"], image["prediction"]) for image in shown] == [("cat", "dog"), ("dog", "cow")]
    assert [image["data_uri"][:16] for image in shown] == ["data:image/jpeg;", ""]
    assert [image["why"][:16] for image in shown] == ["data:image/jpeg;", ""]
    (typical,) = sample_images(run.folder, run.scores, "typical", MOST_IMAGES)
    assert (typical["label"], typical["prediction"], typical["why"][:16]) == ("cat", "cat", "data:image/jpeg;")


def test_memory_of_many_ranks():
    memory = memory_breakdown([1_000_000 + rank for rank in range(100)])
    assert [row.name for row in memory.rows] == [f"rank {rank}" for rank in range(99, 91, -1)]
    assert memory.remarks
