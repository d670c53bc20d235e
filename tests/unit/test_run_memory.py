"""A run's own prediction of its memory, and predicted beside measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

from zerovision.delivery.end_of_run import count_evaluation, prediction_line
from zerovision.models.activations import LARGEST_KEPT_BYTES
from zerovision.planning.plan_command import parse
from zerovision.planning.run_memory import (
    ALLOCATOR_SLACK,
    FSDP2_BYTES,
    FSDP2_COPIES,
    FSDP2_SLACK,
    LOADED_LATER_BYTES,
    _copied_bytes,
    job_of,
    predict_run,
    write_prediction,
)
from zerovision.planning.search import evaluate
from zerovision.training.base.run_folder import METRICS, PREDICTION
from zerovision.training.config import TrainConfig
from zerovision.training.observe.environment import RunFacts

OF_TIMM = ["--model-type=timm:test_resnet"]


@pytest.fixture
def facts(tmp_path):
    config = dataclasses.asdict(TrainConfig(model_type="basic_cnn", batch_size=16))
    return RunFacts(str(tmp_path), config, 10, 64, "torch", "fp32", 8, 8, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("words", "engine", "device"),
    [
        (["--strategy=fsdp_stage3", "--replicate-across=nodes", "--model-type=timm:test_vit"], "torch", ""),
        (
            ["--strategy=fsdp_stage2", "--gradient-accumulation-steps=3", "--activation-checkpointing", *OF_TIMM],
            "deepspeed",
            "NVIDIA H100 80GB HBM3",
        ),
    ],
)
def test_a_run_predicts_what_the_planner_does(words, engine, device, tmp_path):
    """Two machines of four ranks: shards and replicas, blocks, accumulation and checkpointing all count."""
    asked = ["--num-gpus=8", "--gpus-per-node=4", *(["--gpu=h100"] if device else [])]
    job = parse([*asked, "--precision=bf16", "--image-size=64", f"--engine={engine}", *words], None).job
    option, config = evaluate(job, job.config), dataclasses.asdict(job.config) | {"engine": "auto"}
    facts = RunFacts(str(tmp_path), config, job.classes, 64, option.engine, "bf16", 8, 4, device, 10**9)
    prediction = predict_run(facts)
    parts = dataclasses.asdict(option.memory)
    assert {name: prediction["memory_bytes"][name] for name in parts} == parts
    if device:  # what is measured there: tensors, without the context
        assert prediction["memory_bytes"]["peak"] == option.memory.tensors < option.memory.peak


def test_ranks_that_compute_layers_together_divide_weights_gradients_moments_and_activations(facts):
    """Of 4 x 2 ranks under ddp: half of weights and gradients, moments of half of them on each of 4 ranks."""
    wide = {"model_type": "timm:vit_base_patch16_224", "ema": 0.9}
    one, two = (
        predict_run(dataclasses.replace(facts, config=facts.config | wide | {"tensor_parallel": size}))["memory_bytes"]
        for size in (1, 2)
    )
    assert two["weights"] / one["weights"] == pytest.approx(1 / 2, rel=0.02)
    assert two["optimizer"] / one["optimizer"] == pytest.approx(1, rel=0.02)
    assert 1 / 2 < two["activations"] / one["activations"] < 0.8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_ranks_memory_is_that_of_its_process(facts, ranks):
    """The model is in the process already; the kernel counts shared weights and gradients in every rank."""
    cpu = dataclasses.replace(facts, gpu_name="", process_bytes=10**9, ranks=ranks, ranks_per_machine=ranks)
    job = job_of(cpu)
    sizes, plan = job.workload.sizes, evaluate(job, job.config).memory
    # Saving: a copy of the rank's weights and AdamW's moments, and, in a run of several epochs, the best weights.
    saving = 4 * 3 * sizes.trained / ranks + 4 * sizes.parameters + 2 * sizes.buffer_bytes
    shared = 2 * 4 * sizes.trained * (1 - 1 / ranks)
    loaded = LOADED_LATER_BYTES["torch"] + ALLOCATOR_SLACK * plan.activations
    expected = 10**9 - 4 * sizes.parameters - sizes.buffer_bytes + shared + loaded + plan.tensors + saving
    assert predict_run(cpu)["memory_bytes"]["peak"] == pytest.approx(expected, abs=2)


@pytest.mark.parametrize(("steps", "in_epoch"), [(0, False), (10, True)])
def test_saving_after_the_only_epoch_finds_room_where_the_step_had_it(facts, steps, in_epoch):
    """The steps' pieces stay with malloc: the best weights fit in, the copy of the state does not go there."""
    config = facts.config | {"epochs": 1, "save_every_steps": steps}
    cpu = dataclasses.replace(facts, gpu_name="", process_bytes=10**9, ranks=2, ranks_per_machine=2, config=config)
    job = job_of(cpu)
    sizes, plan = job.workload.sizes, evaluate(job, job.config).memory
    state = 4 * 3 * sizes.trained / 2 + sizes.buffer_bytes
    assert plan.heap > 4 * sizes.parameters  # of basic_cnn
    evaluated = 4 * sizes.parameters + sizes.buffer_bytes  # loaded once more
    after = state + plan.held + plan.heap - plan.tensors + evaluated
    found = predict_run(cpu)["memory_bytes"]["saving"]
    assert found == pytest.approx(state if in_epoch else after, abs=2)


def test_malloc_keeps_a_share_of_what_fsdp2_gathers_and_sends(facts):
    """Of the pieces that it keeps at all: a block of 48 MB is none, its four parameters of 12 MB each are."""
    network = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(4, width)) for width in (5, 600_000))))
    small, large, weights = 4 * 5 * 5, 4 * 5 * 600_000, 4 * 4 * 600_000
    assert large <= LARGEST_KEPT_BYTES
    assert _copied_bytes(network, 4, 3) == 7 * small + (4 + 3) * large
    network[0].append(nn.Sequential(*(nn.Linear(4, 600_000) for _ in range(4))))
    assert 4 * large > LARGEST_KEPT_BYTES > weights
    assert _copied_bytes(network, 4, 3) == 7 * small + (4 + 3) * large + 3 * 4 * large
    convolutions = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1))
    assert _copied_bytes(convolutions, 0, 0) == 3 * 4 * (4 * 4 * 3 * 3)  # oneDNN's copies of the first
    config = facts.config | {"strategy": "fsdp_stage3"}
    cpu = dataclasses.replace(facts, gpu_name="", process_bytes=10**9, ranks=2, ranks_per_machine=2, config=config)
    job = job_of(cpu)
    kept = FSDP2_SLACK * _copied_bytes(job.workload.network, *FSDP2_COPIES)
    whole = 4 * job.workload.sizes.parameters + job.workload.sizes.buffer_bytes
    loaded = LOADED_LATER_BYTES["torch"] + FSDP2_BYTES
    loaded += ALLOCATOR_SLACK * evaluate(job, job.config).memory.activations
    assert predict_run(cpu)["memory_bytes"]["process"] == pytest.approx(10**9 - whole + loaded + kept, abs=2)


def test_what_the_evaluation_at_the_end_took_counts_as_measured(tmp_path, monkeypatch):
    """Of rank 0, which does it; not where the tensors of a GPU are compared."""
    monkeypatch.setattr("zerovision.delivery.end_of_run.peak_memory", lambda device: 1200)
    (tmp_path / METRICS).write_text(json.dumps({"kind": "end", "memory_bytes_per_rank": [1000, 1100]}) + "\n")
    for process, ratio in ((500, "1.2 kB measured, ratio 0.67"), (0, "1.1 kB measured, ratio 0.73")):
        (tmp_path / PREDICTION).write_text(json.dumps({"memory_bytes": {"peak": 800, "process": process}}))
        count_evaluation(tmp_path)
        assert prediction_line(tmp_path).endswith(f"({ratio})")


def test_predicted_beside_measured(facts, tmp_path):
    assert prediction_line(tmp_path) is None
    write_prediction(facts)
    assert json.loads((tmp_path / PREDICTION).read_text()) == predict_run(facts)
    (tmp_path / PREDICTION).write_text(json.dumps({"memory_bytes": {"peak": 800}}))
    end = {"kind": "end", "memory_bytes_per_rank": [900, 1000]}
    (tmp_path / METRICS).write_text('{"kind": "step"}\n' + json.dumps(end) + "\n")
    assert prediction_line(tmp_path) == "predicted    memory of a rank 800 B (1 kB measured, ratio 0.80)"


@pytest.mark.parametrize("content", ["", "[]", '{"memory_bytes": 1}', '{"memory_bytes": {}}'])
def test_a_prediction_that_cannot_be_read_is_none(content, tmp_path):
    (tmp_path / PREDICTION).write_text(content)
    (tmp_path / METRICS).write_text(json.dumps({"kind": "end", "memory_bytes_per_rank": [900]}))
    assert prediction_line(tmp_path) is None
