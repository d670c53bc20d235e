"""int8 exports: what is stored, what it costs, and the refusal where it costs too much."""

from __future__ import annotations

import copy
import re

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exports import held_out, save_run
from onnx import numpy_helper

from tests.kit import ROUNDING, assert_same_but_rounding, call

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


def test_int8_keeps_accuracy_in_a_quarter_of_the_size(trained, tmp_path):
    built, data = trained
    folder = save_run(tmp_path / "digits", built, data)
    code, said, _ = call("export", folder, *WORDS)
    assert code == 0
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

    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^ *(fp32|int8) +([\d.]+) % +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)", said, re.M)
    }
    assert rows["fp32"][0] == f"{100 * before:.2f}"
    assert rows["int8"][0] == f"{100 * after:.2f}"
    assert int(rows["int8"][1].replace(",", "")) == file.stat().st_size
    assert 0.25 < float(rows["int8"][2]) < 0.28
    assert all(float(value) > 0 for row in rows.values() for value in row[3:])
    verdict = re.search(r"^  int8 loses (.*) points .* 95 % interval (.*) to (.*)\)(; .*)?$", said, re.M)
    lost, low, high = map(float, verdict.groups()[:3])
    assert lost == pytest.approx(100 * float(before - after), abs=0.01)
    assert low <= lost <= high
    assert (verdict[4] == "; with so few images, a loss of more than 1 is possible") == (high > 1)


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


def test_int8_is_refused_with_what_it_loses(trained, tmp_path):
    built, data = trained
    broken = spoiled(built, ((1, 0), (1, 3)))
    images, _ = held_out(data)
    with torch.no_grad():
        assert_same_but_rounding(broken.module(images), built.module(images), 10 * ROUNDING)
    folder = save_run(tmp_path / "run", broken, data)
    code, said, error = call("export", folder, *WORDS)
    assert code == 1
    lost, before, after, refusal = re.fullmatch(
        r"export: not exported: int8 loses ([\d.]+) points of top-1 \(([\d.]+) % -> ([\d.]+) % on 360 images; "
        r"95 % interval .* to .*\), (.*)\n",
        error,
    ).groups()
    assert float(lost) == pytest.approx(float(before) - float(after), abs=0.02)
    assert float(lost) > 1
    assert refusal.startswith("more than the 1 allowed. Nothing was written: use another --precision")
    assert said == ""
    assert not (folder / "export").exists()
