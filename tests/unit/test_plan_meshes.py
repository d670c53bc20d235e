"""The planner's meshes: memory against closed forms, and what it recommends when."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
from test_plan import taken_by_the_launcher, with_memory

from zerovision.launch.arguments import check_training
from zerovision.planning import run_workload
from zerovision.planning.machines import Machine, PlanSettings, find_gpu
from zerovision.planning.plan_command import command_of, plan
from zerovision.planning.recommend import recommend
from zerovision.planning.run_workload import stages_of
from zerovision.planning.search import NO_ACTIVATIONS, PlannedJob, evaluate
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig

CONFIG = TrainConfig(model_type="timm:test_vit", engine="torch", batch_size=16)
JOB = PlannedJob(CONFIG, Machine(find_gpu("a100-40gb"), 4), 4, 1000, 160, 100_000)


def staged(**changes):
    settings = {"pipeline_parallel": 2, "gradient_accumulation_steps": 4, "precision": "fp32"} | changes
    return stages_of(JOB.workload, dataclasses.replace(CONFIG, **settings), settings["precision"], "cuda")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_stages_are_the_whole(precision, recomputes):
    """In all: every weight and each kept tensor once, but for what goes from stage to stage, which both have."""
    shares = staged(precision=precision, activation_checkpointing=recomputes)
    whole = JOB.workload.activations(16, precision, "cuda", recomputes, True, ("blocks",))
    assert sum(share.sizes.parameters for share in shares) == JOB.workload.sizes.parameters
    assert max(share.sizes.parameters for share in shares) < 0.75 * JOB.workload.sizes.parameters
    received = 4 * 16 * 64 * 101  # fp32 of every image's tokens
    (first, last) = (share.activations.saved for share in shares)  # of two micro-batches, and of one
    assert first / 2 + last == whole.saved + 2 * received
    assert max(share.activations.workspace for share in shares) <= 2 * whole.workspace
    assert [share.start for share in shares[1:]] == [JOB.workload.whole_bytes]


def test_what_a_schedule_keeps():
    """1F1B: as many micro-batches as stages are ahead (Narayanan et al. 2021)."""
    (first, last), (first_of_one, last_of_one) = staged(), staged(gradient_accumulation_steps=1)
    assert first.activations.saved == 2 * first_of_one.activations.saved
    assert last.activations.saved == last_of_one.activations.saved
    interleaved = staged(pipeline_schedule="interleaved", pipeline_parallel=2)
    assert sum(share.sizes.parameters for share in interleaved) == JOB.workload.sizes.parameters


def test_a_mesh_divides_the_weights_by_both_of_its_kinds():
    config = dataclasses.replace(CONFIG, pipeline_parallel=2, gradient_accumulation_steps=4)
    two = evaluate(dataclasses.replace(JOB, ranks=2), config)
    assert two.images_per_update == 64
    divided = evaluate(dataclasses.replace(JOB, ranks=2), dataclasses.replace(CONFIG, tensor_parallel=2))
    both = evaluate(JOB, dataclasses.replace(config, tensor_parallel=2))
    assert both.images_per_update == 64
    assert both.memory.weights < min(two.memory.weights, divided.memory.weights)
    assert divided.memory.start == evaluate(JOB, CONFIG).memory.start >= 4 * JOB.workload.sizes.parameters


def test_members_of_an_ensemble_are_dealt_out():
    names = "timm:test_vit,timm:test_resnet,timm:test_vit"
    config = dataclasses.replace(CONFIG, model_type="ensemble", ensemble_members=names, pipeline_parallel=2)
    job = dataclasses.replace(JOB, config=config, ranks=2)
    shares = stages_of(job.workload, config, "fp32", "cuda")
    assert sum(share.sizes.parameters for share in shares) == job.workload.sizes.parameters
    two = evaluate(job, config)
    alone = dataclasses.replace(config, pipeline_parallel=1)
    one = evaluate(dataclasses.replace(job, config=alone, ranks=1), alone)
    assert two.memory.peak < one.memory.peak


def test_a_mesh_is_taken_when_nothing_else_fits():
    """What fits with ddp keeps it; what is printed is what the trainer takes, with as many images in an update."""
    config = dataclasses.replace(CONFIG, pipeline_parallel=4, batch_size=4, gradient_accumulation_steps=16)
    least = evaluate(JOB, dataclasses.replace(config, activation_checkpointing=True)).memory.peak
    assert recommend(with_memory(JOB, evaluate(JOB, CONFIG).memory.peak))[1] == []
    job = with_memory(JOB, least)
    chosen, rungs = recommend(job)
    assert rungs
    taken = check_training(taken_by_the_launcher(command_of(job, chosen)).training)
    groups = 4 // taken.ranks_per_replica
    assert groups * taken.batch_size * taken.gradient_accumulation_steps == 64


def test_what_its_weights_do_not_fit_is_told_without_counting_activations(monkeypatch):
    """But for those of the smallest settings, which the answer names; each takes seconds of a model of a billion."""
    counted = []
    monkeypatch.setattr(run_workload, "activations", lambda *words, **more: counted.append(words) or NO_ACTIVATIONS)
    job = with_memory(JOB, 3_000_000, config=dataclasses.replace(CONFIG, batch_size=32))
    with pytest.raises(UserError, match=r"1 image and all memory savings\. The nearest settings that work: --gpu"):
        recommend(job)
    assert 0 < len(counted) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", ""], ids=["h100", "this machine"])
@pytest.mark.parametrize("model", ["timm:vit_giant_patch14_224", "timm:vit_gigantic_patch14_224"])
def test_giants_get_a_line_to_type(model, gpu, capsys):
    """Of a machine without GPUs, which they do not fit: the nearest one that they do, and that one's line."""
    words = [f"--model-type={model}", "--num-gpus=8"]
    try:
        assert plan(PlanSettings.read([*words, f"--gpu={gpu}"] if gpu else words)) == 0
    except UserError as error:
        assert not gpu
        nearest = re.search(r"The nearest settings that work: (--gpu \S+)\.$", str(error))
        assert plan(PlanSettings.read([*words, *nearest[1].split()])) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("type "))
    command = shlex.split(line)[1:]
    assert command[:2] == ["bash", "scripts/launch_distributed.sh"]
    taken = check_training(taken_by_the_launcher(command).training)
    groups = 8 // taken.ranks_per_replica
    assert groups * taken.batch_size * taken.gradient_accumulation_steps == 8 * TrainConfig().batch_size


@pytest.mark.parametrize(
    ("fits", "strategy", "mesh"),
    [
        (lambda _: True, "ddp", (1, 1)),
        (lambda config: config.strategy != "ddp" or config.ranks_per_replica > 1, "fsdp_stage2", (1, 1)),
        (lambda config: config.ranks_per_replica > 1, "ddp", (2, 1)),
        (lambda config: config.pipeline_parallel > 1, "ddp", (1, 2)),
        (lambda config: config.ranks_per_replica == 4 and config.tensor_parallel == 2, "ddp", (2, 2)),
    ],
)
def test_the_first_that_fits_is_taken(monkeypatch, fits, strategy, mesh):
    """Of two machines with two ranks each; stages last, on machines of tensor groups."""
    monkeypatch.setattr("zerovision.planning.recommend.fits", lambda _job, config: fits(config))
    job = dataclasses.replace(JOB, machine=Machine(JOB.machine.gpu, 2))
    chosen, rungs = recommend(job)
    assert (chosen.config.tensor_parallel, chosen.config.pipeline_parallel) == mesh
    assert chosen.config.strategy == strategy
    assert chosen.images_per_update == 64
    assert bool(rungs) == (strategy != "ddp" or mesh != (1, 1))
