"""int8 exports: what is stored, what it costs, and the refusal where it costs too much."""

from __future__ import annotations

import copy
import re

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exports import IMAGE_SIZE, held_out, run_export, save_run
from onnx import numpy_helper

from delivery.export.comparison import measure_latency
from models.build import build_model

WORDS = ("--format", "onnx", "--precision", "int8")


def onnx_logits(path, images):
    return torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {"images": images.numpy()})[0])


def folded(convolution, norm):
    """Fold BatchNorm into the kernel before it, by its definition."""
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    return (convolution.weight * factor[:, None, None, None]).detach().numpy()


def stored_integers(model):
    """Return the int8 tensors of a file, dequantized, by the name of the weight: (values, scales)."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            integers, scale, zero_point = (constants[name] for name in node.input)
            if integers.dtype == np.int8:
                assert not zero_point.any()
                axis = next((entry.i for entry in node.attribute if entry.name == "axis"), 1)
                shape = [-1 if place == axis else 1 for place in range(integers.ndim)]
                found[node.input[0].removesuffix("_quantized")] = (
                    integers * scale.reshape(shape),
                    scale.reshape(shape),
                )
    return found


def test_int8_keeps_accuracy_in_a_quarter_of_the_size(trained, monkeypatch, capsys, tmp_path):
    built, data = trained
    folder = save_run(tmp_path / "digits", built, data)
    assert run_export(monkeypatch, folder, *WORDS) == 0
    file = folder / "export" / "basic_cnn-int8.onnx"
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    images, labels = held_out(data)
    logits = onnx_logits(file, images)
    with torch.no_grad():
        before, after = ((found.argmax(1) == labels).double().mean() for found in (built.module(images), logits))
    assert 100 * (before - after) <= 1.0
    assert torch.equal(onnx_logits(file, images[:1]), logits[:1])

    stored = stored_integers(model)
    assert len(stored) == 7
    values, scale = stored["head.weight"]
    assert np.abs(values - built.module.head.weight.detach().numpy()).max() <= scale.max() / 2 * 1.001
    for block in range(3):
        for place in (0, 3):
            values, scale = stored[f"blocks.{block}.{place}.weight"]
            original = folded(built.module.blocks[block][place], built.module.blocks[block][place + 1])
            assert scale.size == len(original)  # one per output channel
            assert (np.abs(values - original) <= scale / 2 * 1.001).all()

    said = capsys.readouterr().out
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^ *(fp32|int8) +([\d.]+) +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)", said, re.M)
    }
    assert rows["fp32"][0] == f"{before:.4f}"
    assert rows["int8"][0] == f"{after:.4f}"
    assert int(rows["int8"][1].replace(",", "")) == file.stat().st_size
    assert 0.25 < float(rows["int8"][2]) < 0.28
    assert all(float(value) > 0 for row in rows.values() for value in row[3:])
    assert re.search(r"^  (MinMax|Percentile) ranges of the activations$", said, re.M)


def test_an_lstms_weights_are_stored_in_int8(trained, monkeypatch, tmp_path):
    _, data = trained
    torch.manual_seed(0)
    built = build_model("cnn_lstm", num_classes=10, image_size=IMAGE_SIZE)
    built.module.eval()
    folder = save_run(tmp_path / "run", built, data)
    words = ("--calibration-images", "32", "--check-images", "33", "--max-accuracy-loss", "100")
    assert run_export(monkeypatch, folder, *WORDS, *words) == 0
    file = folder / "export" / "cnn_lstm-int8.onnx"
    assert file.stat().st_size < 0.28 * (folder / "model.safetensors").stat().st_size
    model = onnx.load(file)
    stored = stored_integers(model)
    lstms = [node for node in model.graph.node if node.op_type == "LSTM"]
    assert len(lstms) == 2
    gates = [0, 3, 1, 2]  # ONNX keeps input, output, forget, cell; PyTorch input, forget, cell, output
    for number, node in enumerate(lstms):
        for operand, kind in ((1, "ih"), (2, "hh")):
            values, scale = stored[node.input[operand]]
            names = [f"weight_{kind}_l{number}{suffix}" for suffix in ("", "_reverse")]
            original = np.stack([getattr(built.module.lstm, name).detach().numpy() for name in names])
            parts = np.split(original, 4, axis=1)
            original = np.concatenate([parts[gate] for gate in gates], axis=1)
            assert scale.shape == (1, original.shape[1], 1)
            assert (np.abs(values - original) <= scale / 2 * 1.001).all()
    images = held_out(data)[0][:6]
    with torch.no_grad():
        oracle = built.module(images)
    found = onnx_logits(file, images)
    torch.testing.assert_close(found, oracle, rtol=0, atol=0.1 * float(oracle.abs().max()))
    assert torch.equal(onnx_logits(file, images[:1]), found[:1])


def spoiled(built, *pairs):
    """Scale one channel between two convolutions up and down again: the function stays, its range explodes.

    ReLU passes a positive factor on, so the channel's producer is multiplied and its consumer divided.
    """
    built = copy.deepcopy(built)
    blocks = built.module.blocks
    with torch.no_grad():
        for (block, place), consumer in pairs:
            norm = blocks[block][place + 1]
            norm.weight[0] *= 3000
            norm.bias[0] *= 3000
            weight = built.module.head.weight if consumer is None else blocks[consumer[0]][consumer[1]].weight
            weight[:, 0] /= 3000
    return built


def test_int8_is_refused_with_what_it_loses(trained, monkeypatch, capsys, tmp_path):
    built, data = trained
    broken = spoiled(built, ((1, 0), (1, 3)))
    images, _ = held_out(data)
    with torch.no_grad():
        torch.testing.assert_close(broken.module(images), built.module(images), rtol=0, atol=1e-3)
    folder = save_run(tmp_path / "run", broken, data)
    assert run_export(monkeypatch, folder, *WORDS) == 1
    said, error = capsys.readouterr()
    lost = re.findall(r"ranges of 256 images: ([\d.]+) points", said + error)
    assert len(lost) == 2  # MinMax and Percentile
    refusal = f"export: refused: int8 loses {min(lost, key=float)} points of top-1, allowed are 1: "
    assert refusal in error
    assert not (folder / "export").exists()


def test_latency_is_per_image(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    batches = []

    def run(images):
        batches.append(len(images))
        now[0] += 0.002 * len(images) + 0.004
        return images

    found = measure_latency({"file": run}, torch.zeros(3, 1, 1, 1), (1, 16))
    assert found == {("file", 1): pytest.approx(6.0), ("file", 16): pytest.approx(2.25)}
    assert set(batches) == {1, 16}  # three images are repeated to fill a batch
