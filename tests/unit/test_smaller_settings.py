"""What follows a shortage of memory: the ladder of smaller settings, and the launch that goes down it."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch

from zerovision.launch import node_run
from zerovision.launch.node_launcher import NodeLauncher
from zerovision.launch.node_run import Ending
from zerovision.launch.process_tree import HeartbeatFolder, LaunchProcesses
from zerovision.launch.rank_monitor import Death
from zerovision.launch.restart_policy import RestartPolicy, Started, start_until_done
from zerovision.training.base.control_groups import oom_kills
from zerovision.training.base.errors import OUT_OF_MEMORY_EXIT_CODE
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.out_of_memory import advise, is_out_of_memory, next_rung

GPUS, CPUS = {"has_gpus": True}, {"has_gpus": False}
TO_8 = "--batch-size=8 --gradient-accumulation-steps=2"
RECOMPUTE = "--activation-checkpointing=true"
BELOW_8 = [f"--batch-size={size} --gradient-accumulation-steps={16 // size}" for size in (4, 2, 1)]
ALL_OFFLOAD = "--strategy=fsdp_stage3 --offload=all"


def way_down(ranks: int, where: dict[str, bool], **settings: object) -> list[str]:
    """Return the flags of all rungs from a configuration on, each checked as the command line is."""
    config, flags = TrainConfig(**settings), []
    while rung := next_rung(config, ranks, **where):
        config = check_config(dataclasses.replace(config, **rung.changes), FLAG_OF)
        flags.append(" ".join(rung.flags))
        assert rung.cost
    return flags


@pytest.mark.parametrize(
    ("ranks", "where", "settings", "middle"),
    [
        (
            *(8, GPUS, {}),
            [
                *("--strategy=fsdp_stage2", "--strategy=fsdp_stage3"),
                *("--strategy=fsdp_stage3 --offload=optimizer", ALL_OFFLOAD),
            ],
        ),
        (1, GPUS, {}, ["--strategy=fsdp_stage2 --offload=optimizer", ALL_OFFLOAD]),
        # At stage 3 the torch engine offloads all or nothing.
        (8, GPUS, {"engine": "torch"}, ["--strategy=fsdp_stage2", "--strategy=fsdp_stage3", ALL_OFFLOAD]),
        (2, CPUS, {}, []),
        (2, CPUS, {"engine": "deepspeed"}, ["--strategy=fsdp_stage2", "--strategy=fsdp_stage3"]),
        (8, GPUS, {"deepspeed_config": "own.json"}, []),
        # A rule that needs whole parameters, which only ddp has.
        (8, GPUS, {"optimizer": "lars"}, []),
    ],
)
def test_the_rungs_from_the_first_to_the_last(ranks, where, settings, middle):
    assert way_down(ranks, where, **settings) == [TO_8, RECOMPUTE, *middle, *BELOW_8]


def test_every_rung_keeps_the_global_batch():
    config = TrainConfig(batch_size=96, gradient_accumulation_steps=3)
    while rung := next_rung(config, 4, **GPUS):
        config = dataclasses.replace(config, **rung.changes)
        assert config.batch_size * config.gradient_accumulation_steps == 96 * 3
        assert config.learning_rate == TrainConfig().learning_rate
    assert config.batch_size == 3
    assert advise(config, 4, **GPUS).startswith("no setting is left")


@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
def test_images_that_are_mixed_stay_pairs(mixing):
    config = TrainConfig(batch_size=2, activation_checkpointing=True, **{mixing: 1.0})
    assert next_rung(config, 1, **CPUS) is None
    assert next_rung(dataclasses.replace(config, **{mixing: 0.0}), 1, **CPUS).changes["batch_size"] == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a convolution forward propagation"), False),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_so(error, expected):
    assert is_out_of_memory(error) is expected


def launched(endings: list[int], *flags: str, allowed: int = 1) -> tuple[Started, list[list[str]]]:
    """Launch something whose starts end with these codes, and save nothing; return how, and each start's flags."""
    starts: list[list[str]] = []

    def start(restart: int, resuming: list[str]) -> Started:
        assert restart == len(starts)
        starts.append(resuming)
        code = endings[restart]
        ending = Ending(code, f"start {restart}", is_final=code in (0, OUT_OF_MEMORY_EXIT_CODE))
        return Started(ending, "run-7", -1, has_gpus=False)

    training = ["--model-type=mobilenet", "--batch-size", "16", *flags]
    return start_until_done(start, RestartPolicy(allowed), training, 2, []), starts


def test_adapt_goes_down_one_rung_for_each_shortage(capsys):
    outcome, starts = launched([71, 1, 71, 0], "--on-oom", "adapt")
    assert outcome.ending.code == 0
    name, first = "--run-name=run-7", TO_8.split()
    assert starts == [[], [*first, name], [*first, name], [*first, RECOMPUTE, name]]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"start 0: starting again with {TO_8}: half the activations")
    assert lines[1] == "start 1: restart 1 of 1"
    assert "about a third more time" in lines[2]


def test_adapt_ends_when_nothing_is_left(capsys):
    outcome, starts = launched([71] * 9, "--on-oom", "adapt")
    assert (outcome.ending.code, len(starts)) == (71, 1 + len(way_down(2, CPUS)))
    assert "no setting is left that would save memory" in capsys.readouterr().err.splitlines()[-1]


def test_stop_ends_at_once_with_the_advice(capsys):
    outcome, starts = launched([71, 0])
    assert (outcome.ending.code, starts) == (71, [[]])
    assert capsys.readouterr().err.startswith(f"start 0; next to try: {TO_8}: ")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/memory.events": "oom 2\noom_kill 1\noom_group_kill 0\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/memory.events": "oom_kill 3\n"}, 3),
        ("0::/outside\n", {"sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        ("5:cpu:/\n4:memory:/job\n", {"sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5),
        ("0::/job\n", {"proc/vmstat": "nr_free_pages 7\noom_kill 6\n"}, 6),
        ("0::/job\n", {}, 0),
    ],
)
def test_the_kernels_kills_are_counted(groups, files, expected, tmp_path):
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == expected
    assert oom_kills(tmp_path / "nowhere") == 0


KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("rank_code", "launcher_code", "code"),
    [
        (KILLED, 128 + signal.SIGKILL, 137),
        (None, KILLED, 137),  # the starter of the ranks
        (1, 1, 1),  # a rank whose worker was killed
        (2, 2, 2),  # a mistake stays one
    ],
)
@pytest.mark.parametrize("kills", [2, 3])
def test_any_process_that_the_kernel_kills_counts(kills, rank_code, launcher_code, code, monkeypatch, tmp_path):
    """Beside one that somebody kills."""
    monkeypatch.setattr(node_run, "oom_kills", lambda: kills)
    run = node_run.NodeRun(LaunchProcesses(), NodeLauncher(), HeartbeatFolder(tmp_path), [], 5.0)
    run._oom_kills = 2
    if rank_code is not None:
        run._cause = Death(1, "node01, pid 7", rank_code, noted=False, seconds=0.0)
    ending = run._ending(launcher_code, was_asked=False)
    is_short = kills > 2 and code != 2
    assert ending.code == (OUT_OF_MEMORY_EXIT_CODE if is_short else code)
    assert ending.is_final == (is_short or code == 2)
    assert ("memory ran out" in ending.reason) is is_short
    run._kernel_killed -= 2 * node_run.KERNEL_KILL_SECONDS  # long before
    assert run._ending(launcher_code, was_asked=False).code == code
    assert run._ending(launcher_code, was_asked=True).code == code
