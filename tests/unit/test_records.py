"""The records: their numbers follow from their raw logs, and the page from them."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from benchmarks import record as recorder
from benchmarks import record_data, variants
from benchmarks.record import PRESET, RECORDS, TASKS, make_record, our_command, read_our_log, read_timm_log, summary
from benchmarks.record_table import BEGIN, END, compared, table, time_ratio, top1_cell
from benchmarks.variants import STUDIES, ablation_table, marks, run_study, study_folder, zoo_table
from zerovision.training.base.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(RECORDS.glob("*/*/record.json"))


@pytest.mark.parametrize("file", FILES, ids=[str(file.parent.relative_to(RECORDS)) for file in FILES])
def test_a_record_follows_from_its_logs(file):
    record = json.loads(file.read_text())
    assert record["data_source"] == TASKS[record["task"]].data_source
    preset = yaml.safe_load((file.parent / PRESET).read_text())
    trained_with = (
        rf"^run \w+: {preset['model-type']}, ddp, {preset.get('precision', 'fp32')}, ",
        rf"^global batch \d+ = {preset['batch-size']} per CPU rank x 2 CPU ranks x "
        rf"{preset.get('gradient-accumulation-steps', 1)} .*; peak learning rate {preset['learning-rate']}$",
        rf"^data .*, augmentation {preset.get('augmentation', 'shift(_flip)?')}$",
        rf"^epoch 1/{preset['epochs']}  ",
    )
    for side, read in (("ours", read_our_log), ("timm", read_timm_log)):
        if side not in record:
            continue
        runs = record[side]["runs"]
        for run in runs:
            log = (file.parent / f"{side}-{run['seed']}.log").read_text()
            assert {"seed": run["seed"], **read(log)} == run
            assert side == "timm" or all(re.search(line, log, re.MULTILINE) for line in trained_with)
        assert record[side]["summary"] == summary(runs)


def test_the_page_shows_the_records():
    page = (ROOT / "docs/dev/records.md").read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table(RECORDS)


def rows_of(folder, records):
    """Write records of digits by the names of their folders; return the rows of their table."""
    for name, content in records.items():
        file = folder / "digits" / name / "record.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))
    return table(folder).splitlines()[2:]


def test_a_ratio_stands_beside_what_each_side_did(tmp_path):
    assert rows_of(tmp_path / "records", {"2026-01-01-a": record([0.9], [10], [40])}) == [
        "| `records/digits/2026-01-01-a` | 90.00 % (1 seed) | 10.0 | 90.00 % (1 seed) | 40.0 "
        "| 0.25 | 7 on 2: 6 on 1 | the first |"
    ]


@pytest.mark.parametrize("name", [name for name in STUDIES if study_folder(name).is_dir()])
def test_a_study_follows_from_its_logs_and_its_page_from_it(name):
    study, commands = json.loads((study_folder(name) / "study.json").read_text()), STUDIES[name].commands()
    names = [variant["name"] for variant in study["variants"]]
    assert [name for name in names if name != "whitened stem"] == list(commands)  # which was a flag's, once
    for number, variant in enumerate(study["variants"]):
        assert variant["name"] == "whitened stem" or variant["command"] == shlex.join(commands[variant["name"]])
        for run in variant["runs"]:
            log = study_folder(name) / f"{number}-{run['seed']}.log"
            assert {"seed": run["seed"], **read_our_log(log.read_text())} == run
        assert variant.get("summary") == (summary(variant["runs"]) if variant["runs"] else None)
    page, (begin, end) = (ROOT / STUDIES[name].page).read_text(), marks(name)
    assert page[page.index(begin) + len(begin) : page.index(end)].strip() == STUDIES[name].table(study)


def test_the_ablation_compares_with_the_whole():
    both = [("nothing", [0.91, 0.92, 0.93]), ("whitened stem", [0.89, 0.90, 0.91])]
    found = [{"name": name, "runs": runs(top1, [10, 30, 20])} for name, top1 in both]
    rows = ablation_table({"variants": [{**variant, "summary": summary(variant["runs"])} for variant in found]})
    assert rows.splitlines()[2:] == [
        "| nothing | 92.00 ± 1.00 % (3 seeds) |  |  |",
        "| whitened stem | 90.00 ± 1.00 % (3 seeds) | -2.00 | 0.07 |",
    ]


def test_the_zoo_has_both_trainings_of_a_model(monkeypatch):
    monkeypatch.setattr(variants, "ZOO", ("basic_cnn", "mobilenet"))
    trained = {"basic_cnn": [0.90], "mobilenet": [0.85], "basic_cnn 12 epochs": [0.92, 0.94], "mobilenet 12 epochs": []}
    found = [
        {"name": name, "runs": runs(top1, [60] * len(top1)), "machine": "2 cores"} for name, top1 in trained.items()
    ]
    for variant in found[:-1]:
        variant["summary"] = summary(variant["runs"])
    assert zoo_table({"variants": found}).splitlines()[2:] == [
        "| `basic_cnn` | 0.3 million | 90.00 % (1 seed) | 93.00 ± 1.41 % (2 seeds) | 2000 | 2 cores |",
        "| `mobilenet` | 1.5 million | 85.00 % (1 seed) | not trained | 2000 | 2 cores |",
    ]


def test_a_variant_is_trained_on_one_kind_of_machine(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(variants, "RECORDS", tmp_path)
    outcome = {"top1": 0.9, "seconds": 10.0}
    monkeypatch.setattr(variants, "train_ours", lambda words, seed, log: trained.append(seed) or outcome)
    data = tmp_path / "data.npz"
    data.write_bytes(b"images")
    for machine, seeds, only in (("one", 1, ["vgg"]), ("another", 1, ["mobilenet"]), ("one", 2, ["vgg"])):
        monkeypatch.setattr(variants, "machine_name", lambda name=machine: name)
        run_study("zoo", data, seeds, only)
    assert trained == [0, 0, 1]
    monkeypatch.setattr(variants, "ZOO", (*variants.ZOO, "resnet"))  # one more goes to the end
    run_study("zoo", data, 1, ["resnet"])
    assert trained == [0, 0, 1, 0]
    with monkeypatch.context() as patch:
        patch.setattr(variants, "IMAGE_SIZE", 64)
        with pytest.raises(UserError, match=r"another command for basic_cnn, .* begin anew\.$"):
            run_study("zoo", data, 2, ["vgg"])
    with pytest.raises(UserError, match="mobilenet was trained on another; go on there"):
        run_study("zoo", data, 2, ["mobilenet"])
    data.write_bytes(b"other images")
    with pytest.raises(UserError, match="has other data_sha256"):
        run_study("zoo", data, 2)


def test_a_study_goes_on_with_the_preset_that_it_began_with(trained, tmp_path):
    run_study("ablation", tmp_path / "images.npz", 1, ["nothing"])
    preset = study_folder("ablation") / PRESET
    assert preset.read_text() == (ROOT / "zerovision" / "presets" / "fashion-mnist.yaml").read_text()
    preset.write_text(preset.read_text().replace("epochs: 2", "epochs: 3"))
    with pytest.raises(UserError, match=r"has other values than presets/fashion-mnist\.yaml; move the folder away"):
        run_study("ablation", tmp_path / "images.npz", 2, ["nothing"])


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The logs of the trainings, none of which takes place; records lie in the test's folder, the current one."""
    logs = []

    def train(command, seed, log, views=""):
        logs.append(log.name)
        return {"top1": 0.9, "seconds": 10.0}

    monkeypatch.chdir(tmp_path)
    np.savez("images.npz", 0)
    Path("train.py").touch()
    for module in (recorder, variants):
        monkeypatch.setattr(module, "RECORDS", tmp_path / "records")
        monkeypatch.setattr(module, "train_ours", train)
    monkeypatch.setattr(recorder, "train_timm", train)
    monkeypatch.setattr(recorder, "write_table", lambda *_: None)
    return logs


def ends(module, line, monkeypatch, capsys):
    """Return exit code and message of a script for the words of a line."""
    monkeypatch.setattr(sys, "argv", ["", *line.split()])
    code = module.main()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        (recorder, "digits --seeds 0", "--seeds '0': expected a whole number from 1 to 1000."),
        (recorder, "digits --seeds -3", "--seeds '-3': expected a whole number from 1 to 1000."),
        (recorder, "digits --first-seed -1", "--first-seed '-1': expected a whole number from 0 to 1000000."),
        (recorder, "digits --timm-seeds -1", "--timm-seeds '-1': expected a whole number from 0 to 1000."),
        (recorder, "digits --timm-seeds 3", "--timm-seeds: timm's script is trained with --timm TRAIN.PY only."),
        (recorder, "digits --what a/b", "--what 'a/b': expected letters, digits, dots, dashes and underscores."),
        (recorder, "digits --data nope.npz", "--data 'nope.npz': expected an existing .npz file, made by benchmarks/"),
        (recorder, "digits --data train.py", "--data 'train.py': expected an existing .npz file, made by benchmarks/"),
        (recorder, "digits --timm nope.py --data images.npz", "--timm 'nope.py': expected the path of timm's train.py"),
        (recorder, "digits --timm train.py", "digits --timm needs a file: give --data FILE, made by benchmarks/"),
        (recorder, "fashion-mnist", "fashion-mnist needs a file: give --data FILE, made by benchmarks/record_data.py."),
        (recorder, "digit", "task 'digit': expected digits, fashion-mnist, cifar10 or cifar10-94."),
        (recorder, "", "give a task, one of digits, "),
        (variants, "zoo", "give --data FILE, or --table."),
        (variants, "zoo --data nope.npz", "--data 'nope.npz': expected an existing .npz file, made by benchmarks/"),
        (variants, "zoo --data images.npz --seeds 0", "--seeds '0': expected a whole number from 1 to 1000."),
        (variants, "zoo --data images.npz --only alexnet", "--only alexnet: no such variant; there are basic_cnn, "),
        (record_data, "digits", "the following arguments are required: file. "),
        (record_data, "digits digx", "file 'digx': expected a name that ends in .npz."),
        (record_data, "digits x.npz photos", "digits x.npz photos: expected digits FILE.npz."),
        (record_data, "digits none/x.npz", "[Errno 2] No such file or directory: 'none/x.npz'; usage: digits "),
        (record_data, "cifar10 x.npz", "cifar10 x.npz: expected cifar10 FILE.npz FOLDER, the unpacked npm package "),
        (record_data, "cifar10 x.npz none", "[Errno 2] No such file or directory: 'none/data_batch_1.png'; usage: "),
        (record_data, "fashion-mnist x.npz none", "[Errno 2] No such file or directory: 'none/train-images-idx3-ubyt"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(module, line, message, trained, monkeypatch, capsys):
    code, printed = ends(module, line, monkeypatch, capsys)
    name = module.__name__.rpartition(".")[2]
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith(f"{name}: {message}")
    assert not trained
    assert sorted(path.name for path in Path().iterdir()) == ["images.npz", "train.py"]


def test_a_path_holds_in_the_folder_of_the_training(trained, tmp_path):
    given = recorder.parse(["digits", "--data", "images.npz", "--timm", "train.py"])
    assert (given.data, given.timm) == (tmp_path / "images.npz", tmp_path / "train.py")
    assert variants.parse(["zoo", "--data", "images.npz"]).data == tmp_path / "images.npz"


def test_a_broken_record_keeps_what_was_trained_and_goes_on(trained, tmp_path, monkeypatch):
    file, both = tmp_path / "one" / "record.json", {"data": tmp_path / "images.npz", "timm": tmp_path / "train.py"}
    train = recorder.train_timm
    monkeypatch.setattr(recorder, "train_timm", lambda *_: sys.exit("broken"))
    with pytest.raises(SystemExit, match="broken"):
        make_record("digits", file.parent, seeds=2, timm_seeds=2, **both)
    kept = json.loads(file.read_text())
    assert (kept["ours"]["runs"], kept.get("timm")) == (runs([0.9], [10.0]), None)
    monkeypatch.setattr(recorder, "train_timm", train)
    make_record("digits", file.parent, seeds=2, timm_seeds=1, **both)
    assert trained == ["ours-0.log", "timm-0.log", "ours-1.log"]
    begun = json.loads(file.read_text())["begun"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"begun": "2026-11-22T10:00:00+00:00"}))
    make_record("digits", file.parent, seeds=3, timm_seeds=1, **both)
    assert json.loads(file.read_text())["begun"] == "2026-11-22T10:00:00+00:00" < begun
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "begun"}))
    make_record("digits", file.parent, seeds=4, timm_seeds=1, **both)
    make_record("digits", file.parent, seeds=2, timm_seeds=1, first_seed=7, **both)
    assert trained[-3:] == ["ours-7.log", "timm-7.log", "ours-8.log"]
    assert "begun" not in json.loads(file.read_text()), "its day is that of the folder's name"
    preset = file.parent / PRESET
    assert preset.read_text() == (ROOT / "zerovision" / "presets" / "digits.yaml").read_text()
    preset.write_text(preset.read_text().replace("epochs: 7", "epochs: 8"))
    with pytest.raises(UserError, match=r"has other values than presets/digits\.yaml; give another --what\.$"):
        make_record("digits", file.parent, seeds=2, timm_seeds=1, **both)
    with pytest.raises(UserError, match=r"record.json: has other data_sha256; give another --what\.$"):
        make_record("digits", file.parent, seeds=2, timm_seeds=0, data=None, timm=None)


def test_a_record_goes_on_under_its_whole_name(trained, monkeypatch, capsys):
    for what in ("without-shifts", "shifts", "shifts"):
        assert ends(recorder, f"digits --seeds 1 --what {what}", monkeypatch, capsys) == (0, "")
    assert trained == ["ours-0.log", "ours-0.log"]
    assert ends(recorder, "digits --first-seed 7 --seeds 2 --what shifts", monkeypatch, capsys) == (0, "")
    assert trained[2:] == ["ours-7.log", "ours-8.log"]
    assert len([*Path("records/digits").iterdir()]) == 2


def test_digits_is_written_under_the_given_name(trained, monkeypatch, capsys):
    assert ends(record_data, "digits x.npz", monkeypatch, capsys) == (0, "")
    assert np.load("x.npz")["x_test"].shape[1:] == (8, 8)


@pytest.mark.parametrize("task", TASKS)
def test_the_command_is_that_of_the_preset(task):
    words = our_command(task)
    assert words[:2] == ["bash", "scripts/launch_distributed.sh"]
    assert words[-2:] == ["--preset", task]


def runs(top1, seconds):
    return [{"seed": i, "top1": a, "seconds": s} for i, (a, s) in enumerate(zip(top1, seconds, strict=True))]


def record(top1, seconds, timm_seconds=(), machine="2 cores"):
    ours = "bash scripts/launch_distributed.sh basic_cnn ddp 2 32 7 --preset digits"
    sides = {"ours": {"runs": runs(top1, seconds), "command": ours}}
    if timm_seconds:
        timm_command = "python -m benchmarks.peers.timm_script train.py --epochs 6 -b 64"
        sides["timm"] = {"runs": runs(top1[: len(timm_seconds)], timm_seconds), "command": timm_command}
    for side in sides.values():
        side["summary"] = summary(side["runs"])
    return {"task": "digits", "machine": machine, **sides}


def test_summary_and_comparison():
    new, old = record([0.93, 0.94, 0.95], [10, 30, 20], [40, 60]), record([0.91, 0.92, 0.93], [40, 40, 40])
    assert new["ours"]["summary"] == {"top1_mean": 0.94, "top1_std": 0.01, "seconds_median": 20}
    assert time_ratio(new) == statistics.median([10 / 40, 30 / 60])
    # Welch's t of two samples of three with deviation 0.01: 0.02 / sqrt(2 * 0.01**2 / 3) = 2.449, 4 degrees of freedom
    assert compared(new, old) == "+2.00 points (p = 0.07), 0.50 of its seconds"
    elsewhere = record([0.91, 0.92, 0.93], [40, 40, 40], machine="2 other cores")
    assert compared(new, elsewhere) == "+2.00 points (p = 0.07), on another machine"
    again = record([0.93, 0.94, 0.95], [5, 15, 10])
    assert compared(again, new) == "the same accuracies, seed by seed, 0.50 of its seconds"
    assert compared(record([0.93, 0.94], [20, 20]), new) == "the same accuracies, seed by seed, 1.00 of its seconds"
    assert compared(record([0.93], [20]), new) == "-1.00 points, 1.00 of its seconds"
    assert compared(record([0.95], [20]), new) == "+1.00 points, 1.00 of its seconds"


def test_records_of_one_day_stand_in_the_order_in_which_they_were_begun(tmp_path):
    earlier = record([0.9], [10]) | {"begun": "2026-11-27T10:00:08+00:00"}
    later = record([0.93], [10]) | {"begun": "2026-11-27T10:00:09+00:00"}
    rows = rows_of(tmp_path / "records", {"2026-11-27-faster": earlier, "2026-11-27-even-faster": later})
    for row, texts in zip(rows, (("2026-11-27-faster`", "the first"), ("even-faster`", "+3.00 points")), strict=True):
        assert all(text in row for text in texts)


def test_several_views_stand_beside_the_plain_accuracy():
    lines = [{"kind": "epoch", "epoch": 3, "val_top1": 0.93, "seconds": 8.9}, {"kind": "end", "seconds": 9.0}]
    lines += [{"kind": "views", "epoch": 3, "top1": 0.94}]
    log = "\n".join(["run record: airbench", *map(json.dumps, lines)])
    one = read_our_log(log)
    assert read_our_log(f'{log}\n{{"kind": "code", "commit": "abc"}}') == one | {"commit": "abc"}
    assert one == {"top1": 0.93, "seconds": 9.0, "views_top1": 0.94}
    assert read_our_log(log.replace('"views", "epoch": 3', '"views", "epoch": 2')).keys() == {"top1", "seconds"}
    both = [one, {"top1": 0.932, "seconds": 9.0, "views_top1": 0.942}]
    found = {"runs": both, "summary": summary(both)}
    assert top1_cell(found) == "93.10 ± 0.14 % (2 seeds); several views 94.10 ± 0.14 %"


def test_a_part_that_was_killed_counts_with_its_epochs():
    ended = [{"kind": "epoch", "seconds": 9.0, "val_top1": 0.8}, {"kind": "end", "seconds": 9.5}, {"kind": "resume"}]
    killed = [{"kind": "epoch", "seconds": 8.0, "val_top1": 0.8}, {"kind": "resume"}]
    lines = [*ended, *killed, {"kind": "epoch", "seconds": 7.0, "val_top1": 0.9}, {"kind": "end", "seconds": 7.5}]
    assert read_our_log("\n".join(map(json.dumps, lines))) == {"top1": 0.9, "seconds": 25.0}


def test_a_log_of_timm():
    log = """3.10 Scheduled epochs: 2 (epochs + cooldown_epochs).
4.00 Train: 0 [   0/22 (  5%)]  Loss: 2.48
9.50 Train: 1 [  21/22 (100%)]  Loss: 0.805
9.90 Test: [   5/5]  Acc@1:  97.500 ( 93.333)
10.00             "top1": 93.25,"""
    assert read_timm_log(log) == {"top1": 0.9325, "seconds": 6.4}


def test_the_digits_are_those_of_the_data_set(tmp_path):
    from zerovision.training.data import DataOptions, load_data

    np.savez(tmp_path / "digits.npz", **record_data.digits())
    options = {"image_size": 8, "mean": (0,) * 3, "std": (1,) * 3}
    own, file = (load_data(DataOptions(data=data, **options)) for data in ("digits", f"npz:{tmp_path}/digits.npz"))
    for part in ("train", "val"):
        sources = [getattr(pair, part).source for pair in (own, file)]
        assert (sources[0].images == sources[1].images).all()
        assert (sources[0].labels == sources[1].labels).all()


def test_fashion_mnist_from_idx_files(tmp_path):
    import gzip

    images, labels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8), np.arange(5, dtype=np.uint8)
    for stem in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (tmp_path / f"{stem}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    found = record_data.fashion_mnist(tmp_path)
    assert (found["x_train"] == images).all()
    assert (found["y_test"] == labels).all()


def test_cifar10_from_png_files_of_a_line_per_image(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 2, 32, 32, 3), np.uint8)
    for name, batch in zip([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], images, strict=True):
        Image.fromarray(batch.reshape(2, 1024, 3)).save(tmp_path / f"{name}.png")
    for part, count in (("train", 10), ("test", 2)):
        (tmp_path / f"{part}_lables.json").write_text(str(list(range(count))))
    found = record_data.cifar10(tmp_path)
    assert (found["x_train"] == images[:5].reshape(10, 32, 32, 3)).all()
    assert (found["x_test"] == images[5]).all()
    assert found["y_train"].tolist() == list(range(10))
    assert found["class_names"][found["y_test"][1]] == "automobile"
