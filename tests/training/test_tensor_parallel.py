"""Tensor parallelism against one rank: the same losses, gradients and weights, and checkpoints of any mesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.kit import ROUNDING, assert_same_but_rounding
from tests.training.tensor_ranks import CLASSES, CLIPPING, NETWORKS, RATE, STEPS, make_network
from zerovision.models.tensor_plan import TENSOR_PLANS, tensor_plan
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.engines.tensor.layers import split_model
from zerovision.training.world.world import World

DIVIDED = "tests.training.tensor_ranks:divided_steps"
RUN = "tests.training.tensor_ranks:whole_run"
LARGE = ("vit_tiny", "vit_small")


def assert_trains_like_one_rank(reports: list) -> None:
    """Weights after steps of SGD are gradients: the rate and the clipping are the oracle's."""
    expected = reports[0]["expected"]
    assert min(expected["norms"]) > 0.1, "the run must mean something"
    # No step is longer than the rate times the clipped norm; biases that only steps have made are as short as these.
    assert reports[0]["difference"] < ROUNDING * STEPS * RATE * CLIPPING
    for report in reports:
        for key in ("losses", "norms", "logits"):
            assert_same_but_rounding(report[key], expected[key], msg=key)


def test_every_family_trains_like_one_rank(run_on_ranks):
    cases = [{"name": name, "tensor": 2, "strategy": "ddp"} for name in NETWORKS if name not in LARGE]
    found = run_on_ranks(DIVIDED, 2, cases)
    for number in range(len(cases)):
        assert_trains_like_one_rank([reports[number] for reports in found])


def test_variants_of_one_network(run_on_ranks):
    variants = [
        {"strategy": "ddp", "optimizer": "adamw"},
        {"strategy": "ddp", "optimizer": "adamw", "spoils": True},
        {"strategy": "fsdp_stage3", "spoils": True},
        {"strategy": "ddp", "recomputes": True},
        {"strategy": "ddp", "wide_head": 1},
        {"strategy": "ddp", "precision": "bf16"},
    ]
    found = run_on_ranks(DIVIDED, 2, [{"name": "vit", "tensor": 2} | variant for variant in variants])
    for number in (2, 3, 4):
        assert_trains_like_one_rank([reports[number] for reports in found])
    for adamw, again, sharded, *_, half in found:
        assert again["is_left"]
        assert sharded["is_left"], "no rank takes a step with a gradient that is not finite on one"
        assert adamw["sha256"] == again["sha256"], "the same mesh gives the same bytes"
        assert adamw["moments"] == pytest.approx(2 * adamw["elements"], abs=2**16)  # the rest fills blocks up
        np.testing.assert_allclose(half["losses"], found[0][2]["expected"]["losses"], atol=0.05)


# Networks in stages, and the recipe; the last is cut where each rank has features of its own.
STAGED = [
    {"name": "vit"},
    {"name": "convnext"},
    {"name": "vit", "optimizer": "adamw", "recomputes": True},
    {"name": "vgg", "split": "pre_logits.drop"},
]


@pytest.mark.slow
def test_stages_of_tensor_groups_train_the_bytes_of_the_groups_alone(run_on_ranks):
    """And so the losses and gradients of one rank."""
    cases = [recipe | {"tensor": 2, "strategy": "ddp", "pipeline": stages} for recipe in STAGED for stages in (1, 2)]
    found = run_on_ranks(DIVIDED, 4, cases)
    for number, recipe in enumerate(STAGED):
        whole, staged = ([ranks[2 * number + more] for ranks in found] for more in (0, 1))
        assert len({report["sha256"] for report in (*whole, *staged)}) == 1, recipe
        assert staged[0]["elements"] + staged[2]["elements"] == whole[0]["elements"]
        if "optimizer" not in recipe:
            assert_trains_like_one_rank(staged)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage2", "fsdp_stage3"])
@pytest.mark.parametrize("name", LARGE)
def test_four_ranks_train_like_one(name, strategy, run_on_ranks):
    case = {"name": name, "tensor": 2, "strategy": strategy}
    found = run_on_ranks(DIVIDED, 4, [case, case])
    assert_trains_like_one_rank([reports[0] for reports in found])
    assert {report["sha256"] for reports in found for report in reports} == {found[0][0]["sha256"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_a_giant_are_one_over_the_ranks(ranks):
    """Counted: what every rank has whole is norms, biases, patches and positions."""
    import timm

    with torch.device("meta"):
        network = timm.create_model("vit_giant_patch14_224", num_classes=1000)
    whole = sum(parameter.numel() for parameter in network.parameters())
    group = World(ranks - 1, ranks - 1, ranks, ranks, torch.device("cpu"))
    split = split_model(network, tensor_plan(network, "timm:vit_giant_patch14_224", ranks), group)
    own = sum(parameter.numel() for parameter in network.parameters())
    assert whole > 1.01e9
    assert own / whole == pytest.approx(1 / ranks, rel=0.01)
    assert len(split.cuts) == 40 * 6 + 2
    logits = network(torch.empty(2, 3, 224, 224, device="meta"))
    assert logits.shape == (2, 1000)


def test_networks_that_cannot_be_divided_are_refused_in_one_line():
    network, _ = make_network("vit")
    with pytest.raises(
        UserError, match=r"--tensor-parallel 4: vit has layers of 3 heads.* --tensor-parallel 3 or less"
    ):
        tensor_plan(network, "vit", 4)
    with pytest.raises(UserError, match="resnet has no layers that can be divided"):
        tensor_plan(torch.nn.Linear(8, CLASSES), "resnet", 2)
    assert {"Eva", "VGG"} < TENSOR_PLANS.keys()


# Ranks of a tensor group, stages, and data ranks, strategy and engine.
ONE, GROUP, STAGES_OF_GROUPS = (1, 1, 1, "ddp", "torch"), (2, 1, 1, "ddp", "torch"), (2, 2, 1, "ddp", "torch")
SHARDED, OTHER = (2, 1, 2, "fsdp_stage3", "torch"), (1, 1, 2, "fsdp_stage2", "deepspeed")
MESHES = [(GROUP, GROUP), (GROUP, ONE), (ONE, GROUP), (GROUP, STAGES_OF_GROUPS), (STAGES_OF_GROUPS, ONE)]
MESHES += [(SHARDED, STAGES_OF_GROUPS), (STAGES_OF_GROUPS, OTHER), (OTHER, SHARDED)]


@pytest.mark.parametrize("pairs", [MESHES[1:3], pytest.param(MESHES, marks=pytest.mark.slow)])
def test_a_checkpoint_of_a_mesh_goes_on_on_any_other(run_on_ranks, tmp_path, pairs):
    case = {"log_dir": str(tmp_path), "model_type": "timm:test_vit", "image_size": 32, "epochs": 1, "batch_size": 50}
    case |= {
        "ema": 0.9,
        "keep_last": 9,
        "save_every_steps": 5,
        "optimizer": "momentum",
        "learning_rate": 0.02,
    }

    def run(name: str, mesh: tuple, resume: str = "never") -> dict[str, torch.Tensor]:
        tensor, pipeline, data, strategy, engine = mesh
        changes = {"name": name, "tensor_parallel": tensor, "pipeline_parallel": pipeline, "resume": resume}
        changes |= {"strategy": strategy, "engine": engine, "gradient_accumulation_steps": 2 // data}
        reports = [ranks[0] for ranks in run_on_ranks(RUN, tensor * pipeline * data, [case | changes])]
        assert {report["code"] for report in reports} == {0}
        return load_file(RunFolder(tmp_path, name).weights)

    def name_of(mesh: tuple) -> str:
        return "-".join(map(str, mesh))

    def checkpoint(name: str) -> str:
        return str(RunFolder(tmp_path, name).checkpoints / "step-00000-0000005")

    whole = {mesh: run(name_of(mesh), mesh) for mesh in sorted({saved for saved, _ in pairs})}
    for saved, resumed in pairs:
        found = run(f"from-{name_of(saved)}-to-{name_of(resumed)}", resumed, checkpoint(name_of(saved)))
        exact = saved[0] == resumed[0] and saved[3:] == resumed[3:]  # stages do not count
        assert_same_but_rounding(found, whole[saved], 0.0 if exact else ROUNDING, f"{saved} to {resumed}")
