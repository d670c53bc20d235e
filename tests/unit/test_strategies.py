"""From a strategy's JSON to what DeepSpeed is given: checked strictly, merged purely."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from zerovision.training.base.errors import UserError
from zerovision.training.config import FLAG_OF
from zerovision.training.engines.deepspeed import (
    OWNED_BY_COMMAND_LINE,
    SCHEMA,
    check_deepspeed_json,
    deepspeed_config,
    read_strategy_json,
)


def merged(content, offload):
    """Return what DeepSpeed is given for a strategy's JSON."""
    given = {"batch_size": 16, "accumulation_steps": 4, "gradient_clipping": 0.5}
    return deepspeed_config(content, SimpleNamespace(plan=SimpleNamespace(offload=offload), **given))


@pytest.mark.parametrize(
    ("name", "stage", "offload", "expected"),
    [
        ("ddp", 1, "none", set()),
        ("fsdp_stage2", 2, "none", set()),
        ("fsdp_stage2", 2, "optimizer", {"offload_optimizer"}),
        ("fsdp_stage3", 3, "none", set()),
        ("fsdp_stage3", 3, "optimizer", {"offload_optimizer"}),
        ("fsdp_stage3", 3, "all", {"offload_optimizer", "offload_param"}),
    ],
)
def test_strategies_are_the_zero_stages_with_what_the_command_line_says(name, stage, offload, expected, tmp_path):
    measured = read_strategy_json(name) | {"flops_profiler": {"enabled": True, "profile_step": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(measured))
    content = read_strategy_json(name, str(tmp_path / "ds.json"))
    before = json.dumps(content)
    config = merged(content, offload)
    zero = config["zero_optimization"]
    assert zero["stage"] == stage
    assert {key for key in zero if key.startswith("offload")} == expected
    assert all(zero[key]["device"] == "cpu" for key in expected)
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["flops_profiler"]["enabled"] is True
    assert json.dumps(content) == before


@pytest.mark.parametrize("name", OWNED_BY_COMMAND_LINE)
def test_keys_that_are_refused_say_what_stands_in_their_place(name, tmp_path):
    content = {}
    for key in reversed(name.split(".")):
        content = {key: content}
    with pytest.raises(UserError) as caught:
        check_deepspeed_json(content, tmp_path)
    instead = OWNED_BY_COMMAND_LINE[name]
    assert str(caught.value).startswith(f"{tmp_path}: key '{name}' ")
    assert str(caught.value).endswith(f": use {instead}.")
    assert {word for word in instead.replace(",", "").split() if word.startswith("--")} <= {
        *FLAG_OF.values(),
        "--min-nodes",
    }


def test_the_keys_are_deepspeeds_and_have_one_owner():
    """The oracle is DeepSpeed's own model of its section for ZeRO."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {f"zero_optimization.{key}" for key in SCHEMA["zero_optimization"]}
    assert not {*SCHEMA, *zero} & set(OWNED_BY_COMMAND_LINE)
    fields = DeepSpeedZeroConfig.model_fields
    assert set(SCHEMA["zero_optimization"]) <= {*fields, *(field.alias for field in fields.values() if field.alias)}


def test_bucket_sizes_may_be_written_as_the_documentation_does(tmp_path):
    for value in (5e8, 500, 0):
        check_deepspeed_json({"zero_optimization": {"stage": 2, "reduce_bucket_size": value}}, tmp_path)
    for value in (1.5, -1, "5e8", True):
        with pytest.raises(UserError, match="reduce_bucket_size"):
            check_deepspeed_json({"zero_optimization": {"stage": 2, "reduce_bucket_size": value}}, tmp_path)
