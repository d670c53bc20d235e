"""The prediction of a step against closed forms and the published speeds that its GPU figures come from."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.fit_step_time import fit, numbers, read_phases, solve
from models.build import build_model
from models.dry_run import training_flops, without_data
from models.operators import CONVOLUTION, DEPTHWISE, KINDS, POINTWISE, PRODUCT, Operator, count_operators
from planning.machines import find_machine
from planning.step_time import ADAMW_PASSES, CALIBRATIONS, predict_step
from training.parallel.strategies import plan_of

PUBLISHED = [  # images/s in training, as the docstring of planning/step_time.py says
    ("rtx3090", "timm:mobilenetv3_large_100", 2732),
    ("rtx3090", "timm:efficientnet_b0", 1752),
    ("rtx3090", "timm:vgg16", 546),
    ("rtx3090", "timm:resnet50", 1218),
    ("a100-80gb", "timm:efficientnet_b0", 2489),
    ("a100-80gb", "timm:resnet50", 2470),
    ("h100-80gb", "timm:resnet50", 2790),
]


def counted(model, image_size=224, classes=1000):
    with torch.device("meta"):
        module = build_model(model, num_classes=classes, image_size=image_size).module
    return count_operators(without_data(module), image_size), sum(one.numel() for one in module.parameters())


def predicted(operators, parameters, gpu="h100-80gb", ranks=1, engine="torch", strategy="ddp", **changes):
    options = {"batch_size": 256, "precision": "bf16"} | changes
    return predict_step(
        operators, parameters, find_machine(gpu, min(ranks, 8)), plan_of(strategy, ranks), engine=engine, **options
    )


def test_operators_of_a_small_network_by_hand():
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 16, 1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )
    found = {one.kind: one for one in count_operators(without_data(module), 8)}
    pixels = 64
    assert found[CONVOLUTION] == Operator(CONVOLUTION, 2 * pixels * 27 * 8, pixels * (3 + 8), 27 * 8)
    assert found[DEPTHWISE] == Operator(DEPTHWISE, 2 * pixels * 9 * 8, pixels * 16, 9 * 8)
    assert found[POINTWISE] == Operator(POINTWISE, 2 * pixels * 8 * 16, pixels * 24, 8 * 16)
    assert found[PRODUCT] == Operator(PRODUCT, 2 * 16 * pixels * 10, 16 * pixels + 10, 16 * pixels * 10 + 10)


@pytest.mark.parametrize("model", ["mobilenet", "cnn_lstm", "timm:vit_tiny_patch16_224"])
def test_every_weight_is_read_once_and_operations_are_those_of_the_flop_counter(model):
    with torch.device("meta"):
        module = build_model(model, num_classes=10, image_size=64).module
    operators = count_operators(without_data(module), 64)
    assert {one.kind for one in operators} <= set(KINDS)
    # Some buffers are not read, such as the counts of batches.
    parameters, buffers = (sum(one.numel() for one in ones) for ones in (module.parameters(), module.buffers()))
    assert parameters <= sum(one.weights for one in operators) <= parameters + buffers
    # Backward does a convolution's or product's work once for each gradient, without the images' own.
    forward = sum(one.flops for one in operators)
    assert 2.5 * forward < training_flops(without_data(module), 64) <= 3 * forward


@pytest.mark.parametrize(("gpu", "model", "images_per_s"), PUBLISHED)
def test_within_what_the_docstring_says_of_published_speeds(gpu, model, images_per_s):
    precision = "fp16" if gpu == "h100-80gb" else "bf16"
    found = predicted(*counted(model), gpu=gpu, precision=precision)
    assert 256 / found.step_s == pytest.approx(images_per_s, rel=0.43)


@pytest.mark.slow  # it counts 19 networks
def test_the_constants_are_what_the_measured_phases_give():
    fitted, code = numbers(fit(read_phases())), numbers(CALIBRATIONS["cpu"])
    assert fitted == pytest.approx(code, rel=0.006, abs=1e-9)  # the code has three digits


def test_the_fit_finds_known_multiples():
    rows, true = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "c": 5.0}], {"a": 0.5, "b": 4.0, "c": 0.0}
    seconds = [sum(true[name] * value for name, value in row.items()) for row in rows]
    assert solve(rows, seconds) == pytest.approx(true, abs=1e-3)  # the solver's tolerance
    assert solve(rows, seconds, {"a": 0.7})["a"] == pytest.approx(0.7, abs=1e-3)


def test_one_matrix_product_takes_its_closed_form():
    flops, values, weights, batch = 2e9, 1e6, 10**6, 64
    found = predicted([Operator(PRODUCT, flops, values, weights)], weights, batch_size=batch)
    gpu, multiples = find_machine("h100-80gb", 1).gpu, CALIBRATIONS["gpu"].forward[PRODUCT]
    moved = multiples.activations * values * batch * 2 + multiples.weights * weights * 4
    forward_s = multiples.flops * flops * batch / gpu.peaks["bf16"] + moved / gpu.bandwidth_bytes_per_s
    assert found.forward_s == pytest.approx(forward_s)
    assert found.backward_s == pytest.approx(2 * forward_s)
    assert found.communication_s == found.exposed_communication_s == 0
    passes_s = ADAMW_PASSES * 4 * weights / gpu.bandwidth_bytes_per_s
    assert found.update_s == pytest.approx(passes_s + CALIBRATIONS["gpu"].update_s)
    assert found.step_s == pytest.approx(3 * forward_s + found.update_s)


def test_what_a_step_consists_of():
    operators, parameters = counted("mobilenet")
    one = predicted(operators, parameters)
    assert predicted(operators, parameters, accumulation_steps=4).forward_s == pytest.approx(4 * one.forward_s)
    again = predicted(operators, parameters, checkpointing=True)
    assert again.backward_s == pytest.approx(one.forward_s + one.backward_s)
    small = predicted(operators, parameters, batch_size=1)
    assert small.forward_s == len(operators) * CALIBRATIONS["gpu"].dispatch_s  # the host is slower than the GPU
    sharded = predicted(operators, parameters, ranks=8, strategy="fsdp_stage2")
    whole = predicted(operators, parameters, ranks=8)
    fixed = CALIBRATIONS["gpu"].update_s
    assert sharded.update_s - fixed == pytest.approx((whole.update_s - fixed) / 8)
    assert 0 < whole.exposed_communication_s <= 1.001 * whole.communication_s
    slow = find_machine("h100-80gb", 8, "pcie3")
    plan = plan_of("ddp", 8)
    assert predict_step(operators, parameters, slow, plan, engine="torch", batch_size=256).step_s > whole.step_s


def test_a_recurrent_layer_is_one_operator():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3 * 8, 16, batch_first=True)

        def forward(self, images):
            return self.lstm(images.flatten(1, 2).transpose(1, 2))[0]

    # Four gates, each with a product of the input and one of the state, in each of eight steps.
    (found,) = (one for one in count_operators(without_data(Columns()), 8) if one.flops)
    assert (found.kind, found.flops) == (PRODUCT, 8 * 4 * 2 * (24 * 16 + 16 * 16))
    assert found.weights == 4 * (24 * 16 + 16 * 16 + 2 * 16)


def test_a_network_that_looks_at_its_data_is_not_counted():
    class Curious(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :10] if images.sum().item() > 0 else images.flatten(1)

    assert count_operators(Curious(), 8) is None


def test_cpu_ranks_that_share_cores_take_longer(monkeypatch):
    machine = find_machine("h100-80gb", 1)
    cpu = dataclasses.replace(machine, inside=dataclasses.replace(machine.inside, name="shared-memory"))
    operators, parameters = counted("mobilenet", 64, 10)

    def step_s(ranks):
        shared = dataclasses.replace(cpu, ranks=ranks)
        return predict_step(operators, parameters, shared, plan_of("ddp", ranks), engine="native", batch_size=16).step_s

    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    assert step_s(2) < step_s(4)
