"""Stages of a network on ranks of their own against the whole network on one: every byte."""

from __future__ import annotations

import pytest

from zerovision.training.config import TrainConfig
from zerovision.training.engines.pipeline import Pipeline

RANKS = "tests.training.pipeline_ranks"
# Network, leaves of a step, ranks, stages, and what else is asked for.
QUICK = [
    ("cnn", 4, 2, 2, {}),
    ("vit", 3, 2, 2, {"split": "blocks.1"}),
    ("resnet", 4, 2, 2, {"schedule": "interleaved", "recomputes": True}),
    ("ensemble", 2, 2, 2, {"recomputes": True}),
]
SLOW = [
    ("lstm", 3, 3, 3, {}),
    ("resnet", 5, 3, 3, {"optimizer": "muon"}),
    ("vit", 6, 4, 4, {}),
    ("vit", 4, 4, 4, {"precision": "bf16"}),
    ("resnet", 4, 4, 4, {"split": "layer1,layer2,global_pool"}),
    ("cnn", 8, 4, 2, {}),
    ("resnet", 6, 4, 2, {"optimizer": "lamb"}),
    ("vit", 8, 4, 2, {"schedule": "interleaved", "gradient_clipping": 0.0}),
    ("vit", 4, 2, 2, {"frozen": ("cls_token", "pos_embed", "patch_embed", "blocks")}),
    ("residual", 4, 2, 2, {"split": "head"}),
    ("ensemble", 1, 3, 3, {"optimizer": "muon", "has_teacher": True}),
    ("ensemble", 4, 4, 2, {"frozen": ("members.0",), "gradient_clipping": 0.0}),
]


@pytest.fixture(scope="module")
def whole(run_on_ranks):
    """The network on one rank, trained once for each recipe."""
    found = {}

    def train(network: str, leaves: int, options: dict) -> dict[str, str]:
        recipe = {name: value for name, value in options.items() if name not in ("schedule", "split")}
        key = str((network, leaves, recipe))
        if key not in found:
            found[key] = run_on_ranks(f"{RANKS}:train", 1, [{"network": network, "leaves": leaves} | recipe])[0][0]
        return found[key]

    return train


@pytest.mark.parametrize(
    ("network", "leaves", "ranks", "stages", "options"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_stages_train_and_evaluate_the_bytes_of_the_whole(network, leaves, ranks, stages, options, run_on_ranks, whole):
    case = {"network": network, "leaves": leaves, "pipeline": stages} | options
    found, expected = run_on_ranks(f"{RANKS}:train", ranks, [case])[0][0], whole(network, leaves, options)
    assert sorted(name for name in expected if found.get(name) != expected[name]) == []
    assert found.keys() == expected.keys()
    assert len({found[f"outputs {step} 0"] for step in range(3)}) == 3, "the weights must have moved"


def test_no_features_wait_for_logits_in_evaluation(run_on_ranks):
    """NCCL does what a group is given one after another, so that stages would take turns."""
    ((messages,), *_) = run_on_ranks(f"{RANKS}:features_sent", 3, [{"schedule": "1f1b"}])
    assert messages == [["isend"] * 4, ["recv", "isend"] * 4, ["recv"] * 4]


def test_no_batch_waits_for_another_to_come_round_in_evaluation(run_on_ranks):
    """Of two batches the first stage is done before the first rank waits for the second stage of one of them."""
    ((messages,), _) = run_on_ranks(f"{RANKS}:features_sent", 2, [{"schedule": "interleaved"}])
    first, second = ["isend"] * 2 + ["back", "isend"] * 2, ["recv", "back"] * 2 + ["recv"] * 2
    assert messages == [first * 2, second * 2]


@pytest.mark.parametrize(
    ("micro_batches", "schedule", "split", "expected"),
    [
        (2, "1f1b", "blocks.2", 1 / 3),
        pytest.param(8, "1f1b", "blocks.2", 1 / 9, marks=pytest.mark.slow),
        (4, "interleaved", "blocks.1,blocks.2,blocks.3", 1 / 9),
        pytest.param(4, "1f1b", "blocks.2", 1 / 5, marks=pytest.mark.slow),
        pytest.param(2, "interleaved", "blocks.1,blocks.2,blocks.3", 1 / 5, marks=pytest.mark.slow),
    ],
)
def test_a_rank_waits_as_long_as_is_logged(micro_batches, schedule, split, expected, run_on_ranks):
    """With blocks that sleep: a busy machine, which slows all else down, leaves the schedule as it is."""
    words = {"pipeline_schedule": schedule, "gradient_accumulation_steps": micro_batches}
    assert Pipeline(TrainConfig(pipeline_parallel=2, **words)).waits() == expected
    case = {"micro_batches": micro_batches, "schedule": schedule, "split": split, "block_s": 0.05}
    ((found,), _) = run_on_ranks(f"{RANKS}:wait_share", 2, [case])
    assert found == pytest.approx(expected, abs=0.06)


REFUSED = {
    "several paths": ({"network": "branches"}, "several tensors pass between layers"),
    "unknown": (
        {"network": "vit", "split": "blocks.9"},
        "--pipeline-parallel SPLIT blocks.9: this model can be cut before",
    ),
    "inside a block": ({"network": "vit", "split": "blocks.1.attn"}, "can be cut before blocks, blocks.1"),
    "too many": ({"network": "vit", "split": "blocks.1,blocks.2"}, "1 for 2 stages"),
}


@pytest.mark.parametrize(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused_on_all_ranks(settings, words, run_on_ranks):
    for (said,) in run_on_ranks(f"{RANKS}:refusal", 2, [{"leaves": 2, "pipeline": 2} | settings]):
        assert words in said
        assert "\n" not in said
