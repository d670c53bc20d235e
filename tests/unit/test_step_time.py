"""The prediction of a step against closed forms and the published speeds that its GPU figures come from."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.fit_step_time import fit, fit_ranks, numbers, solve, work_of
from benchmarks.step_phases import Phases, read_lines, read_messages, read_phases, replace_lines
from models.build import build_model
from models.dry_run import training_flops, without_data
from models.operators import CONVOLUTION, DEPTHWISE, KINDS, POINTWISE, PRODUCT, Operator, count_operators
from planning.machines import Gpu, Machine, find_interconnect, find_machine, shared_memory
from planning.step_time import ADAMW_PASSES, CALIBRATIONS, EngineCost, Multiples, Sharing, predict_step
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


def test_matrix_products_reach_another_share_of_a_processors_peak_than_convolutions():
    gpu = Gpu("cpu", 0, 4e10, {"fp32": 2e11}, "", product_share=0.25)
    machine = Machine(gpu, 1, shared_memory(4e10), find_interconnect("ethernet10"))
    seconds = {}
    for kind in (CONVOLUTION, PRODUCT):
        step = predict_step([Operator(kind, 2e9, 0, 0)], 0, machine, plan_of("ddp", 1), engine="native", batch_size=8)
        multiples = CALIBRATIONS["cpu"].forward[kind]
        seconds[kind] = (step.forward_s - multiples.operator_s) / multiples.flops
    assert seconds[CONVOLUTION] == pytest.approx(2e9 * 8 / 2e11)
    assert seconds[PRODUCT] == pytest.approx(2e9 * 8 / 5e10)


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


PRODUCTS = [Operator(PRODUCT, 2e7, 1e4, 10**4)] * 3


def on_cpu(ranks, engine="native", strategy="ddp", plan_ranks=None, **changes):
    """Predict three products on so many ranks that share two cores of 1e11 operations and 2e10 bytes per second."""
    gpu = Gpu("cpu", 10**9, 4e10 / ranks, {"fp32": 2e11 / ranks}, "")
    machine = Machine(
        gpu, ranks, shared_memory(gpu.bandwidth_bytes_per_s), find_interconnect("ethernet10"), rank_cores=2 / ranks
    )
    plan = plan_of(strategy, plan_ranks or ranks)
    return predict_step(PRODUCTS, 30_000, machine, plan, engine=engine, batch_size=16, **changes)


def test_ranks_that_share_cores_wait_for_their_turns():
    """Two ranks have a core each; of four, each has half of one, and what depends on no peak takes twice as long."""
    multiples, passes_s = Multiples(0.9, 0.7, 1.8, 1e-4), ADAMW_PASSES * 4 * 30_000 / 2e10
    calibration = dataclasses.replace(
        CALIBRATIONS["cpu"],
        forward={PRODUCT: multiples},
        sharing={1: Sharing(1.1), 0.5: Sharing(1.3)},
    )
    forward_s = 0.9 * 2e7 * 16 / 1e11 + 4 * (0.7 * 16 + 1.8) * 1e4 / 2e10 + 1e-4
    for ranks, sharing in ((2, calibration.sharing[1]), (4, calibration.sharing[0.5])):
        found, slices = on_cpu(ranks, calibration=calibration), ranks / 2
        assert found.forward_s == pytest.approx(slices * sharing.factor * 3 * forward_s)
        assert found.update_s == pytest.approx(slices * (calibration.update * passes_s / ranks + calibration.update_s))


def test_threads_begin_and_end_each_operator_together():
    for operator_s in (0.0, 0.004):
        sharing = {2: Sharing(1.0, operator_s), 1: Sharing(1.0)}
        calibration = dataclasses.replace(CALIBRATIONS["cpu"], sharing=sharing)
        found = on_cpu(1, calibration=calibration)
        half = on_cpu(2, plan_ranks=1, calibration=calibration)  # a core instead of two
        assert found.forward_s == pytest.approx(half.forward_s / 2 + 3 * operator_s / 2)


def test_a_rank_with_a_machine_of_one_core_shares_nothing():
    gpu = Gpu("cpu", 10**9, 2e10, {"fp32": 1e11}, "")
    machine = Machine(gpu, 1, shared_memory(2e10), find_interconnect("ethernet10"))
    alone = predict_step(PRODUCTS, 30_000, machine, plan_of("ddp", 1), engine="native", batch_size=16)
    shared = on_cpu(2, plan_ranks=1)
    assert shared.forward_s == pytest.approx(CALIBRATIONS["cpu"].sharing[1].factor * alone.forward_s)


def test_another_engine_costs_by_layer_and_by_value():
    engines = {("torch", 2): EngineCost(1e-3, 4e-3, 1e-7, 0.05)}
    calibration = dataclasses.replace(
        CALIBRATIONS["cpu"], engines=engines, sharing={2: Sharing(1.0), 0.5: Sharing(1.3)}
    )
    for ranks, expected in ((4, 2 * 1.3 * (3 * 1e-3 + 30_000 * 1e-7 + 5 * 0.05)), (1, 3 * 4e-3 + 30_000 * 1e-7)):
        native, other = (
            on_cpu(ranks, name, "fsdp_stage2", blocks=5, calibration=calibration) for name in ("native", "torch")
        )
        assert other.update_s - native.update_s == pytest.approx(expected)


def test_a_measured_step_scales_all_but_the_exchange():
    one, twice = (on_cpu(2, compute_scale=scale) for scale in (1, 2))
    for part in ("forward_s", "backward_s", "update_s"):
        assert getattr(twice, part) == pytest.approx(2 * getattr(one, part))
    assert twice.communication_s == one.communication_s


def test_the_fit_finds_what_ranks_cost_each_other():
    works = [Phases(1, 1, f"m{n}", 16, 64, seconds=(0.01 * n, 0.02 * n, 0.004)) for n in (1, 3, 10)]
    shared = [
        dataclasses.replace(one, ranks=4, seconds=(0.0, 2 * 1.25 * sum(one.seconds[:2]), 2 * 0.004 / 4))
        for one in works
    ]
    found = fit_ranks(shared, {work_of(one): one for one in works})
    assert found.factor == pytest.approx(1.25, rel=1e-3)


def test_measured_blocks_become_medians_and_replace_those_of_the_same_case(tmp_path):
    path, case = tmp_path / "steps.jsonl", {"ranks": 2, "threads": 1, "model": "m", "batch_size": 16, "image_size": 64}
    message = {"ranks": 2, "mbit": 10, "collective": "all_reduce", "messages": 1, "bytes": 1024, "seconds": 0.1}
    replace_lines([case | {"seconds": [1.0, 1.0, 1.0]}, case | {"ranks": 4, "seconds": [5.0, 5.0, 5.0]}, message], path)
    replace_lines([case | {"seconds": [value, 2 * value, 9.0]} for value in (2.0, 3.0, 7.0)], path)
    four, two = read_phases(path)
    assert (four.ranks, four.step_s) == (4, 15.0)
    assert two == Phases(**case, seconds=(3.0, 6.0, 9.0))
    assert [one.seconds for one in read_messages(path)] == [0.1]
    assert len(read_lines(path)) == 5
