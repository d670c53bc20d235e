"""What the planner predicts for a run that tries sizes."""

from __future__ import annotations

import dataclasses

import pytest

from zerovision.planning.machines import Machine, find_gpu
from zerovision.planning.plan_command import parse
from zerovision.planning.search import PlannedJob, evaluate, predicted_tensors
from zerovision.training.config import TrainConfig
from zerovision.training.prepare import RunFacts

OF_TIMM = ["--model-type=timm:test_resnet"]


@pytest.mark.parametrize(
    ("words", "engine", "has_gpus"),
    [
        (["--strategy=fsdp_stage3", "--replicate-across=nodes", "--model-type=timm:test_vit"], "torch", False),
        (
            ["--strategy=fsdp_stage2", "--gradient-accumulation-steps=3", "--activation-checkpointing", *OF_TIMM],
            "deepspeed",
            True,
        ),
    ],
)
def test_a_run_predicts_what_the_planner_does(words, engine, has_gpus):
    """Two machines of four ranks: shards and replicas, blocks, accumulation and checkpointing all count."""
    asked = ["--num-gpus=8", "--gpus-per-node=4", *(["--gpu=h100"] if has_gpus else [])]
    job = parse([*asked, "--precision=bf16", "--image-size=64", f"--engine={engine}", *words], None).job
    config = dataclasses.replace(job.config, image_channels=3)
    memory = evaluate(job, job.config).memory
    assert predicted_tensors(RunFacts(config, job.classes, 64, 8, 4, has_gpus), [job.config]) == [memory.tensors]
    if has_gpus:  # what is measured there: tensors, without the context
        assert memory.tensors < memory.peak


def test_ranks_that_compute_layers_together_divide_weights_gradients_moments_and_activations():
    """Of 4 x 2 ranks under ddp: half of weights and gradients, moments of half of them on each of 4 ranks."""
    config = TrainConfig(model_type="timm:vit_base_patch16_224", ema=0.9, precision="fp32", engine="torch")
    one, two = (
        evaluate(PlannedJob(each, Machine(find_gpu("h100"), 8), 8, 10, 64, 0), each).memory
        for each in (config, dataclasses.replace(config, tensor_parallel=2))
    )
    assert two.weights / one.weights == pytest.approx(1 / 2, rel=0.02)
    assert two.optimizer / one.optimizer == pytest.approx(1, rel=0.02)
    assert 1 / 2 < two.activations / one.activations < 0.8
