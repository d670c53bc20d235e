"""The benchmarks' own arithmetic, and that the one for a GPU runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import compare
from benchmarks.gpu.roofline import Peak, StepCosts, step_costs
from benchmarks.jpegs import make_folder
from benchmarks.peers.job import Job
from benchmarks.peers.ours import spoil_cache
from models.build import build_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "benchmarks/gpu/run.py", "--device", "cpu", "--quick"]
    environment = os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--models", "basic_cnn"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "skipped" in (tmp_path / "gpu_tests.log").read_text(), "the GPU's tests were collected"
    (table,) = (path.read_text() for path in tmp_path.glob("basic_cnn_*.md"))
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    contestants = ["ours (ddp)", "ours (ddp, --engine native)", "plain PyTorch loop", "timm's loop"]
    assert [row[0].strip() for row in rows] == ["contestant", *contestants]
    assert all(float(row[1]) > 0 for row in rows[1:])


def test_a_step_has_three_times_the_forwards_flops():
    """A layer's two gradients cost its forward each, also where it has groups; the images need no gradient."""
    size, batch_size = 32, 2
    module = build_model("mobilenet", num_classes=10, image_size=size).module.to("meta")
    first_conv = {}
    module.conv_stem.register_forward_hook(lambda layer, _, output: first_conv.update(numel=output.numel()))
    with FlopCounterMode(display=False) as counter:
        module(torch.empty(batch_size, 3, size, size, device="meta"))
    first = 2 * 3 * 3 * 3 * first_conv["numel"]
    assert step_costs("mobilenet", batch_size, size, 10).flops == 3 * counter.get_total_flops() - first


def test_the_roofline_takes_the_slower_of_computing_and_moving():
    peak = Peak(flops_per_second=100.0, bytes_per_second=10.0, source="made up")
    assert StepCosts(flops=600, operators=((500, 10), (100, 30))).least_seconds(peak) == 5.0 + 3.0


def test_the_files_are_the_same_every_time(tmp_path):
    first, second = (make_folder(tmp_path / name, images=20, pixels=64) for name in ("a", "b"))
    files = sorted(path.relative_to(first) for path in first.rglob("*.jpg"))
    assert len([path for path in files if path.parts[0] == "train"]) == 20
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)


def test_a_spoiled_file_still_decodes(tmp_path):
    folder = make_folder(tmp_path, images=10, pixels=64)
    path = min((folder / "val").rglob("*.jpg"))
    with Image.open(path) as image:
        before = image.tobytes()
    sizes = set()
    for _ in range(4):
        spoil_cache(folder)
        sizes.add(path.stat().st_size)
    assert len(sizes) > 1
    with Image.open(path) as image:
        assert image.tobytes() == before


def test_the_comparison_shows_the_loop_tuned_by_hand_and_exact_decoding(monkeypatch):
    plan = compare.Plan(ranks=2, images=100, epochs=2, rounds=2, step_rounds=1, minutes=1, our_flags=("--seed", "1"))
    workers = {"bare DDP": 0, "bare DDP tuned": 1, "Lightning": 0}
    seconds = {"bare DDP": 4.0, "bare DDP tuned": 2.0, "Lightning": 5.0, "ddp": 1.0, "ddp, --decode exact": 2.5}
    rounds = [{name: [2 * took, took] for name, took in (dict.fromkeys(compare.OURS, 1.0) | seconds).items()}] * 2
    section = compare.files_section(rounds, workers, plan)
    rows = {row[0]: dict(zip(section.columns, row, strict=True)) for row in section.rows}
    expected = {"bare DDP": "0.50", "bare DDP tuned": "1.00", "Lightning": "0.40", "ddp": "2.00"}
    expected |= {"ddp, --decode exact": "0.80", "fsdp_stage2": "2.00", "fsdp_stage3": "2.00"}
    assert {name: row["later / DDP tuned by hand"].split()[0] for name, row in rows.items()} == expected
    assert {name: row["all epochs / DDP tuned by hand"].split()[0] for name, row in rows.items()} == expected
    assert rows["ddp"]["later / fastest peer (Lightning)"].startswith("5.00 ")
    assert "run the same code" in section.text
    assert "shrinks a JPEG" in section.text
    trained = []
    monkeypatch.setattr(compare.ours, "epoch_seconds", lambda job, ranks, logs, flags: trained.append((job, flags)))
    for name in compare.OURS:
        compare.our_seconds(Job(variant=name), plan)
    assert [(job.variant, flags) for job, flags in trained] == [
        *((strategy, ("--seed", "1")) for strategy in ("ddp", "fsdp_stage2", "fsdp_stage3")),
        ("ddp", ("--seed", "1", "--decode", "exact")),
    ]
