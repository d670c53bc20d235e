"""The engines' state on a real GPU: `pytest -m gpu`. On a CPU, tests/training shows the same of other kernels."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from ranks import run_ranks

from zerovision.training.engines.build import ENGINES
from zerovision.training.engines.ways import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CASES = "tests.gpu.engine_cases"
RECORDED = [
    *product(("mobilenet", "efficientnet", "cnn_lstm", "ensemble", "timm:vit_tiny_patch16_224"), ("bf16",), (1, 3)),
    ("vgg", "bf16", 1),
    ("mobilenet", "fp32", 1),
]
VARIANTS = [*product(STRATEGIES, ENGINES, ("adamw", "sgd")), ("ddp", "torch", "lamb")]
ROUNDING = 1e-5  # some kernels' backward adds in no fixed order


def largest_difference(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max(float(np.abs(np.array(first[name]) - np.array(second[name])).max()) for name in first)


def cases_of(**fixed):
    return [
        {"strategy": strategy, "engine": engine, "optimizer": optimizer} | fixed
        for strategy, engine, optimizer in VARIANTS
    ]


def test_cuda_graphs_change_no_bit(tmp_path, monkeypatch):
    """Where a training without them can be repeated to the bit: with dropout, clipping, accumulation."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cases = [dict(zip(("model_type", "precision", "accumulation"), case, strict=True)) for case in RECORDED]
    (reports,) = run_ranks("tests.gpu.gpu_ranks:recorded_beside_eager", 1, tmp_path, cases)
    for case, report in zip(cases, reports, strict=True):
        print(case, report)
        assert report["is_recorded"], case
        eager, again, recorded = report["digests"]
        assert eager != again or recorded == eager, case
    assert sum(report["digests"][0] == report["digests"][1] for report in reports) >= len(cases) - 2


def test_what_cannot_be_recorded_trains_without_graphs(tmp_path):
    ((report,),) = run_ranks("tests.gpu.gpu_ranks:one_that_waits", 1, tmp_path, [{}])
    (note,) = report["notes"]
    print(note)
    assert note.startswith("no CUDA graphs: ")
    assert all(np.isfinite(report["losses"]))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """{(strategy, engine, optimizer, frozen): report}; one process for all."""
    keys = [*product((False, True), VARIANTS)]
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    cases = [case for frozen in (False, True) for case in cases_of(folder=folder, is_frozen=frozen)]
    (reports,) = run_ranks(f"{CASES}:resume_report", 1, tmp_path_factory.mktemp("resumed"), cases)
    return {(*variant, frozen): report for (frozen, variant), report in zip(keys, reports, strict=True)}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("strategy", "engine", "optimizer"), VARIANTS)
def test_a_checkpoint_goes_on(strategy, engine, optimizer, frozen, resumed):
    """The fused kernel reads Adam's count of steps on the GPU."""
    report = resumed[strategy, engine, optimizer, frozen]
    assert report["device"] == "cuda"
    assert report["applied_steps"] == [2, 4]
    np.testing.assert_allclose(report["found"]["losses"], report["expected"]["losses"], rtol=ROUNDING)
    assert largest_difference(report["found"]["weights"], report["expected"]["weights"]) < ROUNDING


def test_a_first_step_that_is_skipped_leaves_no_trace(tmp_path):
    (reports,) = run_ranks(f"{CASES}:skipped_first_step_report", 1, tmp_path, cases_of())
    for variant, (skipped, undisturbed) in zip(VARIANTS, reports, strict=True):
        assert skipped["applied_steps"] == undisturbed["applied_steps"] == 3, variant
        assert largest_difference(skipped["weights"], undisturbed["weights"]) < ROUNDING, variant


def test_a_deep_copy_computes_with_its_own_weights(tmp_path):
    cases = [{"engine": engine, "precision": name} for engine, name in product(ENGINES, ("bf16", "fp16"))]
    (reports,) = run_ranks(f"{CASES}:copy_report", 1, tmp_path, cases)
    for case, report in zip(cases, reports, strict=True):
        assert report["changed"] == [False, True], case
        assert report["trained"] > 0 == report["zeroed"], case


def test_no_images_stay_on_the_gpu_over_the_micro_steps(tmp_path):
    ((kept,),) = run_ranks(f"{CASES}:accumulation_report", 1, tmp_path, [{"micro_steps": 16}])
    assert kept < 2**20, "one micro-batch alone has 6 MiB"


def test_one_gpu_adds_the_leaves_along_the_tree(tmp_path):
    """What one GPU can show of the same bytes on any number of them: the pairs that are added, to the bit."""
    (reports,) = run_ranks(f"{CASES}:leaves_report", 1, tmp_path, [{"leaves": leaves} for leaves in (1, 4, 7)])
    for report in reports:
        assert report["found"] == report["expected"]


def test_compiled_with_cuda_graphs_where_the_weights_stay_where_they_are(tmp_path):
    (reports,) = run_ranks(f"{CASES}:compiled_report", 1, tmp_path, [{"strategy": strategy} for strategy in STRATEGIES])
    for plain, compiled in reports:
        np.testing.assert_allclose(compiled, plain, rtol=1e-3)
