"""`--batch-size auto` in one process: the search, the limits that it obeys, and a run as if given the number."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import shutil

import pytest
import torch

from tests.kit import train
from tests.unit.launching import WORDS
from zerovision.delivery.trained_model import read_run_config
from zerovision.launch.arguments import check_training, read_arguments
from zerovision.launch.plan import resolve_strategy
from zerovision.planning.machines import Machine, find_gpu
from zerovision.planning.search import PlannedJob, evaluate, with_planned_batch
from zerovision.training import auto_batch_size
from zerovision.training.auto_batch_size import Trial, largest_that_fits
from zerovision.training.base.errors import OUT_OF_MEMORY_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError
from zerovision.training.base.run_folder import BATCH_SIZE
from zerovision.training.config import FIELDS, TrainConfig
from zerovision.training.config.global_batch import few_steps_note, micro_batches, usual_global_batch
from zerovision.training.data import load_data
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.observe.device_use import FILL, memory_room
from zerovision.training.steps.carrier import Start

CPU = torch.device("cpu")


# The search.


@pytest.mark.parametrize("largest", range(-1, 6))
@pytest.mark.parametrize("factor", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("raises", [False, True])
def test_the_largest_that_fits_is_found_whatever_the_planner_thinks(largest, factor, raises):
    """Of six sizes, each of which takes 100 bytes more; a planner that expects too much may stop too early."""
    limit = (100 * largest + 150) / FILL
    tried = []

    def measure(place):
        tried.append(place)
        peak = 100 * place + 100
        too_much = raises and peak > FILL * limit
        return Trial(too_much, 50 if too_much else peak, int(limit))

    best = largest_that_fits([int(1000 + factor * 100 * place) for place in range(6)], measure)
    assert len(tried) == len(set(tried)), "no size is tried twice"
    if factor <= 1:
        assert best == (None if largest < 0 else largest)
    else:
        assert (best is None) == (largest < 0)
        assert best is None or best <= largest
    if factor == 1:
        assert tried == ([0] if largest <= 0 else [0, largest])


@pytest.mark.parametrize(
    ("global_batch", "ranks"), [(256, 1), (256, 2), (3072, 8), (120, 3), (8, 1), (65_536 * 4096, 1)]
)
def test_micro_batches_are_the_multiples_of_8_that_divide_a_share(global_batch, ranks):
    share = global_batch // ranks
    sizes = micro_batches(global_batch, ranks)
    most = min(share, 65_536)
    assert sizes == [size for size in range(8, most + 1, 8) if share % size == 0 and share // size <= 4096]
    assert micro_batches(256, 2, most=40) == [8, 16, 32]


def test_the_usual_global_batch_is_near_256_on_any_number_of_ranks():
    for ranks in (*range(1, 40), 1024):
        images = usual_global_batch(ranks)
        assert images % (8 * ranks) == 0
        assert abs(images - 256) <= 4 * ranks or images == 8 * ranks
        assert micro_batches(images, ranks)


@pytest.mark.parametrize("images", [1, 100, 421, 1437, 5000, 5121, 10**6])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 16])
def test_an_epoch_keeps_20_steps_or_the_line_says_what_to_type(images, ranks):
    batch = usual_global_batch(ranks, images)
    steps = math.ceil(images / batch)
    assert micro_batches(batch, ranks)
    if images > 20 * 300:
        assert batch == usual_global_batch(ranks)
    if steps < 20:  # not even with 8 images for each rank
        assert batch == 8 * ranks
        cure = "fewer ranks, or a --batch-size below 8, raise that"
        assert few_steps_note(batch, ranks, images) == f"; an epoch has only {steps} updates: {cure}"
        return
    assert few_steps_note(batch, ranks, images) == ""
    if images < 5000:  # a batch that somebody gave
        told = few_steps_note(256 * ranks, ranks, images)
        assert told.endswith(f": --global-batch {batch} raises that to {steps}")


# What may be taken.


def made_machine(root, files):
    status = "VmHWM:  9 kB\nVmRSS:  1000 kB\nVmData:  400 kB\nVmSize:  700 kB\n"
    for name, text in {"proc/self/status": status, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory/job"
CACHED = "anon 5\ninactive_file 1024000\n"


@pytest.mark.parametrize(
    ("group", "folder", "files", "kib"),
    [
        ("", "", {}, 8000),  # of the machine
        ("0::/job\n", NEW + "/job", {"max": "max\n", "current": "1\n"}, 8000),
        ("0::/job\n", NEW + "/job", {"max": "3072000\n", "current": "1024000\n"}, 2000),
        ("0::/job\n", NEW + "/job", {"max": "3072000\n", "current": "2048000\n", "stat": CACHED}, 2000),
        ("0::/a/job\n", NEW + "/a", {"max": "2048000\n", "current": "1024000\n"}, 1000),
        ("4:memory:/job\n0::/\n", OLD, {"limit_in_bytes": "2048000\n", "usage_in_bytes": "1024000\n"}, 1000),
    ],
)
def test_ranks_divide_what_machine_and_control_groups_have_left(group, folder, files, kib, tmp_path):
    machine = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", "proc/self/cgroup": group}
    root = made_machine(tmp_path, machine | {f"{folder}/memory.{name}": text for name, text in files.items()})
    assert memory_room(CPU, 1, root) == 1024 * kib
    assert memory_room(CPU, 4, root) == 1024 * (kib // 4)


def test_a_limit_of_the_process_counts_too(tmp_path, monkeypatch):
    root = made_machine(tmp_path, {"proc/meminfo": "MemAvailable: 8000 kB\n", "proc/self/cgroup": ""})
    limits = {resource.RLIMIT_DATA: 900 * 1024, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    assert memory_room(CPU, 1, root) == 1024 * 500
    limits[resource.RLIMIT_AS] = 800 * 1024
    assert memory_room(CPU, 1, root) == 1024 * 100


# A run.


SMALL = {"data": "fake", "image_size": 8, "batch_size": "auto"}


def batch_of(folder):
    """Return the batch size and the accumulation steps of a run."""
    config = read_run_config(folder)
    return config.batch_size, config.gradient_accumulation_steps


@pytest.fixture
def short_of_memory(monkeypatch):
    """Let more than 16 images at a time be too many for PyTorch's engine's forward."""
    forward = TorchEngine.forward

    def fail(engine, images):
        if engine.module.training and len(images) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(engine, images)

    monkeypatch.setattr(TorchEngine, "forward", fail)


def test_a_run_trains_as_with_the_number_and_keeps_it(few_images, short_of_memory, tmp_path, monkeypatch, capsys):
    loaded: list = []
    monkeypatch.setattr(
        "zerovision.training.setup.load_data", lambda options: loaded.append(options) or load_data(options)
    )
    given = SMALL | {"global_batch": 64, "ema": 0.9}
    auto = train(tmp_path, "auto", **given)
    assert len(loaded) == 1, "the trials have the run's data"
    assert batch_of(auto) == (16, 4)
    result = json.loads((auto / BATCH_SIZE).read_text())
    assert [tried["batch_size"] for tried in result["tried"]] == [8, 64, 32, 16]
    assert (result["batch_size"], result["global_batch"], result["ranks"]) == (16, 64, 1)
    line = next(line for line in capsys.readouterr().out.splitlines() if "--batch-size auto is" in line)
    assert "16 per CPU rank (planned 64; 8: fits with" in line
    assert "64: out of memory, 32: out of memory, 16: fits with" in line
    few = "; an epoch has only 2 updates: --global-batch 8 raises that to 16"
    assert line.endswith(f"x 1 CPU rank x 4 accumulation steps = global batch 64{few}")
    assert not (auto / auto_batch_size.TRIAL_FOLDER).exists()

    number = {"batch_size": 16, "gradient_accumulation_steps": 4, "global_batch": 0}
    typed = train(tmp_path, "typed", **given | number)
    for name in ("model.safetensors", "checkpoints/step-00001-0000000/shard-00000.safetensors"):
        assert (auto / name).read_bytes() == (typed / name).read_bytes(), name

    monkeypatch.setattr("zerovision.training.auto_batch_size._try", None)  # a resume tries nothing
    train(tmp_path, "auto", **SMALL, ema=0.9, epochs=2, resume="auto")
    assert batch_of(auto) == (16, 4)
    shutil.rmtree(auto / "checkpoints")  # as if it had been stopped before the first one
    train(tmp_path, "auto", **given, resume="auto")
    assert batch_of(auto) == (16, 4)
    shutil.rmtree(auto / "checkpoints")
    monkeypatch.setattr("zerovision.training.auto_batch_size._search", lambda *_: (8, "searched again"))
    train(tmp_path, "auto", **given | {"ema": 0.0}, resume="auto")
    assert batch_of(auto)[0] == 8, "what was found with other settings does not hold"


def needs_all(monkeypatch, planned):
    """Let training take as much as there is, and the planner expect these bytes by activation checkpointing."""
    monkeypatch.setattr(auto_batch_size, "memory_room", lambda *_: 1000)
    monkeypatch.setattr(auto_batch_size, "used_memory", lambda *_: 500)
    monkeypatch.setattr(auto_batch_size, "peak_memory", lambda *_: 1500)
    return Start(plan_memory=lambda _, configs: [planned[one.activation_checkpointing] for one in configs])


def test_a_model_that_does_not_fit_is_refused_with_what_does(few_images, tmp_path, monkeypatch, capsys):
    given = SMALL | {"global_batch": 16}
    start = needs_all(monkeypatch, {False: 800, True: 600})
    train(tmp_path, "refused", start, code=USER_ERROR_EXIT_CODE, **given)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --batch-size auto: basic_cnn with 8 images takes ")
    assert line.endswith("Expected to fit: --activation-checkpointing=true.")
    start = needs_all(monkeypatch, {False: 800, True: 790})
    train(tmp_path, "nothing", start, code=USER_ERROR_EXIT_CODE, **given)
    assert "No setting saves enough memory: use a smaller --image-size or model" in capsys.readouterr().err
    train(tmp_path, "adapted", start, code=OUT_OF_MEMORY_EXIT_CODE, **given, on_oom="adapt")


# Mistakes, launchers and the planner.


@pytest.mark.parametrize(
    ("global_batch", "ranks", "told"),
    [
        (100, 8, "8 ranks cannot share a global batch of 100 in multiples of 8 images: use --global-batch 64 or 128."),
        (4, 1, "use --global-batch 8."),
        (12, 1, "use --global-batch 8 or 16."),
        (8 * 65_537, 1, "more than 4096 accumulation steps: use --global-batch 524288 or 528384."),
    ],
)
def test_a_global_batch_without_a_micro_batch_is_refused_with_the_nearest(global_batch, ranks, told):
    with pytest.raises(UserError) as caught:
        micro_batches(global_batch, ranks)
    assert str(caught.value).endswith(told)
    nearest = int(told.rstrip(".").split()[-1])
    assert micro_batches(nearest, ranks)


@pytest.mark.parametrize("script", WORDS)
def test_every_launcher_takes_auto_as_the_batch_size(script):
    words = ["auto" if word == "16" else word for word in WORDS[script]]
    given = read_arguments(script, [*words, "--global-batch", "512"], {})
    config = check_training(given.training)
    assert (config.batch_size, config.global_batch) == ("auto", 512)


@pytest.mark.slow
def test_an_automatic_strategy_leaves_an_automatic_batch_size_to_the_ranks(capfd):
    words = ["basic_cnn", "auto", "2", "auto", "5", "--gpu", "rtx3060", "--data=fake"]
    given = resolve_strategy(read_arguments("launch_distributed.sh", words, {}), nodes=1)
    assert given.positional["strategy"] == "ddp"
    assert given.positional["batch_size"] == "auto"
    assert given.flags == ["--data=fake"]
    assert "strategy auto: ddp" in capfd.readouterr().err


def test_the_planner_takes_the_largest_that_is_predicted_to_fit():
    config = TrainConfig(model_type="basic_cnn", batch_size="auto", global_batch=8 * 1024, engine="deepspeed")
    job = PlannedJob(config, Machine(find_gpu("rtx3060"), 8), 8, 1000, 224, 1_281_167)
    job.__dict__["workload"] = job.workload
    planned = with_planned_batch(job).config
    assert planned.micro_batch * planned.gradient_accumulation_steps == 1024
    most = FILL * job.machine.gpu.memory_bytes

    def peak(size):
        option = dataclasses.replace(config, batch_size=size, gradient_accumulation_steps=1024 // size)
        return evaluate(job, option).memory.peak

    sizes = micro_batches(8 * 1024, 8)
    assert planned.micro_batch == max(size for size in sizes if peak(size) <= most)
    assert planned.micro_batch < sizes[-1], "else nothing was chosen"
    assert planned.global_batch == FIELDS["global_batch"].default
