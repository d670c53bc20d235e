"""Exported files do what the model does: in PyTorch, in timm, and in onnxruntime with nothing else around."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from exports import IMAGE_SIZE, ROOT, held_out, lines_of, save_run
from PIL import Image
from safetensors.torch import load_file
from timm.data.readers.class_map import load_class_map

from tests.kit import ROUNDING, assert_same_but_rounding, call, new_model
from zerovision.delivery.export import ExportRefused, export_job, onnx_format
from zerovision.delivery.export.comparison import check_agreement, compare
from zerovision.delivery.export.export_job import CheckImages, tracing
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import read_metadata, write_class_map
from zerovision.training.tasks.labels import OneLabel

NOT_THERE = "import sys\nsys.modules |= dict.fromkeys(('torch', 'torchvision', 'timm', 'onnx', 'zerovision'))\n"


@pytest.fixture(scope="module")
def run_folder(trained, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "digits", *trained)


def plain_logits(module, images):
    with torch.no_grad():
        return module.eval()(images)


def rounded(module):
    """Round matrices and kernels to bf16 by their bits: to nearest, ties to even."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            bits = parameter.detach().numpy().view(np.uint32).astype(np.uint64)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            parameter.data = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    return module


def open_safetensors(file):
    module = new_model("basic_cnn", num_classes=10, image_size=IMAGE_SIZE).module
    module.load_state_dict(load_file(file))
    return lambda images: plain_logits(module, images)


def open_torch_export(file):
    program = torch.export.load(file).module()
    return lambda images: program(images).detach()


def open_onnx(file):
    session = onnxruntime.InferenceSession(file)
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


FORMAT_NAMES = ("safetensors", "torch-export", "onnx")
OPENERS = {"safetensors": open_safetensors, "torch-export": open_torch_export, "onnx": open_onnx}
EXTENSIONS = {"safetensors": "safetensors", "torch-export": "pt2", "onnx": "onnx"}
PAIRS = [*((name, "fp32") for name in FORMAT_NAMES), ("safetensors", "bf16")]
PAIRS += [pytest.param(name, "bf16", marks=pytest.mark.slow) for name in FORMAT_NAMES[1:]]


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory):
    """A function from format and precision to the file, and what was said as it was exported."""
    folder = tmp_path_factory.mktemp("exports")

    @functools.cache
    def export(format_name, precision):
        words = ("--format", format_name, "--precision", precision, "--output", folder)
        code, said, _ = call("export", run_folder, *words)
        assert code == 0
        return folder / f"basic_cnn-{precision}.{EXTENSIONS[format_name]}", said

    return export


@pytest.mark.parametrize(("format_name", "precision"), PAIRS)
def test_the_file_computes_what_the_model_computes(format_name, precision, trained, run_folder, exported):
    built, data = trained
    file, said = exported(format_name, precision)
    images, labels = held_out(data)
    run = OPENERS[format_name](str(file))
    found = torch.cat([run(images[:1]), run(images[1:4]), run(images[4:])])
    oracle = plain_logits(built.module if precision == "fp32" else rounded(built.module), images)
    # An ONNX file's weights are rounded after BatchNorm was folded into them: other roundings of the same size.
    assert_same_but_rounding(found, oracle, 2**-5 if (format_name, precision) == ("onnx", "bf16") else ROUNDING)
    fp32 = plain_logits(built.module, images)
    shown = float(re.search(r"largest difference of a logit  (\S+)", said)[1])
    rounding = 1e-6 * float(fp32.abs().max())  # by which the batches of an export and these may differ
    assert shown == pytest.approx(float((found - fp32).abs().max()), rel=0.01, abs=rounding)
    accuracy = float((fp32.argmax(1) == labels).double().mean())
    assert f"top-1                          {100 * accuracy:.2f} % ->" in said
    assert accuracy > 0.9


@pytest.mark.parametrize("format_name", ["safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_bf16_halves_the_file(format_name, run_folder, exported):
    tensors = load_file(run_folder / "model.safetensors").values()
    file, _ = exported(format_name, "bf16")
    assert 0.5 <= file.stat().st_size / sum(tensor.nbytes for tensor in tensors) < 0.52
    if format_name == "onnx":
        found = {tuple(tensor.dims): tensor.data_type for tensor in onnx.load(file).graph.initializer}
        kernels = [tuple(tensor.shape) for tensor in tensors if tensor.ndim > 1]
        assert {found[shape] for shape in kernels} == {onnx.TensorProto.BFLOAT16}


def test_every_file_says_what_it_is_and_where_it_came_from(trained, run_folder, exported):
    _, data = trained
    in_safetensors, in_torch, in_onnx = (exported(name, "fp32")[0] for name in FORMAT_NAMES)
    use = json.loads((in_onnx.parent / "preprocessing.json").read_text())
    assert Preprocessing.from_dict(use) == data.preprocessing
    assert use["class_names"] == data.class_names
    assert (use["input"]["name"], use["output"]["name"]) == ("images", "logits")
    model = onnx.load(in_onnx)
    facts = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert facts["class_names"] == data.class_names
    assert facts["preprocessing"]["mean"] == [*data.preprocessing.mean]
    inside = {"zerovision.json": ""}
    torch.export.load(in_torch, extra_files=inside)
    told = json.loads(inside["zerovision.json"])
    metadata = read_metadata(in_safetensors)
    origins = [facts["origin"], told["origin"], metadata["extra"]["exported"]]
    assert told["class_names"] == metadata["class_names"] == data.class_names
    assert all(origin["run"] == "digits" and origin["epoch"] == 3 for origin in origins)
    # Stack traces and folders of this machine stay here. A megabyte of weights has the bytes of ".py" now and then.
    for weights in model.graph.initializer:
        weights.ClearField("raw_data")
    content = model.SerializeToString()
    assert not any(word.encode() in content for word in ("site-packages", ".py", str(ROOT), str(run_folder.parent)))


def test_the_lines_of_the_guide_run_as_they_stand_with_onnxruntime_alone(trained, exported, tmp_path):
    """In a process without torch and without us. What they compute of all kinds of pictures: test_snippets.py."""
    _, data = trained
    output = tmp_path / "logs" / "runs" / "digits" / "export"
    file, _ = exported("onnx", "fp32")
    shutil.copytree(file.parent, output)
    (output / file.name).rename(output / "mobilenet-fp32.onnx")
    pixels = data.val.source.read(7)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "photo.png")
    command = [sys.executable, "-I", "-c", NOT_THERE + lines_of("preprocessing.json onnxruntime")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.strip() == data.class_names[int(data.val.source.labels[7])], done.stderr


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_timm_loads_an_exported_file_by_the_guides_lines(precision, trained, tmp_path):
    _, data = trained
    torch.manual_seed(0)
    built = new_model("timm:resnet18", num_classes=10, image_size=IMAGE_SIZE)
    assert built.description.stem_stride_changed
    folder = save_run(tmp_path / "run", built, data)
    words = ("--format", "safetensors", "--precision", precision, "--check-images", "8", "--max-accuracy-loss", "100")
    assert call("export", folder, *words)[0] == 0
    file = folder / "export" / f"timm-resnet18-{precision}.safetensors"
    names = {}
    exec(lines_of("timm.create_model").replace("logs/runs/photos/model.safetensors", str(file)), names)
    images = held_out(data)[0][:5]
    network = names["network"]
    assert type(network) is type(timm.create_model("resnet18"))
    oracle = built.module if precision == "fp32" else rounded(built.module)
    assert torch.equal(plain_logits(network, images), plain_logits(oracle, images))


def test_a_second_export_of_one_model_joins_the_first(run_folder, tmp_path):
    for precision in ("fp32", "bf16", "fp32"):
        words = ("--format", "safetensors", "--precision", precision, "--output", tmp_path)
        assert call("export", run_folder, *words)[0] == 0
    names = ["basic_cnn-bf16.safetensors", "basic_cnn-fp32.safetensors", "class_map.txt", "preprocessing.json"]
    assert sorted(os.listdir(tmp_path)) == names
    assert load_class_map(str(tmp_path / "class_map.txt")) == {str(digit): digit for digit in range(10)}
    (tmp_path / "plain").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # as the umask has it


@pytest.mark.parametrize(
    ("names", "is_written"),
    [
        (["1", "10", "11", "2", "20", "3"], True),
        (["n01440764", "tench, Tinca", "=a\x0b\u2028b", "é", "#"], True),
        ([" a", "b"], False),
        (["a\rb", "c"], False),
        (["a\nb", "c"], False),
        (["a\udcff", "b"], False),
    ],
)
def test_timm_numbers_the_classes_by_the_class_map_as_we_do(tmp_path, names, is_written):
    path = tmp_path / "class_map.txt"
    path.write_text("of other classes\n")
    write_class_map(tmp_path, names)
    assert path.exists() == is_written, "what timm would read as other names is not there"
    if is_written:
        assert load_class_map(str(path)) == {name: number for number, name in enumerate(names)}


def test_a_class_map_of_another_model_is_not_overwritten(run_folder, tmp_path):
    (tmp_path / "class_map.txt").write_text("cat\ndog\n")
    code, _, error = call("export", run_folder, "--format", "safetensors", "--output", tmp_path)
    assert code == 2
    assert f"'{tmp_path}/class_map.txt' belongs to a model with other classes" in error
    assert (tmp_path / "class_map.txt").read_text() == "cat\ndog\n"


def check_images(count=40):
    torch.manual_seed(0)
    logits, labels = torch.randn(count, 10), torch.arange(count) % 10
    images = torch.arange(count, dtype=torch.float32)[:, None]
    return CheckImages(images, labels, logits, "made up", OneLabel(10))


@pytest.mark.parametrize(
    ("change", "precision", "message"),
    [
        (lambda logits, batch: logits + 2e-4 * 3.2, "fp32", "largest difference"),
        (lambda logits, batch: logits * torch.nan, "fp32", "largest difference"),
        (lambda logits, batch: logits * 1.07, "bf16", "root mean square"),
        (lambda logits, batch: logits * (1 if len(batch) > 1 else 1.001), "bf16", "between batch sizes"),
        (lambda logits, batch: logits.flip(1) if len(batch) < 3 else logits, "int8", "between batch sizes"),
        (lambda logits, batch: logits.flip(1), "int8", "int8 loses"),
    ],
)
def test_a_file_that_differs_is_refused(change, precision, message):
    check = check_images()
    exact = CheckImages(check.images, check.logits.argmax(1), check.logits, check.name, check.task)

    def run(batch):
        return change(exact.logits[batch[:, 0].long()], batch)

    with pytest.raises(ExportRefused, match=message):
        check_agreement(compare(run, exact, 16), precision, 1.0)
    check_agreement(compare(lambda batch: exact.logits[batch[:, 0].long()], exact, 16), precision, 0.0)


def test_a_loss_of_exactly_what_is_allowed_passes():
    logits = torch.eye(10).repeat(10, 1)
    check = CheckImages(torch.arange(100.0)[:, None], logits.argmax(1), logits, "made up", OneLabel(logits.shape[1]))
    wrong = logits.clone()
    wrong[0] = wrong[0].flip(0)
    agreement = compare(lambda batch: wrong[batch[:, 0].long()], check, 100)
    check_agreement(agreement, "int8", 1.0)
    with pytest.raises(ExportRefused, match=r"1\.00 points"):
        check_agreement(agreement, "int8", 0.99)
    few = dataclasses.replace(agreement, images=34, model_top1=1.0, file_top1=33 / 34, rms_share=0, difference=0)
    for precision in ("int8", "bf16"):  # one image of so few is more than a point
        check_agreement(few, precision, 1.0)
        with pytest.raises(ExportRefused, match=r"loses 2\.94 points"):
            check_agreement(few, precision, 0.0)
        with pytest.raises(ExportRefused, match=r"loses 5\.88 points"):
            check_agreement(dataclasses.replace(few, file_top1=32 / 34), precision, 1.0)


def test_a_refused_file_leaves_nothing_and_the_old_one_stays(run_folder, monkeypatch, tmp_path):
    words = (run_folder, "--format", "safetensors", "--output", tmp_path / "new" / "folder")
    open_exported = export_job.open_safetensors

    def open_noise(path, threads):
        run = open_exported(path, threads)
        return lambda images: run(images) + 0.01

    monkeypatch.setattr(export_job, "open_safetensors", open_noise)
    code, _, error = call("export", *words)
    assert (code, os.listdir(tmp_path)) == (1, [])
    assert error.startswith("export: not exported: ")
    assert error.count("\n") == 1
    monkeypatch.undo()
    assert call("export", *words)[0] == 0
    before = (tmp_path / "new" / "folder" / "basic_cnn-fp32.safetensors").read_bytes()
    monkeypatch.setattr(export_job, "open_safetensors", open_noise)
    assert call("export", *words)[0] == 1
    assert (tmp_path / "new" / "folder" / "basic_cnn-fp32.safetensors").read_bytes() == before


def test_a_network_that_cannot_be_traced_or_is_too_large_is_one_line(run_folder, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="cannot trace this network: no such thing"), tracing():
        raise RuntimeError("no such thing\nand a page of it")
    monkeypatch.setattr(onnx_format, "MAX_BYTES", 10**6)
    code, _, error = call("export", run_folder, "--format", "onnx", "--output", tmp_path / "out")
    assert code == 2
    assert "an ONNX file can hold" in error
    assert os.listdir(tmp_path) == []
