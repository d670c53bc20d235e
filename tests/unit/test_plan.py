"""The planner: what it chooses on GPUs of any memory, what it refuses, and that the launcher takes what it prints."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerovision.launch.arguments import check_training, read_arguments
from zerovision.launch.plan import resolve_strategy
from zerovision.planning.machines import CPU, GPUS, Machine, PlanSettings, detect_machine, find_gpu
from zerovision.planning.plan_command import command_of, describe_filling, job_of, plan
from zerovision.planning.recommend import reason, recommend
from zerovision.planning.search import PlannedJob, engines_of, evaluate, filling_batch, options, predicted_tensors
from zerovision.training.base.control_groups import usable_memory
from zerovision.training.base.errors import UserError
from zerovision.training.base.units import format_bytes
from zerovision.training.config import TrainConfig
from zerovision.training.out_of_memory import next_rung
from zerovision.training.steps.carrier import Run
from zerovision.training.world.world import World

ROOT = Path(__file__).resolve().parents[2]
JOB = PlannedJob(
    TrainConfig(model_type="basic_cnn", engine="deepspeed"), Machine(find_gpu("h100"), 8), 8, 1000, 224, 1_281_167
)


def with_memory(job, memory_bytes, **changes):
    """Return the job on GPUs of so many bytes."""
    gpu = dataclasses.replace(job.machine.gpu, memory_bytes=memory_bytes)
    found = dataclasses.replace(job, machine=dataclasses.replace(job.machine, gpu=gpu), **changes)
    found.__dict__["workload"] = job.workload  # counted once
    return found


def taken_by_the_launcher(command):
    """Return what the launcher reads of a command that the planner recommends."""
    _, script, *words = command
    return read_arguments(Path(script).name, words, {})


def ladder(config=JOB.config):
    """Every configuration from the first to the last rung."""
    configs = [config]
    while rung := next_rung(configs[-1], JOB.ranks, has_gpus=True):
        configs.append(dataclasses.replace(configs[-1], **rung.changes))
    return configs


def test_the_first_rung_that_fits_is_chosen():
    """Whatever the memory: every earlier rung needs more than there is."""
    configs = ladder()
    peaks = [evaluate(JOB, config).memory.peak for config in configs]
    assert len(configs) >= 8
    for memory in sorted(peaks):
        chosen, rungs = recommend(with_memory(JOB, memory))
        first = next(place for place, peak in enumerate(peaks) if peak <= memory)
        assert chosen.config == configs[first]
        assert len(rungs) == first


def test_what_fits_nowhere_is_one_line_with_what_does():
    fsdp = dataclasses.replace(JOB.config, engine="torch")  # DeepSpeed's buckets would not become smaller with images
    least = min(evaluate(JOB, config).memory.peak for config in ladder(fsdp))
    said = r"does not fit on 8 x h100-80gb: .* The nearest settings that work: --gpu rtx3060"
    with pytest.raises(UserError, match=said) as caught:
        recommend(with_memory(JOB, least - 1, config=fsdp))
    assert "--image-size 112" in str(caught.value)


def test_another_engine_is_taken_where_the_default_one_does_not_fit():
    config = dataclasses.replace(JOB.config, engine="auto")
    job = with_memory(JOB, 80 * 10**9, config=config)
    found = [evaluate(job, each) for each in engines_of(job, config)]
    assert {option.engine for option in found} == {"deepspeed", "torch"}
    assert recommend(with_memory(JOB, found[0].memory.peak, config=config))[0].engine == found[0].engine
    least = min(found, key=lambda option: option.memory.peak)
    assert least.memory.peak < found[0].memory.peak
    chosen, rungs = recommend(job := with_memory(JOB, least.memory.peak, config=config))
    assert (chosen.engine, rungs) == (least.engine, [])
    assert f"; --engine {found[0].engine} would need {format_bytes(found[0].memory.peak)}" in reason(job, chosen, [])


@pytest.mark.parametrize("name", ["muon", "lars"])
def test_what_is_planned_for_a_rule_is_what_the_trainer_takes(name):
    """With enough memory, and with less than it needs as asked for."""
    job = dataclasses.replace(JOB, config=TrainConfig(model_type="basic_cnn", batch_size=32, optimizer=name))
    found = options(job)
    assert {option.engine for option in found} == {"torch"}
    for memory in (80 * 10**9, min(option.memory.peak for option in found if option.plan.zero_stage == 1) - 1):
        chosen, rungs = recommend(smaller := with_memory(job, memory))
        config = check_training(taken_by_the_launcher(command_of(smaller, chosen)).training)
        assert (config.optimizer, config.engine) == (name, chosen.config.engine)
    assert rungs


def test_the_picture_in_the_documentation_is_the_ladder():
    text = (ROOT / "docs/dev/strategies.md").read_text(encoding="utf-8")
    drawn = re.findall(r'no --> \w+\["(.*?)"\]', text)
    rungs = [next_rung(config, JOB.ranks, has_gpus=True) for config in ladder()[:-1]]
    assert drawn == [*(" ".join(rung.flags) for rung in rungs), "it fits nowhere"]


@pytest.mark.parametrize(
    "more", ["--learning-rate auto", "--global-batch 1024 --ema 0.999", "--gpus-per-node 4 --compile=on"]
)
def test_the_launcher_takes_the_command_that_is_printed(more, capsys):
    words = f"--model-type basic_cnn --num-gpus 16 --gpu h100 --epochs 90 --json {more}"
    assert plan(PlanSettings.read(words.split())) == 0
    given = taken_by_the_launcher(json.loads(capsys.readouterr().out)["recommended"]["command"])
    config = check_training(given.training)
    assert given.nodes * given.ranks_per_node == 16
    assert config.epochs == 90
    assert config.ema == (0.999 if "--ema" in more else 0)
    if "--global-batch" in more:
        assert 16 * config.batch_size * config.gradient_accumulation_steps == 1024


def test_the_batch_that_fills_the_gpu():
    """No multiple of 8 images more fits into 90 %; where the planned ones fill it already, these are the answer."""
    config = dataclasses.replace(JOB.config, engine="torch", gradient_accumulation_steps=2)
    job = with_memory(JOB, 8 * 10**9, config=config)
    filled = filling_batch(job, chosen := evaluate(job, config))
    assert (filled.config.batch_size % 8, filled.config.gradient_accumulation_steps) == (0, 1)
    more = dataclasses.replace(filled.config, batch_size=filled.config.batch_size + 8)
    assert chosen.memory.peak < filled.memory.peak <= 0.9 * 8e9 < evaluate(job, more).memory.peak
    flat = with_memory(JOB, 8 * 10**9, config=dataclasses.replace(config, batch_size=1))
    flat.__dict__["workload"] = dataclasses.replace(JOB.workload, whole_bytes=4 * 10**9)
    peaks = [evaluate(flat, dataclasses.replace(flat.config, batch_size=size)).memory.peak for size in (1, 4)]
    assert peaks[0] == peaks[1], "the start of the process needs the most, whatever the images"
    filled = filling_batch(flat, evaluate(flat, flat.config))
    more = dataclasses.replace(filled.config, batch_size=filled.config.batch_size + 8)
    assert filled.memory.peak <= 0.9 * 8e9 < evaluate(flat, more).memory.peak
    full = with_memory(JOB, int(chosen.memory.peak / 0.95), config=config)
    assert filling_batch(full, chosen) is chosen
    assert describe_filling(full, chosen, chosen).startswith("--batch-size 16 does")


@pytest.mark.parametrize(
    "words", ["--gpu=8gb --epochs=100000", "--gpu-memory=8 --epochs=9999", "--gpu=8.0GB --epochs=1 --images=100"]
)
def test_the_answer_is_written_as_people_do(words, capsys):
    """No power of ten; and the batch that fills the GPU is in it."""
    own = "--model-type=basic_cnn --num-gpus=2 --image-size=32 --engine=torch"
    assert plan(PlanSettings.read(f"{own} {words}".split())) == 0
    text = capsys.readouterr().out
    assert not re.search(r"\de[+-]\d|inf|nan|\b0\.0\b", text)
    told = r"fills a GPU  --batch-size \d+ needs \S+ GB of 8 GB: .* images instead of 32; the learning rate"
    assert re.search(told, text)


@pytest.mark.parametrize(
    ("words", "assumed"),
    [
        ("", "no --data: 1,281,167 images of 1,000 classes at 224 pixels"),
        ("--images=50 --classes=10 --image-size=32", "no --data: 50 images of 10 classes at 32 pixels"),
        ("--data=fake --images=50", ""),
    ],
)
def test_what_is_assumed_without_data_is_what_is_planned_for(words, assumed):
    job, told = job_of(PlanSettings.read(f"--model-type=basic_cnn --gpu=8gb {words}".split()))
    assert told == assumed
    assert job.images == (50 if "--images=50" in words else 1_281_167)


@pytest.mark.parametrize(("model", "sees"), [("timm:test_vit", False), ("basic_cnn", True)])
def test_batchnorm_is_named_where_there_is_one(model, sees):
    words = [f"--model-type={model}", "--gpu=8gb", "--image-size=224", "--engine=torch", "--batch-size=64"]
    job, _ = job_of(PlanSettings.read(words))
    smaller = with_memory(job, evaluate(job, job.config).memory.peak - 1)
    why = reason(smaller, *recommend(smaller))
    assert "--batch-size=32" in why
    assert ("BatchNorm sees 32 at a time" in why) is sees is ("BatchNorm" in why)


def test_offload_says_what_it_takes_of_the_host():
    """Of each of two machines: what the four ranks on it offload."""
    words = ["--model-type=basic_cnn", "--gpu=80gb", "--num-gpus=8", "--gpus-per-node=4", "--image-size=64"]
    job, _ = job_of(PlanSettings.read([*words, "--strategy=fsdp_stage2", "--offload=optimizer"]))
    chosen, rungs = recommend(job)
    assert (host := 4 * chosen.memory.offloaded) > 0
    assert f"and {format_bytes(host)} of each machine's own memory for offloaded state" in reason(job, chosen, rungs)


def test_auto_becomes_what_the_planner_recommends(capfd):
    """16 images of 1,024 pixels do not fit into 12 GB; on CPU ranks nothing is known of this GPU."""
    words = ["vgg", "auto", "2", "16", "5", "--gpu", "rtx3060", "--data=fake", "--image-size=1024"]
    given = read_arguments("launch_distributed.sh", words, {})
    resolved = resolve_strategy(given, nodes=1)
    config = check_training(resolved.training)
    assert resolved.positional["strategy"] == config.strategy == "ddp"
    assert config.batch_size * config.gradient_accumulation_steps == 16
    assert config.batch_size == 8
    assert "strategy auto: ddp" in capfd.readouterr().err
    assert resolve_strategy(resolved, nodes=1) is resolved


def test_gpu_is_for_auto_alone():
    given = read_arguments("launch_distributed.sh", ["vgg", "ddp", "2", "16", "5", "--gpu=h100"], {})
    with pytest.raises(UserError, match="for the strategy auto"):
        resolve_strategy(given, nodes=1)


def test_measure_times_real_steps_of_this_machine(monkeypatch, capsys):
    words = ["--model-type", "basic_cnn", "--image-size", "32", "--batch-size", "4", "--measure"]
    monkeypatch.setattr("zerovision.planning.plan_command.STEPS", 2)
    assert plan(PlanSettings.read([*words, "--json"])) == 0
    step_s = json.loads(capsys.readouterr().out)["measured_step_s"]
    assert 0 < step_s < 60
    assert plan(PlanSettings.read(words)) == 0
    told = r"\nmeasured     \S+ m?s per step of one process on this machine, \S+ images/s\n"
    assert re.search(told, capsys.readouterr().out)
    with pytest.raises(UserError, match="--measure trains on this machine: leave --gpu out"):
        job_of(PlanSettings.read([*words, "--gpu=h100"]))

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("zerovision.planning.plan_command.build_network", fail)
    with pytest.raises(UserError, match=r"4 images in one process ran out .*2\.00 GiB\): use a smaller --batch-size"):
        plan(PlanSettings.read(words))


def test_a_model_that_looks_at_its_images_is_refused(monkeypatch):
    job = dataclasses.replace(JOB, config=TrainConfig(model_type="basic_cnn"))
    job.workload.network.register_forward_pre_hook(lambda _, images: images[0].sum().item())
    with pytest.raises(UserError, match="work depends on its images' values"):
        recommend(job)


RECOMPUTED = "--activation-checkpointing --model-type=timm:test_resnet"


@pytest.mark.parametrize(
    ("words", "engine", "has_gpus"),
    [
        ("--strategy=fsdp_stage3 --replicate-across=nodes --model-type=timm:test_vit", "torch", False),
        (f"--strategy=fsdp_stage2 --gradient-accumulation-steps=3 {RECOMPUTED}", "deepspeed", True),
    ],
)
def test_a_run_predicts_what_the_planner_does(words, engine, has_gpus, monkeypatch):
    """Two machines of four ranks: shards and replicas, blocks, accumulation and checkpointing all count."""
    asked = f"--num-gpus=8 --gpus-per-node=4 {'--gpu=h100' * has_gpus} --precision=bf16 --image-size=64"
    job, _ = job_of(PlanSettings.read(f"{asked} --engine={engine} {words}".split()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    world = World(0, 0, 4, 8, torch.device("cuda" if has_gpus else "cpu"))
    train = SimpleNamespace(sizes=[32, 64])
    data: Any = SimpleNamespace(class_names=["x"] * job.classes, preprocessing=SimpleNamespace(channels=3), train=train)
    tensors = evaluate(job, job.config).memory.tensors  # what is measured on a GPU, without the context
    assert predicted_tensors(Run(config=job.config, world=world, data=data), [job.config]) == [tensors]


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


@pytest.mark.parametrize(
    ("name", "given"),
    [("h100-80gb", ("h100", "H100-80GB")), ("rtx3090", ("RTX 3090", "3090")), ("a100-40gb", ("A100 40GB",))],
)
def test_a_gpu_by_any_usual_spelling(name, given):
    assert all(find_gpu(spelling) is GPUS[name] for spelling in given)


@pytest.mark.parametrize(("given", "gigabytes"), [("8gb", 8), ("16 GB", 16), ("10.5GiB", 10.5), ("96gb", 96)])
def test_any_gpu_by_its_memory(given, gigabytes):
    """With bf16: a V100 has none, and a card of 16 GB that one buys today does."""
    found = find_gpu(given)
    assert found.memory_bytes == gigabytes * 10**9
    assert found.precisions == GPUS["rtx3060"].precisions == ("bf16", "fp16", "fp32")
    assert find_gpu("v100 16gb").precisions == ("fp16", "fp32")
    assert found.name not in GPUS


@pytest.mark.parametrize(("capability", "auto"), [((9, 0), "bf16"), ((7, 5), "fp16")])
def test_this_machines_gpu_whatever_its_name(capability, auto, monkeypatch):
    major, minor = capability
    device = SimpleNamespace(name="NVIDIA Something New", total_memory=85 * 10**9, major=major, minor=minor)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)
    machine = detect_machine(ranks=8)
    assert (machine.gpu.name, machine.gpu.memory_bytes, machine.ranks) == (device.name, 85 * 10**9, 8)
    assert machine.gpu.precisions[0] == auto


def test_a_cpu_rank_has_its_share_of_this_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine = detect_machine(ranks=4)
    assert machine.gpu.memory_bytes == usable_memory() // 4
    assert machine.gpu.precisions == ("fp32",)
    assert machine.gpu.name == CPU
