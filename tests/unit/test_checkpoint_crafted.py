"""Crafted checkpoints, with hashes that hold: nothing is executed, nothing hangs, and each gets one line."""

from __future__ import annotations

import json
import math
import os
import pickle
import tracemalloc

import pytest
import torch
from small_checkpoints import (
    ALONE,
    MOMENTS,
    PretendedRank,
    forge_manifest,
    forge_shard,
    trust_shard,
    write_checkpoint,
)

from zerovision.training.base.errors import UserError
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST_FILE, MOST_SHARDS, shard_name
from zerovision.training.checkpoint.shards import Snapshot
from zerovision.training.checkpoint.store import TrainState, choose, restore
from zerovision.training.tasks.scores import ScoreSums

LINE_LENGTH = 1500
PROGRESS = Progress(epoch=1, step=2)
pytestmark = [
    pytest.mark.timeout(60),  # a reader that waits for a pipe fails instead of hanging
    pytest.mark.usefixtures("no_sync"),
]


def refusal(path):
    """Return the one line that `choose` has for a checkpoint which it does not take."""
    found, refused = choose([path], ALONE)
    assert found is None, "the crafted checkpoint was taken"
    (line,) = refused.values()
    assert_one_line(line)
    return line


def assert_one_line(line):
    assert line.isprintable()
    assert len(line) < LINE_LENGTH


def assert_not_filled(path):
    """Assert that a checkpoint whose hashes hold is refused in one line when it is read, before the engine changes."""
    found, refused = choose([path], ALONE)
    assert found is not None, refused
    engine = PretendedRank(seed=5)
    before, running_mean = engine.weights, engine.module.norm_mean.clone()
    with pytest.raises(UserError) as caught:
        restore(found, TrainState(engine, ScoreSums(2, ALONE.device), Progress()), ALONE)
    assert_one_line(str(caught.value))
    assert engine.weights is before
    assert torch.equal(engine.module.norm_mean, running_mean)
    return str(caught.value)


class Exploit:
    """Runs a shell command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


EXECUTED_BY = {
    "pickle 0": lambda exploit, path: path.write_bytes(pickle.dumps(exploit, protocol=0)),
    "pickle 5": lambda exploit, path: path.write_bytes(pickle.dumps(exploit, protocol=5)),
    "torch": lambda exploit, path: torch.save({"weights/scale@": exploit}, path),
}


@pytest.mark.parametrize("write", EXECUTED_BY)
def test_what_unpickling_would_execute_is_not_executed(tmp_path, write):
    marker, path = tmp_path / "executed", write_checkpoint(tmp_path / "c", PROGRESS)
    EXECUTED_BY[write](Exploit(marker), path / shard_name(1))
    trust_shard(path, 1)
    assert_not_filled(path)
    EXECUTED_BY[write](Exploit(marker), path / MANIFEST_FILE)
    refusal(path)
    assert not marker.exists()


# Files that are no files.


@pytest.mark.parametrize("name", [shard_name(0), MANIFEST_FILE])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "dangling"])
def test_files_that_are_no_files(tmp_path, name, kind):
    path = write_checkpoint(tmp_path, PROGRESS)
    (path / name).unlink()
    {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "device": lambda at: os.symlink("/dev/zero", at),
        "loop": lambda at: os.symlink(at, at),
        "dangling": lambda at: os.symlink("nothing", at),
    }[kind](path / name)
    if name != MANIFEST_FILE:  # the size of a pipe and of a device
        forge_manifest(path, lambda content: content["shards"][0].update(bytes=0))
    assert name in refusal(path)


def test_a_link_to_a_file_counts_by_its_content(tmp_path):
    path = write_checkpoint(tmp_path, PROGRESS)
    shard = path / shard_name(0)
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert choose([path], ALONE)[0] is not None
    shard.unlink()
    shard.symlink_to("/etc/passwd")
    assert shard.name in refusal(path)


# The manifest.

DEEP = json.loads("[" * 200 + "]" * 200)
MANIFESTS = {
    "too many shards": lambda c: c.update(shards=[{"bytes": 1, "sha256": "0"}] * (MOST_SHARDS + 1)),
    "no shards": lambda c: c.update(shards=[]),
    "ranks as text": lambda c: c.update(data_ranks="2"),
    "shards as a dict": lambda c: c.update(shards={"bytes": 1, "sha256": "0"}),
    "shards as text": lambda c: c.update(shards="../../x"),
    "shards as a number": lambda c: c.update(shards=2),
    "a shard as text": lambda c: c.update(shards=["../../x"]),
    "more shards than files": lambda c: c["shards"].append(c["shards"][0]),
    "huge size": lambda c: c["shards"][0].update(bytes=10**30),
    "large size": lambda c: c["shards"][0].update(bytes=10**15),
    "negative size": lambda c: c["shards"][0].update(bytes=-1),
    "infinite size": lambda c: c["shards"][0].update(bytes=math.inf),
    "size as text": lambda c: c["shards"][0].update(bytes="1"),
    "another hash": lambda c: c["shards"][0].update(sha256="0" * 64),
    "hash with line breaks": lambda c: c["shards"][0].update(sha256="\n\x1b[31m\ud800"),
    "hash as a list": lambda c: c["shards"][0].update(sha256=DEEP),
    "negative shape": lambda c: c["parameters"].update({"stem.bias": [-5]}),
    "infinite shape": lambda c: c["parameters"].update({"stem.bias": [math.inf]}),
    "shape of nan": lambda c: c["parameters"].update({"stem.bias": [math.nan]}),
    "shape of fractions": lambda c: c["parameters"].update({"stem.bias": [5.0]}),
    "shape beyond 64 bits": lambda c: c["parameters"].update({"stem.bias": [10**30]}),
    "shape as text": lambda c: c["parameters"].update({"stem.bias": "5"}),
    "shape with strange name": lambda c: c["parameters"].update({"\n\x1b[2J\ud800": [-1]}),
    "parameters as a list": lambda c: c.update(parameters=[]),
    "progress as a list": lambda c: c.update(progress=[1, 2]),
    "progress of nan": lambda c: c["progress"].update(best_score=math.nan),
    "progress of infinity": lambda c: c["progress"].update(best_score=math.inf),
    "progress above 100 %": lambda c: c["progress"].update(best_score=10**400),
    "epoch of nan": lambda c: c["progress"].update(epoch=math.nan),
    "epoch of infinity": lambda c: c["progress"].update(epoch=math.inf),
    "negative epoch": lambda c: c["progress"].update(epoch=-1),
    "step of a half": lambda c: c["progress"].update(step=0.5),
    "step as text": lambda c: c["progress"].update(step="1"),
    "step as truth": lambda c: c["progress"].update(step=True),
    "step beyond 64 bits": lambda c: c["progress"].update(step=10**100),
    "unknown progress": lambda c: c["progress"].update(__class__="x"),
    "applied steps of infinity": lambda c: c.update(applied_steps=math.inf),
    "applied steps negative": lambda c: c.update(applied_steps=-1),
    "loss scale of nan": lambda c: c.update(loss_scale={"value": math.nan, "good_steps": 0}),
    "loss scale too large": lambda c: c.update(loss_scale={"value": 10**400, "good_steps": 0}),
    "loss scale without value": lambda c: c.update(loss_scale={"good_steps": 0}),
    "loss scale as text": lambda c: c.update(loss_scale="1"),
    "identity as a number": lambda c: c.update(identity=1),
    "config as text": lambda c: c.update(config="x"),
    "config missing": lambda c: c.pop("config"),
    "progress missing": lambda c: c.pop("progress"),
}


@pytest.mark.parametrize("craft", MANIFESTS)
def test_crafted_manifests(tmp_path, craft):
    path = write_checkpoint(tmp_path, PROGRESS)
    forge_manifest(path, MANIFESTS[craft])
    refusal(path)


START = '{"format": "zerovision checkpoint 3", "sha256": "0", "config": '
NESTED = [START + "[" * depth + "]" * depth + "}" for depth in (50, *range(880, 1001, 2), 100_000)]


@pytest.mark.parametrize(
    "content", ["[]", "1", "null", '"x"', "{}", '{"format": []}', "[" * 10, "9" * 5000, *NESTED], ids=len
)
def test_json_that_is_no_manifest(tmp_path, content):
    path = tmp_path / "step-00001-0000002"
    path.mkdir()
    (path / MANIFEST_FILE).write_text(content)
    refusal(path)


def test_a_huge_manifest_is_not_read(tmp_path):
    path = write_checkpoint(tmp_path, PROGRESS)
    os.truncate(path / MANIFEST_FILE, 100 * LARGEST_MANIFEST)  # sparse: takes no room
    assert "larger than" in refusal(path)


# The shards.


def tensors_of(rank, size=2):
    snapshot, engine = Snapshot(), PretendedRank(rank, size)
    snapshot.take(engine.state(), engine.epoch_sums, rank=rank)
    return dict(snapshot.tensors)


def told_of(tmp_path, change, ranks=(0, 1)):
    """Return what is said of a checkpoint in which `change(tensors, rank)` has altered the shards of these ranks."""
    path = write_checkpoint(tmp_path, PROGRESS)
    for rank in ranks:
        tensors = tensors_of(rank)
        change(tensors, rank)
        forge_shard(path, rank, tensors)
    return assert_not_filled(path)


BIAS = "stem.bias@"  # of which rank 1 has the end
KEYS = {
    "negative offset": "-1",
    "offset beyond the parameter": "5",
    "offset beyond 64 bits": str(10**30),
    "offset of many digits": "9" * 5000,
    "offset as text": "zero",
    "offset as a fraction": "0.0",
    "infinite offset": "inf",
    "an offset more": "4,0",
    "no offsets": "",
}


@pytest.mark.parametrize("craft", KEYS)
@pytest.mark.parametrize("kind", ["weights", "exp_avg"])
def test_crafted_offsets(tmp_path, craft, kind):
    told_of(tmp_path, lambda t, _: rename(t, f"{kind}/{BIAS}", f"{kind}/{BIAS}{KEYS[craft]}"), ranks=[1])


def key_of(tensors, start):
    return next(key for key in tensors if key.startswith(start))


def replace(tensors, start, change):
    key = key_of(tensors, start)
    tensors[key] = change(tensors[key])


def rename(tensors, start, new):
    tensors[new] = tensors.pop(key_of(tensors, start))


SHARDS = {
    "unknown parameter": lambda t: rename(t, "weights/", "weights/other@0"),
    "parameter with a path": lambda t: rename(t, "weights/", "weights/../../../etc/passwd@0"),
    "parameter with line breaks": lambda t: rename(t, "weights/", "weights/a\nb\x1b[2J@0"),
    "a key without a kind": lambda t: rename(t, "weights/", "weights"),
    "another kind than rank 0's": lambda t: rename(t, "exp_avg/", "momentum/stem.bias@0"),
    "a kind without a parameter": lambda t: t.update({"exp_avg@": torch.zeros(())}),
    "a box more": lambda t: t.update({"weights/stem.bias@0": torch.zeros(1)}),
    "a moment more": lambda t: t.update({"exp_avg/stem.bias@0": torch.zeros(1)}),
    "weights with a dimension more": lambda t: replace(t, "weights/", lambda one: one[None]),
    "weights without dimension": lambda t: replace(t, "weights/", lambda _: torch.tensor(1.0)),
    "weights in bf16": lambda t: replace(t, "weights/", torch.Tensor.bfloat16),
    "weights as integers": lambda t: replace(t, "weights/", torch.Tensor.int),
    "weights and moments cut": lambda t: [
        replace(t, f"{kind}/{BIAS}", lambda one: one[..., :-1].clone()) for kind in ("weights", *MOMENTS)
    ],
    "weights missing": lambda t: t.pop(key_of(t, "weights/")),
    "moment cut": lambda t: replace(t, f"exp_avg/{BIAS}", lambda one: one[..., :-1].clone()),
    "moment in bf16": lambda t: replace(t, "exp_avg/", torch.Tensor.bfloat16),
    "moment missing": lambda t: t.pop(key_of(t, "exp_avg_sq/")),
    "buffer missing": lambda t: t.pop(key_of(t, "buffer/norm_mean")),
    "buffer of another leaf": lambda t: rename(t, "buffer/norm_mean", "buffer/norm_mean@7,0"),
    "buffer of two leaves": lambda t: replace(t, "buffer/norm_mean", lambda one: one.repeat(2, 1)),
    "sums missing": lambda t: t.pop(key_of(t, "epoch_sums/")),
    "sums of another shape": lambda t: replace(t, "epoch_sums/", lambda _: torch.zeros(10**4, dtype=torch.float64)),
}


@pytest.mark.parametrize("craft", SHARDS)
def test_crafted_shards(tmp_path, craft):
    told_of(tmp_path, lambda t, _: SHARDS[craft](t), ranks=[1])


def test_the_shard_is_read_where_it_is_not_crafted(tmp_path):
    # Else the refusals above might have another reason.
    kinds = {key.partition("/")[0] for key in tensors_of(1)}
    assert kinds == {"weights", *MOMENTS, "buffer", "epoch_sums"}, "each is altered above"
    path = write_checkpoint(tmp_path, PROGRESS)
    forge_shard(path, 1, tensors_of(1))
    engine = PretendedRank(seed=5)
    state = TrainState(engine, ScoreSums(2, ALONE.device), Progress())
    restore(choose([path], ALONE)[0], state, ALONE)
    assert state.progress == PROGRESS
    assert torch.equal(engine.weights["stem.bias"], PretendedRank().weights["stem.bias"])


def sums_of(*values):
    return torch.tensor([values], dtype=torch.float64)


ON_ALL_RANKS = {
    "buffer of another dtype": ("buffer/norm_mean@", torch.zeros(1, 7, dtype=torch.int64)),
    "buffer of another shape": ("buffer/norm_mean@", torch.zeros(1, 1)),
    "sums of one number": ("epoch_sums/@", torch.zeros(1, 1)),
    "sums of nan": ("epoch_sums/@", sums_of(math.nan, 1, 2, 3)),
    "sums of an infinite loss": ("epoch_sums/@", sums_of(math.inf, 1, 2, 3)),
    "sums of nan images": ("epoch_sums/@", sums_of(1, 1, 2, math.nan)),
    "sums of fewer images than right ones": ("epoch_sums/@", sums_of(1, 1, 2, 1)),
    "sums of more top-1 than top-5": ("epoch_sums/@", sums_of(1, 3, 2, 4)),
    "sums below zero": ("epoch_sums/@", sums_of(1, -1, 2, 3)),
    "sums in another dtype": ("epoch_sums/@", sums_of(1, 1, 2, 3).float()),
}


@pytest.mark.parametrize("craft", ON_ALL_RANKS)
def test_tensors_crafted_on_all_ranks(tmp_path, craft):
    start, tensor = ON_ALL_RANKS[craft]
    told_of(tmp_path, lambda t, _: replace(t, start, lambda _: tensor))


def test_a_buffer_that_the_model_does_not_have(tmp_path):
    assert "buffers" in told_of(tmp_path, lambda t, rank: t.update({f"buffer/../../x@{rank}": torch.zeros(1)}))


@pytest.mark.parametrize("kind", ["momentum_buffer", "step", "exp_avg2"])
def test_moments_that_the_optimizer_does_not_have(tmp_path, kind):
    def change(tensors, _):
        for key in [key for key in tensors if key.startswith("exp_avg_sq/")]:
            rename(tensors, key, key.replace("exp_avg_sq/", f"{kind}/"))

    assert "moments" in told_of(tmp_path, change)


HEADERS = {
    "longer than the file": (10**15).to_bytes(8, "little") + b"{}",
    "longer than memory": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
    "terabytes": b'{"weights/scale@":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}',
    "beyond 64 bits": b'{"weights/scale@":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,0]}}',
    "negative": b'{"weights/scale@":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
    "nothing": b"",
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_declare_too_much(tmp_path, header):
    path = write_checkpoint(tmp_path, PROGRESS)
    content = HEADERS[header]
    is_whole = not content.startswith(b"{")
    (path / shard_name(0)).write_bytes(content if is_whole else len(content).to_bytes(8, "little") + content)
    trust_shard(path, 0)
    assert_not_filled(path)


@pytest.mark.parametrize("shape", [[2**40], [2**62], [2**31, 2**31, 2**31], [0, 2**62], [5, 1], []])
def test_gigantic_parameters_are_refused_before_memory_is_taken(tmp_path, shape):
    path = write_checkpoint(tmp_path, PROGRESS)
    forge_manifest(path, lambda content: content["parameters"].update({"stem.bias": shape}))
    tracemalloc.start()
    assert "stem.bias" in assert_not_filled(path)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()
