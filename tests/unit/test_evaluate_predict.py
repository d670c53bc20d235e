"""evaluate.py and predict.py as a user calls them: on a network with random weights, which errs in every way."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import save_animation
from PIL import Image
from sklearn.metrics import accuracy_score, classification_report, log_loss, top_k_accuracy_score
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.kit import ROOT, ROUNDING, assert_same_but_rounding, call, new_model, save_built
from zerovision.delivery.predict import FORMATS, Prediction, load_predictor, write_predictions
from zerovision.delivery.settings import PredictSettings
from zerovision.delivery.trained_model import read_run_config
from zerovision.extras.serve import make_server
from zerovision.extras.settings import ServeSettings
from zerovision.launch.node_launcher import local_ranks_command
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import write_json
from zerovision.training.checkpoint.weights import load_model, save_weights
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.data import DataOptions, load_data
from zerovision.training.world.machine import free_port

CLASSES = [str(number) for number in range(10)]
IMAGES, SIZE = 12, 32  # of a folder; pixels


@pytest.fixture(scope="module")
def data():
    """The handwritten digits."""
    return load_data(DataOptions())


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """The folder of a run: its configuration, and random weights whose statistics fit the digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    folder.mkdir()
    torch.manual_seed(1)
    built = new_model("basic_cnn", num_classes=10, image_size=SIZE)
    for module in built.module.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.4  # the scale of its inputs is learned soon
    images = torch.stack([data.train[0, index][0] for index in range(64)])
    with torch.no_grad():
        for _ in range(6):
            built.module(images)
    write_json(folder / "config.json", dataclasses.asdict(TrainConfig(model_type="basic_cnn", run_name="digits")))
    save_built(
        folder / "model.safetensors", built, class_names=CLASSES, preprocessing=data.preprocessing, extra={"epoch": 3}
    )
    return folder


@pytest.fixture(scope="module")
def logits(run, data) -> torch.Tensor:
    """What plain PyTorch gives for the held-out digits: float32 [360, 10]."""
    model, _ = load_model(run / "model.safetensors")
    with torch.no_grad():
        return model(torch.stack([data.val[0, index][0] for index in range(len(data.val))]))


def save_digit(data, index: int, folder: Path) -> None:
    """Write a held-out digit as a PNG file, in its own size."""
    folder.mkdir(exist_ok=True)
    pixels = data.val.source.read(index).permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels).save(folder / f"{index:02d}.png")


@pytest.fixture(scope="module")
def pictures(data, tmp_path_factory) -> Path:
    """A folder of held-out digits, one folder deep."""
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(IMAGES):
        save_digit(data, index, folder / f"class {index % 3}")
    return folder


def refused(*words: object, **stdin: bytes) -> str:
    """Run a script that refuses its words: return the one line that it prints."""
    code, out, err = call(*words, **stdin)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.fixture
def evaluated(run, tmp_path):
    """Evaluate the run: return the scores that are written below `tmp_path`."""

    def run_words(*words: object, output: str = "out") -> dict:
        code, _, err = call("evaluate", run, *words, "--output", tmp_path / output)
        assert code == 0, err
        return read_json(tmp_path / output / "scores.json")

    return run_words


def copy_of(run: Path, folder: Path, **settings: object) -> Path:
    """Copy a run, as one that was trained with these settings."""
    shutil.copytree(run, folder)
    write_json(folder / "config.json", dataclasses.asdict(TrainConfig(model_type="basic_cnn", **settings)))
    return folder


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_evaluate_judges_a_run_on_what_it_held_out(run, data, logits):
    code, out, err = call("evaluate", run)
    assert (code, err) == (0, "")
    facts = read_json(run / "evaluation" / "scores.json")
    labels = data.val.source.labels
    report = classification_report(labels, logits.argmax(1), output_dict=True, zero_division=0)
    assert facts["top1"] == report["accuracy"] == float((logits.argmax(1) == labels).double().mean())
    assert [one["f1"] for one in facts["classes"]] == [report[name]["f1-score"] for name in CLASSES]
    assert facts["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits.double(), labels)), rel=1e-6)
    assert (facts["epoch"], facts["data"], facts["split"], facts["samples"]) == (3, "digits", "val", 360)
    assert f"top-1 {100 * facts['top1']:.2f} %" in out
    assert str(run / "evaluation") in out.replace("\n", "")
    with Image.open(run / "evaluation" / "worst" / "000.png") as picture:
        pixels = np.asarray(picture)[::4, ::4]
    np.testing.assert_array_equal(pixels, data.val.source.read(facts["worst"][0]["index"]).permute(1, 2, 0))


def test_an_evaluation_computes_in_channels_last(run, tmp_path):
    """The images arrive so: kernels for convolutions would otherwise convert the weights for each batch."""
    layouts = set()

    def note(module, inputs):
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            for tensor in (*inputs, module.weight):
                layouts.add((tensor.is_contiguous(memory_format=torch.channels_last), tensor.is_contiguous()))

    with register_module_forward_pre_hook(note):
        assert call("evaluate", run, "--output", tmp_path)[0] == 0
    assert layouts == {(True, False)}


def test_several_ranks_give_the_same_bytes(run, tmp_path):
    assert call("evaluate", run, "--output", tmp_path / "one", "--reject", "0.3")[0] == 0
    calibration = run / "model.calibration.json"
    fitted = calibration.read_bytes()
    command = local_ranks_command("auto", has_gpus=False)
    command += ["--nproc_per_node=3", f"--master_port={free_port()}", "scripts/evaluate.py", str(run)]
    command += ["--output", str(tmp_path / "three"), "--reject", "0.3"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert calibration.read_bytes() == fitted
    calibration.unlink()
    names = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    typical = json.loads((tmp_path / "one" / "scores.json").read_text())["typical"]
    assert len(names) == 6 + 2 * (24 + len(typical))
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes(), name


def test_an_evaluation_goes_where_a_link_leads(run, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for _ in range(2):
        assert call("evaluate", run, "--output", tmp_path / "link")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target" / "scores.json").is_file()


@pytest.fixture(scope="module")
def digit_folder(data, tmp_path_factory) -> Path:
    """Held-out digits, a folder for each class; class 7 alone has one image."""
    folder = tmp_path_factory.mktemp("digits")
    for index, label in enumerate(data.val.source.labels[:60].tolist()):
        if label != 7 or not (folder / "7").exists():
            save_digit(data, index, folder / str(label))
    return folder


def test_every_image_of_a_new_folder_counts(run, digit_folder, data, logits, tmp_path):
    files = sorted(digit_folder.rglob("*.png"))
    indices = [int(path.stem) for path in files]
    expected = (logits[indices].argmax(1) == data.val.source.labels[indices]).double().mean()
    assert call("evaluate", run, "--data", digit_folder, "--batch-size", 7)[0] == 0
    facts = read_json(run / f"evaluation-{digit_folder.name}-all" / "scores.json")
    assert (facts["samples"], facts["split"], facts["top1"]) == (len(files), "all", float(expected))
    assert {Path(one["name"]) for one in facts["worst"]} <= set(files)
    other = tmp_path / digit_folder.name
    shutil.copytree(digit_folder, other)
    for folder in (other, digit_folder, other):
        assert call("evaluate", run, "--data", folder)[0] == 0
    found = [read_json(path)["data"] for path in sorted(run.glob(f"evaluation-{other.name}-all*/scores.json"))]
    assert found == [str(digit_folder), str(other)]


def test_the_folder_of_a_run_is_known_by_its_files(run, digit_folder, tmp_path, monkeypatch):
    """Its name may be relative to a folder in which nobody is now."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        shutil.copytree(digit_folder, folder / "photos")
    files = sorted(digit_folder.rglob("*.png"))
    next((elsewhere / "photos" / "3").iterdir()).unlink()
    own = copy_of(run, tmp_path / "own", image_size=8, data="photos")
    fingerprint = load_data(DataOptions(data=str(here / "photos"), image_size=8)).fingerprint
    (own / "environment.json").write_text(json.dumps({"data_fingerprint": fingerprint}))
    for folder, problem in (
        (tmp_path, "'photos', which the run was trained on, is not here: use --data with its full path"),
        (elsewhere, "'photos' here is not the folder of that name that the run was trained on, or has changed"),
    ):
        monkeypatch.chdir(folder)
        assert problem in refused("evaluate", own)
    assert call("evaluate", own, "--data", here / "photos")[0] == 0
    held_out = read_json(own / "evaluation" / "scores.json")["samples"]
    assert held_out < len(files) - 1
    assert call("evaluate", own, "--data", "photos")[0] == 0  # elsewhere
    monkeypatch.chdir(here)
    assert call("evaluate", own, "--split", "all")[0] == 0
    assert call("evaluate", own)[0] == 0
    for name, samples in (("", held_out), ("-photos-all", len(files) - 1), ("-photos-all-2", len(files))):
        assert read_json(own / f"evaluation{name}" / "scores.json")["samples"] == samples


def test_a_folder_with_one_image_of_each_class_is_evaluated(run, digit_folder, tmp_path, monkeypatch):
    """It cannot be divided as the run's data is; and has one name, however it is written."""
    monkeypatch.chdir(tmp_path)
    own = copy_of(run, tmp_path / "own", image_size=8, data="photos")
    (own / "environment.json").write_text(json.dumps({"data_fingerprint": "of something else"}))
    for folder in digit_folder.iterdir():
        (tmp_path / "single" / folder.name).mkdir(parents=True)
        shutil.copy(next(folder.iterdir()), tmp_path / "single" / folder.name)
    for name in ("single", "./single", tmp_path / "single"):
        assert call("evaluate", own, "--data", name)[0] == 0
    assert [path.name for path in own.glob("evaluation-single*")] == ["evaluation-single-all"]


def test_a_test_part_alone_is_evaluated_whole(evaluated, digit_folder, tmp_path):
    files = sorted(digit_folder.rglob("*.png"))
    folder, table = tmp_path / "set", tmp_path / "list.csv"
    shutil.copytree(digit_folder, folder / "test")
    table.write_text("path,label,Split\n" + "".join(f"{path},{path.parent.name},test\n" for path in files))
    expected = ("test", len(files), evaluated("--data", digit_folder, output="whole")["top1"])
    for data, split in product((folder, table), ([], ["--split=test"])):
        found = evaluated("--data", data, *split)
        assert (found["split"], found["samples"], found["top1"]) == expected, (data, split)


@pytest.mark.parametrize(("labels", "kind"), [("38", "folder"), ("3", "folder"), ("3", "table")])
def test_missing_classes_may_be_allowed(evaluated, run, digit_folder, data, logits, tmp_path, labels, kind):
    few, table = tmp_path / "few", tmp_path / "few.csv"
    for label in labels:
        shutil.copytree(digit_folder / label, few / label)
    files = sorted(few.rglob("*.png"))
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in files))
    words = ("--data", table if kind == "table" else few)
    missing = f"the data has no images of {10 - len(labels)} of the model's 10 classes"
    assert missing in refused("evaluate", run, *words)
    facts = evaluated(*words, "--allow-missing-classes")
    indices = [int(path.stem) for path in files]
    hits = logits[indices].argmax(1) == data.val.source.labels[indices]
    assert facts["top1"] == pytest.approx(float(hits.double().mean()), abs=1e-15)
    support = {one["name"]: one["support"] for one in facts["classes"] if one["support"]}
    assert support == {label: len(list((few / label).iterdir())) for label in labels}


def answers(out: str) -> dict[str, dict]:
    return {one["image"]: one for one in map(json.loads, out.splitlines())}


def test_predict_gives_the_probabilities_of_plain_pytorch(run, pictures, logits):
    code, out, err = call("predict", run, pictures, "--format", "json", "--top-k", 10, "--batch-size", 5)
    assert (code, err) == (0, "")
    found = answers(out)
    assert list(found) == [str(path) for path in sorted(pictures.rglob("*.png"))], "in the order of their names"
    for path, one in found.items():
        probabilities = logits[int(Path(path).stem)].softmax(0)
        told = {top["label"]: top["probability"] for top in one["top"]}
        assert_same_but_rounding([told[name] for name in CLASSES], probabilities)
        assert (one["label"], one["probability"]) == (CLASSES[int(probabilities.argmax())], max(told.values()))


VIEWS = pytest.mark.parametrize(
    ("flip", "shift"), [(True, 0), (False, 1), (True, 2)], ids=["flipped", "shifted", "flipped-and-shifted"]
)


def flags_of(flip: bool, shift: int) -> list:
    return [*(["--flip"] if flip else []), *(["--shift-pixels", shift] if shift else [])]


def mean_of_views(model: torch.nn.Module, images: torch.Tensor, flip: bool, shift: int) -> np.ndarray:
    """Probabilities [B, classes]: half of the images, a quarter each of those moved both ways; as many mirrored."""
    size, plain = images.shape[-1], images.numpy()
    padded = np.pad(plain, ((0, 0), (0, 0), (shift, shift), (shift, shift)), mode="reflect")
    moved = [padded[:, :, first:, first:][:, :, :size, :size] for first in (2 * shift, 0)]
    views = [plain, plain, *moved] if shift else [plain]
    views += [view[..., ::-1] for view in views] if flip else []
    with torch.no_grad():
        return np.mean([model(torch.tensor(view.copy())).double().softmax(1).numpy() for view in views], axis=0)


@VIEWS
def test_predictions_average_the_views(run, pictures, data, flip, shift):
    words = ("--format", "json", "--top-k", 1, *flags_of(flip, shift))
    _, out, _ = call("predict", run, pictures / "class 0" / "00.png", *words)
    model, _ = load_model(run / "model.safetensors")
    mean = mean_of_views(model, data.val[0, 0][0][None], flip, shift)
    assert json.loads(out)["probability"] == pytest.approx(mean.max(), rel=ROUNDING)


@pytest.mark.parametrize(
    ("flip", "shift"), [(True, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, 0), (False, 1)))]
)
def test_an_evaluation_reports_views_beside_the_plain_scores(evaluated, run, data, digit_folder, tmp_path, flip, shift):
    words = ("--data", digit_folder, *flags_of(flip, shift), "--output", tmp_path / "views")
    code, out, err = call("evaluate", run, *words)
    assert (code, err) == (0, "")
    facts, plain = read_json(tmp_path / "views" / "scores.json"), evaluated("--data", digit_folder)
    found = facts.pop("views")
    assert facts == plain
    model, _ = load_model(run / "model.safetensors")
    indices = [int(path.stem) for path in digit_folder.rglob("*.png")]
    images, labels = torch.stack([data.val[0, index][0] for index in indices]), data.val.source.labels[indices]
    mean = mean_of_views(model, images, flip, shift)
    assert (found["flip"], found["shift_pixels"]) == (flip, shift)
    assert found["top1"] == accuracy_score(labels, mean.argmax(1))
    assert found["top5"] == top_k_accuracy_score(labels, mean, k=5)
    assert found["loss"] == pytest.approx(log_loss(labels, mean), rel=1e-5)
    assert f"top-1 {100 * found['top1']:.2f} %" in out
    assert f"top-1 {100 * plain['top1']:.2f} %" in out


@pytest.mark.parametrize("decode", ["cpu", "exact"])
def test_predict_decodes_as_the_run_did(run, tmp_path, decode):
    folder = copy_of(run, tmp_path / "run", decode=decode)
    pixels = np.random.default_rng(0).integers(0, 256, (30 * SIZE, 30 * SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.jpg")

    def probabilities(*words: str) -> str:
        code, output, _ = call("predict", folder, tmp_path / "large.jpg", "--format", "json", *words)
        assert code == 0
        return output

    given = {name: probabilities("--decode", name) for name in ("cpu", "exact")}
    assert given["cpu"] != given["exact"]
    assert probabilities() == given[decode]


def test_the_largest_image_is_the_runs_unless_the_flag_says_another(run, pictures, tmp_path):
    folder, classes = copy_of(run, tmp_path / "run", max_megapixels=1), tmp_path / "classes"
    for name in CLASSES:
        (classes / name).mkdir(parents=True)
        shutil.copy(pictures / "class 0" / "00.png", classes / name)
    large = classes / "0" / "large.jpg"
    Image.new("L", (1500, 1000)).save(large, quality=20)
    refusal = "1,500,000 pixels, more than the 1 megapixels of --max-megapixels"
    evaluated = ("evaluate", folder, "--data", classes, "--split", "all", "--output", tmp_path / "scores")
    for words, refused in ((("predict", folder, large), 1), (evaluated, 2)):
        code, _, errors = call(*words)
        assert code == refused
        assert refusal in errors
        assert call(*words, "--max-megapixels", "2")[0] == 0

    def asked(model) -> PredictSettings:
        return PredictSettings(model=str(model), images=())

    assert load_predictor(asked(folder / "model.safetensors")).reader.max_pixels == 10**6
    assert load_predictor(asked(shutil.copy(folder / "model.safetensors", tmp_path))).reader.max_pixels == 179 * 10**6
    with make_server(ServeSettings(model=str(folder), port=0, max_megapixels=3)) as server:
        assert server.predictor.reader.max_pixels == 3 * 10**6


def test_unreadable_images_are_named_and_passed_over(run, pictures, tmp_path):
    good = pictures / "class 0" / "00.png"
    (tmp_path / "broken.png").write_bytes(good.read_bytes()[:80])
    code, out, err = call("predict", run, tmp_path / "broken.png", good, tmp_path / "gone.jpg", "--format", "csv")
    assert code == 1
    header, row = csv.reader(io.StringIO(out))
    assert header[:3] == ["image", "label", "probability"]
    assert row[0] == str(good)
    assert len(row) == len(header) == 7
    first, second, total = err.splitlines()
    assert first.startswith(f"predict: skipped '{tmp_path / 'broken.png'}': ")
    assert second == f"predict: skipped '{tmp_path / 'gone.jpg'}': No such file or directory"
    assert total == "predict: 2 images could not be read"


def test_odd_files_below_a_folder_are_named_and_never_waited_for(run, pictures, tmp_path):
    save_animation(tmp_path / "a.gif", (20, 20))
    (tmp_path / "endless.jpg").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jpg")
    code, out, err = call("predict", run, tmp_path, "--format", "json")
    assert code == 1
    assert list(answers(out)) == [str(tmp_path / "a.gif")]
    refused = "not a regular file, but a device, a FIFO or a socket"
    assert err.splitlines() == [
        f"predict: note on '{tmp_path / 'a.gif'}': several frames or pages: the first is used",
        f"predict: skipped '{tmp_path / 'endless.jpg'}': {refused}",
        f"predict: skipped '{tmp_path / 'pipe.jpg'}': {refused}",
        "predict: 2 images could not be read",
    ]


def test_standard_input_without_an_end_is_refused(run, monkeypatch):
    for module in ("zerovision.training.data.reading.files", "zerovision.delivery.predict"):
        monkeypatch.setattr(f"{module}.MAX_FILE_BYTES", 1000)
    assert "standard input exceeds 0.001 MB" in refused("predict", run, "-", stdin=bytes(2000))


def test_standard_input_holds_paths_or_an_image(run, pictures):
    files = sorted(pictures.rglob("*.png"))
    lines = "".join(f"{path}\n" for path in files).encode()
    named = answers(call("predict", run, "-", "--format", "json", stdin=lines)[1])
    assert list(named) == [str(path) for path in files]
    code, out, _ = call("predict", run, "-", "--format", "json", stdin=files[4].read_bytes())
    assert code == 0
    (one,) = answers(out).values()
    assert one["image"] == "standard input"
    alone, with_others = one["top"], named[str(files[4])]["top"]
    assert [top["label"] for top in alone] == [top["label"] for top in with_others]
    assert alone[0]["probability"] == pytest.approx(with_others[0]["probability"], rel=ROUNDING)


def test_paths_on_standard_input_end_with_the_line_alone(run, pictures, tmp_path):
    files = [tmp_path / f"a{sign}b.png" for sign in "\x0b\x0c\x1c\x85\u2028\r"]
    for path in files:
        shutil.copy(pictures / "class 0" / "00.png", path)
    lines = "".join(f"{path}\r\n" for path in files).encode()
    code, out, err = call("predict", run, "-", "--format", "json", stdin=lines)
    assert (code, err) == (0, "")
    assert list(answers(out)) == list(map(str, files))


def test_a_large_jpeg_on_standard_input_is_shrunk_as_its_file_is(run, tmp_path):
    path = tmp_path / "large.jpg"
    noise = np.random.default_rng(0).integers(0, 255, (400, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    (named,) = answers(call("predict", run, path, "--format", "json")[1]).values()
    (read,) = answers(call("predict", run, "-", "--format", "json", stdin=path.read_bytes())[1]).values()
    assert read["top"] == named["top"]


def test_a_table_for_people(run, pictures):
    code, out, _ = call("predict", run, pictures / "class 1")
    assert code == 0
    assert out.split("\n")[0].split() == ["image", "label", "probability", "next", "labels"]
    assert sum("%" in line for line in out.splitlines()) == IMAGES // 3


def test_an_output_that_is_a_link_or_no_file_stays(run, pictures, tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target.json", "link", "pipe"))
    target.write_text("old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for output in (link, pipe):
        assert call("predict", run, pictures, "--format", "json", "--output", output)[0] == 0
    assert os.read(reader, 65536).decode() == target.read_text() != "old"
    os.close(reader)
    assert (link.is_symlink(), pipe.is_fifo()) == (True, True)


def test_an_output_file_is_whole_or_not_there(run, pictures, small_disk, tmp_path):
    target = tmp_path / "labels.jsonl"
    assert call("predict", run, pictures, "--format", "json", "--output", target)[:2] == (0, "")
    assert len(target.read_text().splitlines()) == IMAGES
    full = small_disk / "labels.jsonl"
    full.write_text("old\n")
    (small_disk / "filler").write_bytes(bytes(64 * 1024 - 4096 * 2))
    many = "".join(f"{path}\n" for path in sorted(pictures.rglob("*.png")) * 20).encode()
    err = refused("predict", run, "-", "--format", "json", "--output", full, stdin=many)
    assert err == f"predict: cannot write to '{full}': No space left on device. Use another --output file.\n"
    assert full.read_text() == "old\n"
    assert {path.name for path in small_disk.iterdir()} == {"labels.jsonl", "filler"}


# Each starts Python with torch. The same in this process: test_lasting_output.py.
@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["> /dev/full", "| true; exit ${PIPESTATUS[0]}"], ids=["full", "unread"])
@pytest.mark.parametrize(
    ("script", "words"),
    [
        *(("predict", ["{run}", "{pictures}", "--format", kind]) for kind in FORMATS),
        ("evaluate", ["{run}", "--output", "{tmp}/evaluation"]),
        ("export", ["{run}", "--format", "safetensors", "--output", "{tmp}/export"]),
        ("report", ["{run}", "--output", "{tmp}/report.html"]),
    ],
)
def test_standard_output_that_is_full_is_one_line_and_nobody_needs_to_read_it(
    run, pictures, tmp_path, script, words, redirection
):
    filled = (word.format(run=run, pictures=pictures, tmp=tmp_path) for word in words)
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, f"scripts/{script}.py", *filled]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    line = f"{script}: cannot write to standard output (No space left on device).\n"
    assert (ended.returncode, ended.stderr) == ((2, line) if "full" in redirection else (0, ""))
    if "full" not in redirection and script != "predict":
        assert any(map(Path.is_file, tmp_path.rglob("*"))), "it does its work"


SCRIPTS = pytest.mark.parametrize(("script", "words"), [("evaluate", []), ("predict", ["a.png"])])


@SCRIPTS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged: Expecting property name enclosed in double quotes: line 1 column 2 (char 1). Restore it"),
        ("[]", "is damaged: it is not a JSON object. Restore it, or remove it."),
        ('{"epochs": "ten"}', ": epochs 'ten': expected a whole number from 1"),
        ('{"epoch": 1}', ": unknown key 'epoch'. Use epochs."),
    ],
)
def test_a_damaged_configuration_of_a_run_is_named(run, tmp_path, script, words, content, message):
    folder = copy_of(run, tmp_path / "run")
    (folder / "config.json").write_text(content)
    err = refused(script, folder, *words)
    assert err.startswith(f"{script}: '{folder / 'config.json'}'")
    assert message in err


def test_a_run_is_read_with_values_that_no_new_one_may_have_together(tmp_path):
    config = TrainConfig(schedule="wsd:0.5", randaugment="rand-m15-n2", augmentation="randaugment")
    write_json(tmp_path / "config.json", dataclasses.asdict(config))
    assert read_run_config(tmp_path) == config
    with pytest.raises(UserError, match="--schedule"):
        check_config(config, FLAG_OF)


@SCRIPTS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04archive of torch.save", "is a pickle, which could run code"),
        (b"\x80\x04\x95pickle", "is a pickle, which could run code"),
        (b"\x10\0\0\0\0\0\0\0{broken", "cannot be read as safetensors"),
    ],
)
def test_only_safetensors_are_read(tmp_path, script, words, content, message):
    """Text as weights: tests/references/errors.txt."""
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    err = refused(script, path, *words)
    assert message in err
    assert str(path) in err


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("predict", ["{run}", "-"], "standard input is empty"),
        ("evaluate", ["{run}", "--output", "{empty}"], "is the current folder, which an evaluation would replace"),
    ],
)
def test_mistakes_are_one_line_and_leave_the_run_alone(run, tmp_path, monkeypatch, script, words, message):
    """Others are in tests/references/errors.txt."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert message in refused(script, *(word.format(run=run, empty=tmp_path / "empty") for word in words))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@SCRIPTS
def test_weights_that_are_not_finite_are_refused(run, tmp_path, script, words):
    path, (model, metadata) = tmp_path / "model.safetensors", load_model(run / "model.safetensors")
    state = model.state_dict()
    next(iter(state.values())).fill_(float("nan"))
    save_weights(path, state, **metadata)
    assert f"'{path}' contains NaN or infinity in '{next(iter(state))}'" in refused(script, path, *words)


HOSTILE = [
    *["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "＝1"],  # a spreadsheet computes them
    *["\x1b[2J\x1b[31mred\x07", "a\nb\r\x9b2J", "[red]b", "\u202eevil"],  # a terminal or Rich obeys them
]
SHOWN = [
    *["=1+1", "+1", "-1", "@SUM(1)", r"\t=1", "＝1"],
    *[r"\x1b[2J\x1b[31mred\x07", r"a\nb\r\x9b2J", "[red]b", r"\u202eevil"],
]
INERT = ["'=1+1", "'+1", "'-1", "'@SUM(1)", "'\t=1", "'＝1", *HOSTILE[6:]]


@pytest.fixture(scope="module")
def hostile_run(run, tmp_path_factory) -> Path:
    """The same run, and images of its data, with names of classes that somebody may have chosen with a purpose."""
    folder = tmp_path_factory.mktemp("runs") / "hostile"
    folder.mkdir()
    (folder / "config.json").write_bytes((run / "config.json").read_bytes())
    model, metadata = load_model(run / "model.safetensors")
    del metadata["class_names"]
    save_weights(folder / "model.safetensors", model.state_dict(), **metadata, class_names=HOSTILE)
    return folder


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_names_from_outside_are_exact_in_files_and_harmless_to_look_at(hostile_run, pictures, tmp_path):
    image = next(pictures.rglob("*.png"))
    code, out, _ = call("predict", hostile_run, image, "--format", "json", "--top-k", 10)
    assert code == 0
    assert {top["label"] for top in json.loads(out)["top"]} == set(HOSTILE)
    target = tmp_path / "labels.csv"
    assert call("predict", hostile_run, image, "--format", "csv", "--top-k", 10, "--output", target)[0] == 0
    with target.open(newline="", encoding="utf-8") as stream:
        assert set(list(csv.reader(stream))[1][1::2]) == set(INERT)
    code, out, _ = call("predict", hostile_run, image, "--top-k", 10)
    assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", ["cr\r.png", "nl\n.png", "crlf\r\n", "\r", 'q"\r,', "\x0b\u2028", "", "plain"])
def test_a_csv_file_has_as_many_rows_as_images_whatever_their_names(tmp_path, name):
    names, target = [name, "b.png", name], tmp_path / "labels.csv"
    predictions = (Prediction(one, [f"class {one}"], [0.5]) for one in names)
    write_predictions(predictions, None, str(target), 1)  # as the file's name ends
    with target.open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["image", "label", "probability"]
    # A name that a spreadsheet would take for a formula has a quote before it.
    assert [row[0].removeprefix("'") for row in rows] == names
    assert [row[1:] for row in rows] == [[f"class {one}", "0.5"] for one in names]
    text = target.read_bytes().decode()
    assert text.endswith(",0.5\n")
    assert name != "plain" or text == "image,label,probability\n" + "".join(f"{one},class {one},0.5\n" for one in names)


def test_the_ending_of_the_output_decides_its_form_and_a_table_in_a_file_is_whole(tmp_path):
    name, labels = f"{'long' * 50}.png", ["first", "second" * 20]
    written = {}
    for path in (tmp_path / name for name in ("a.json", "a.JSONL", "a.txt")):
        write_predictions(iter([Prediction(name, labels, [0.75, 0.25])]), None, str(path), 2)
        written[path.suffix] = path.read_text()
    assert json.loads(written[".json"])["image"] == json.loads(written[".JSONL"])["image"] == name
    header, row = written[".txt"].splitlines()
    assert (header.split(), row.split()) == (
        ["image", "label", "probability", "next", "labels"],
        [name, "first", "75.0%", labels[1], "25.0%"],
    )


def test_csv_on_a_terminal_is_escaped():
    terminal = Terminal()
    FORMATS["csv"](iter([Prediction("=a.png", ["\x1b[2J"], [0.5])]), terminal, 1)
    assert terminal.getvalue().splitlines()[1] == r"'=a.png,\x1b[2J,0.5"


def test_an_evaluation_shows_any_name(hostile_run, digit_folder, tmp_path):
    images = tmp_path / "images"
    for label, name in enumerate(HOSTILE):
        (images / name).mkdir(parents=True)
        for path in (digit_folder / str(label)).iterdir():
            (images / name / os.fsdecode(b"\xe9" + os.fsencode(path.name))).write_bytes(path.read_bytes())
    code, out, err = call("evaluate", hostile_run, "--data", images, "--output", tmp_path / "out")
    assert (code, err) == (0, "")
    assert out.replace("\n", "").isprintable()
    assert all(name in out for name in SHOWN)
    facts = read_json(tmp_path / "out" / "scores.json")
    names = sorted(HOSTILE)
    assert sorted(one["name"] for one in facts["classes"]) == names
    for table, column in [("per_class.csv", 0), ("confusion.csv", 0)]:
        with (tmp_path / "out" / table).open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
            assert {row[column] for row in list(csv.reader(stream))[1:]} == set(INERT)


def test_weights_outside_a_run_need_their_data(run, tmp_path):
    alone = shutil.copy(run / "model.safetensors", tmp_path / "weights.safetensors")
    problem = "evaluate: these weights are not in a run's folder, so the data is not known: add --data.\n"
    assert refused("evaluate", alone) == problem
    assert call("evaluate", alone, "--data", "digits")[0] == 0
    assert read_json(tmp_path / "weights-evaluation" / "scores.json")["samples"] == 360


def test_predict_explains(run, pictures, tmp_path):
    """Pictures of all images in order; a folder that holds something else is refused before anything is read."""
    code, out, _ = call("predict", run, pictures, "--format", "csv", "--explain", tmp_path / "why")
    images = [Path(row["image"]).stem for row in csv.DictReader(io.StringIO(out))]
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "why").iterdir()) == [
        f"{number:05}-{name}.png" for number, name in enumerate(images, 1)
    ]
    assert Image.open(tmp_path / "why" / "00001-00.png").size == (SIZE, SIZE)
    named = tmp_path / "named"
    named.mkdir()
    for name in ("猫" * 76, "a" + "猫" * 76, "b" * 240):
        shutil.copy(next(pictures.rglob("*.png")), named / f"{name}.png")
    assert call("predict", run, named, "--explain", tmp_path / "cut")[0] == 0
    assert sorted(path.stem.partition("-")[2] for path in (tmp_path / "cut").iterdir()) == [
        "a" + "猫" * 33,
        "b" * 100,
        "猫" * 33,
    ]
    code, _, error = call("predict", run, pictures, "--explain", tmp_path)
    assert (code, error) == (2, f"predict: --explain {tmp_path}: use a new folder, or an empty one.\n")
