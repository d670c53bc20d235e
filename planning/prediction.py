"""A run's own prediction: its step time, memory and hours, written into its folder before it has trained a step.

Counting takes some tenths of a second, so a process beside rank 0 does it. It is forked before the run has threads,
gets the run's facts through a pipe, and knows nothing else of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import torch

from planning.ledger import cpu_machine
from planning.machines import machine_of_device
from planning.memory import FLOAT32_BYTES, ModelSizes
from planning.run_workload import Workload
from planning.search import Option, PlannedJob, error_bars, evaluate
from training.checkpoint.atomic_write import write_json
from training.config import TrainConfig
from training.observe.environment import RunFacts
from training.observe.heartbeat import PR_SET_PDEATHSIG
from training.observe.run_folder import PREDICTION

# Of a rank's process on a CPU, fitted to trainings of some models there, see docs/memory.md: code and tables that are
# loaded after the engine's choice (kernels, DeepSpeed itself), by engine, and what the heap grows by in the first steps
# because batches lie between a step's pieces; and of the activations, what the C library keeps of freed memory.
LOADED_LATER_BYTES = {"native": 66_000_000, "torch": 82_000_000, "deepspeed": 156_000_000}
ALLOCATOR_SLACK = 0.17
NICENESS = 5  # of the process beside: what trains goes first


class PredictionProcess:
    """A process that writes `PREDICTION` once it is told what the run is."""

    def __init__(self) -> None:
        """Fork it; the caller has no threads yet."""
        reading, writing = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(writing)
            _serve(reading)
        os.close(reading)
        self._pipe = os.fdopen(writing, "wb")

    def tell(self, facts: RunFacts) -> None:
        """Send the run's facts; returns at once."""
        with contextlib.suppress(OSError), self._pipe:  # no run fails for want of a prediction
            self._pipe.write(json.dumps(dataclasses.asdict(facts)).encode())

    def close(self) -> None:
        """End the process, if it has not ended yet."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


def _serve(reading: int) -> NoReturn:
    """Wait for the facts, write the prediction and exit; a run that ended before it began leaves none."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        with contextlib.suppress(OSError, AttributeError):  # a killed rank leaves no process behind, if prctl is there
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.nice(NICENESS)
        torch.set_num_threads(1)
        with os.fdopen(reading, "rb") as pipe:
            content = pipe.read()
        if content:
            facts = RunFacts(**json.loads(content))
            write_json(Path(facts.folder) / PREDICTION, predict_run(facts))
    finally:
        os._exit(0)  # whatever went wrong: a run may lack a prediction


def predict_run(facts: RunFacts) -> dict[str, Any]:
    """Return the prediction, for JSON: seconds of a step and bytes of a rank by part, hours, and the error bar."""
    job = job_of(facts)
    option = evaluate(job, job.config)
    machine, memory, step = job.machine, option.memory, option.step
    hours = step.step_s * facts.steps / 3600
    process = 0 if facts.gpu_name else _process_bytes(facts, option, job.workload.sizes)
    saving = 0 if facts.gpu_name else _saving_bytes(facts, option, job.workload, hours)
    name = machine.gpu.name
    return {
        "memory_bytes": dataclasses.asdict(memory)
        | {"process": process, "saving": saving, "peak": memory.tensors + process + saving},
        "seconds": dataclasses.asdict(step) | {"step": step.step_s},
        "hours": hours,
        "steps": facts.steps,
        "images_per_step": option.images_per_update,
        "model_type": job.config.model_type,
        "gpu": name,
        "machine": f"{facts.ranks} x {name} ({machine.gpu.source})",
        "error_bars": error_bars(option, name),
    }


def job_of(facts: RunFacts) -> PlannedJob:
    """Return a run as the planner sees it, with the engine and the precision that were resolved."""
    ranks = facts.ranks_per_machine
    machine = machine_of_device(facts.gpu_name, facts.gpu_bytes, ranks) if facts.gpu_name else cpu_machine(ranks)
    config = TrainConfig(**facts.config | {"engine": facts.engine, "precision": facts.precision})
    return PlannedJob(config, machine, facts.ranks, facts.classes, facts.image_size, images=0)


def _process_bytes(facts: RunFacts, option: Option, sizes: ModelSizes) -> int:
    """Return the bytes of a CPU rank's process beside what the plan counts.

    The process as it was before the engine was built, without the model, which the plan counts; what it loads later;
    what its allocator keeps; pages that it shares with other ranks, of which the plan charges it a part and the kernel
    counts all: the weights, and the others' sums of its part of the gradients.
    """
    whole = FLOAT32_BYTES * sizes.parameters
    shared = 2 * whole * (1 - 1 / facts.ranks) if option.engine == "native" else 0
    slack = ALLOCATOR_SLACK * option.memory.activations
    return round(facts.process_bytes - whole - sizes.buffer_bytes + LOADED_LATER_BYTES[option.engine] + slack + shared)


def _saving_bytes(facts: RunFacts, option: Option, workload: Workload, hours: float) -> int:
    """Return the bytes of rank 0's process that saving adds to the peak.

    A checkpoint is written from a copy of the rank's part of the state, which stays, and the best weights from a whole
    one, both while the next epoch begins. After the last epoch the activations are gone, except what malloc keeps: the
    weights find room there, the copy of the state has pages of its own.
    """
    config, memory, sizes = option.config, option.memory, workload.sizes
    state = FLOAT32_BYTES * sizes.trained * (1 + workload.optimizer_values) / facts.ranks + sizes.buffer_bytes
    weights = FLOAT32_BYTES * sizes.parameters + sizes.buffer_bytes
    if config.epochs > 1:
        return round(state + weights)
    is_saved_between = 0 < config.save_every_steps < facts.steps or 0 < config.save_every_minutes < 60 * hours
    at_the_end = memory.held + max(memory.heap, weights) + state - memory.tensors
    return round(max(at_the_end, state if is_saved_between else 0, 0))
