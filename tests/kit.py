"""What several files of tests share: a rank alone, small files, trainings in this process, and comparisons.

A processor chooses the order in which a kernel adds, and so the last bits of a sum. What they are off by grows with the
numbers that were added. So a tolerance of floats that were computed in two ways is a share of the largest number that
is compared: not absolute, which is strict for large numbers and blind for small ones, and not a share of each element,
of which some are all but cancelled out.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from zerovision.models import ImageSize
from zerovision.models.build import BuiltModel, build_model
from zerovision.training.base.points import RunLogger, StepPoint
from zerovision.training.checkpoint.weights import save_weights
from zerovision.training.config import TrainConfig
from zerovision.training.world.world import World

ROOT = Path(__file__).resolve().parents[1]
ALONE = World(0, 0, 1, 1, torch.device("cpu"))
QUIET = {"progress": "off", "report": False, "tensorboard": False}
ROUNDING = 1e-5  # of fp32, whose unit is 6e-8: sums of some hundred terms, and a few layers or steps of them
ELEMENTWISE = 1e-6  # a few operations with each number, without a sum
COUNT = "num_batches_tracked"  # BatchNorm's, beside its averages


def png(colour: str | tuple[int, int, int] = "red", size: tuple[int, int] = (8, 8)) -> bytes:
    """Return a PNG of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


def new_model(
    model_type: str,
    num_classes: int,
    image_size: ImageSize,
    image_channels: int = 3,
    *,
    loads_weights: bool = True,
    class_names: Sequence[str] = (),
    **settings: Any,
) -> BuiltModel:
    """Build a network as a run with these settings does."""
    config = dataclasses.replace(TrainConfig(model_type=model_type, batch_size=2), **settings)
    return build_model(
        config, num_classes, image_size, image_channels, loads_weights=loads_weights, class_names=class_names
    )


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Return when the condition holds; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def train(logs: Path, name: str = "run", *given: Any, code: int = 0, **settings: Any) -> Path:
    """Train basic_cnn in this process, which ends with that code; return the run's folder.

    Args:
        logs: with the runs.
        name: of the run.
        given: to `zerovision.training.run.run` beside the configuration.
        code: that is expected.
        settings: of the configuration.
    """
    from zerovision.training.run import run

    place = {"model_type": "basic_cnn", "epochs": 1, "log_dir": str(logs), "run_name": name}
    assert run(TrainConfig(**(QUIET | place | settings)), *given) == code
    return logs / "runs" / name


def call(command: str, *words: object, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a user's command on words, in this process, as one of no launcher's ranks.

    Returns:
        The exit code, and what is on standard output and standard error.
    """
    from zerovision.commands import run_command
    from zerovision.training.world.launchers import launched_world

    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in range(2))
    typed = {"argv": [f"{command}.py", *map(str, words)], "stdin": io.TextIOWrapper(io.BytesIO(stdin))}
    with (
        mock.patch.multiple(sys, **typed),
        mock.patch.dict(os.environ),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            os.environ.pop(variable, None)
        assert launched_world()[3] == 1
        code = run_command(command)
    return code, output.buffer.getvalue().decode(), errors.buffer.getvalue().decode()


def save_built(path: Path, built: BuiltModel, **facts: Any) -> None:
    """Save the weights of a built model as a run does, with its description and the facts that `save_weights` takes."""
    save_weights(path, built.module.state_dict(), description=built.description, **facts)


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check tensors by name, for their bits and dtypes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


class Recorder(RunLogger):
    """Keeps messages, events as (kind, values), and logging points."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.points: list[StepPoint] = []

    def message(self, message: str) -> None:
        self.messages.append(message)

    def event(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append((kind, values))

    def steps(self, point: StepPoint) -> None:
        self.points.append(point)


def share_apart(found: Any, expected: Any) -> float:
    """Return the largest difference as a share of the largest number that is expected.

    Where that is 0, it is the difference itself.

    Args:
        found: a tensor, an array, a nested list or a number, or a mapping of these: all tensors of a network, which
            come of one computation, so that some, such as the bias before a norm, may be rounding alone.
        expected: of the same shape, or the same names and shapes.
    """
    if not isinstance(expected, Mapping):
        found, expected = {"": found}, {"": expected}
    assert found.keys() == expected.keys()
    pairs = {name: (_numbers(found[name]), _numbers(values)) for name, values in expected.items()}
    assert all(ours.shape == theirs.shape for ours, theirs in pairs.values())
    apart = _largest(torch.tensor([_largest(ours - theirs) for ours, theirs in pairs.values()]))
    scale = max(_largest(theirs) for name, (_, theirs) in pairs.items() if not name.endswith(COUNT))
    return apart / (scale or 1.0) if apart else 0.0


def assert_same_but_rounding(found: Any, expected: Any, bound: float = ROUNDING, msg: str = "") -> None:
    """Check `share_apart` against a bound; NaN is apart from everything. A mapping of mappings is checked by key."""
    if isinstance(expected, Mapping) and any(isinstance(values, Mapping) for values in expected.values()):
        assert found.keys() == expected.keys(), msg
        for name, values in expected.items():
            assert_same_but_rounding(found[name], values, bound, f"{msg} {name}")
        return
    apart = share_apart(found, expected)
    assert apart <= bound, f"{msg}: apart by {apart:.1e} of the largest value, more than {bound:.1e}"


def _numbers(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64).detach().cpu()


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def write_tar(file: Path, members: Mapping[str, bytes] | Sequence[tuple[str, bytes]], **options: Any) -> Path:
    """Write a tar file with these members; `options` are tarfile's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", **options) as tar:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def write_parquet(file: Path, columns: Mapping[str, Sequence[Any]], names: Sequence[str] = ()) -> Path:
    """Write a Parquet file with these columns, in row groups of four; names make the column label a ClassLabel."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    feature = {"names": [*names], "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})} if names else None
    parquet.write_table(pyarrow.table(dict(columns)).replace_schema_metadata(metadata), file, row_group_size=4)
    return file
