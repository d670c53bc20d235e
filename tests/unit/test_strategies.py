"""From a strategy's JSON to what DeepSpeed is given: checked strictly, merged purely."""

from __future__ import annotations

import json

import pytest

from training.deepspeed_schema import OWNED_BY_COMMAND_LINE, SCHEMA, check_deepspeed_json
from training.errors import UserError
from training.strategies import STRATEGIES, engine_config, read_strategy_json

VALUES = {"batch_size_per_rank": 16, "accumulation_steps": 4, "gradient_clipping": 0.5}


@pytest.mark.parametrize(("name", "stage"), [("ddp", 1), ("fsdp_stage2", 2), ("fsdp_stage3", 3)])
def test_strategies_are_the_zero_stages(name, stage):
    config = engine_config(read_strategy_json(name), **VALUES, offload="none")
    assert config["zero_optimization"]["stage"] == stage
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("name", "offload", "expected"),
    [
        ("fsdp_stage2", "none", set()),
        ("fsdp_stage2", "optimizer", {"offload_optimizer"}),
        ("fsdp_stage3", "none", set()),
        ("fsdp_stage3", "optimizer", {"offload_optimizer"}),
        ("fsdp_stage3", "all", {"offload_optimizer", "offload_param"}),
    ],
)
def test_offload_is_what_the_command_line_says(name, offload, expected):
    zero = engine_config(read_strategy_json(name), **VALUES, offload=offload)["zero_optimization"]
    assert {key for key in zero if key.startswith("offload")} == expected
    assert all(zero[key]["device"] == "cpu" for key in expected)


def test_merging_leaves_the_file_alone():
    content = read_strategy_json("fsdp_stage3")
    before = json.dumps(content)
    engine_config(content, **VALUES, offload="all")
    assert json.dumps(content) == before


@pytest.mark.parametrize("key", [key for key in OWNED_BY_COMMAND_LINE if "." not in key])
def test_keys_of_the_command_line_are_refused(key, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}.*'{key}' belongs to the command line"):
        check_deepspeed_json({key: {}}, tmp_path)


def test_no_key_has_two_owners():
    assert not set(SCHEMA) & set(OWNED_BY_COMMAND_LINE)


def test_deepspeed_knows_every_zero_key_of_the_schema():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = set(DeepSpeedZeroConfig.model_fields)
    known |= {field.alias for field in DeepSpeedZeroConfig.model_fields.values() if field.alias}
    assert set(SCHEMA["zero_optimization"]) <= known


@pytest.mark.parametrize(
    ("value", "ok"), [(5e8, True), (500, True), (0, True), (1.5, False), (-1, False), ("5e8", False), (True, False)]
)
def test_bucket_sizes_may_be_written_as_the_documentation_does(value, ok, tmp_path):
    content = {"zero_optimization": {"stage": 2, "reduce_bucket_size": value}}
    if ok:
        check_deepspeed_json(content, tmp_path)
    else:
        with pytest.raises(UserError, match="reduce_bucket_size"):
            check_deepspeed_json(content, tmp_path)


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(UserError, match="'stage' is given twice"):
        read_strategy_json("ddp", str(path))


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_flops_profiler_is_reachable_by_its_key(name, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(read_strategy_json(name) | {"flops_profiler": {"enabled": True, "profile_step": 2}}))
    config = engine_config(read_strategy_json(name, str(path)), **VALUES, offload="none")
    assert config["flops_profiler"]["enabled"] is True
