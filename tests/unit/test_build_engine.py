"""Which engine a run gets, and what it computes of a gradient."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_checkpoints import ALONE
from torch import nn

from tests.kit import ROOT, ROUNDING
from zerovision.models.build import BuiltModel
from zerovision.models.weights_metadata import Description, Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.engines import build as model_module
from zerovision.training.engines.build import ENGINES, build_engine, resolve_engine
from zerovision.training.engines.compilation import PIXELS_THAT_PAY, compile_network, resolve_compile
from zerovision.training.engines.deepspeed import read_strategy_json
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.precision import note_slow_bf16
from zerovision.training.engines.settings import ways_of
from zerovision.training.engines.summation_tree import BLOCK, SumOfSquares, pieces_per_row, squares_of_rows
from zerovision.training.engines.ways import STRATEGIES, plan_of
from zerovision.training.world.world import World

GPU = torch.device("cuda", 0)
QUANTIZED = {"stage": 1, "zero_quantized_weights": True}
SMALL, LARGE = 1000, 60_000_000  # weights; the JSON files' buckets hold 50,000,000


def model(parameters):
    with torch.device("meta"):
        return nn.Linear(parameters, 1, bias=False)


def asked(engine, tmp_path, strategy="ddp", keys=()):
    """Return settings with an engine, and a JSON file with more keys than the strategy's."""
    file = tmp_path / "own.json"
    file.write_text(json.dumps(read_strategy_json(strategy) | dict(keys)))
    return TrainConfig(engine=engine, strategy=strategy, deepspeed_config=str(file))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("parameters", [SMALL, LARGE])
def test_auto_is_pytorchs_engine(strategy, parameters):
    for plan in (plan_of(strategy, 1), plan_of(strategy, 1024), plan_of(strategy, 4, shards=2)):
        assert resolve_engine(TrainConfig(strategy=strategy), plan, model(parameters)) == "torch"


def test_auto_says_why_it_takes_deepspeed(tmp_path):
    plan, with_a_number = plan_of("fsdp_stage3", 2, "all"), nn.ParameterList([torch.ones(2), torch.ones(())])

    def notes(engine):
        config = asked(engine, tmp_path, "fsdp_stage3", {"flops_profiler": {}})
        setup = EngineSetup(with_a_number, torch.optim.SGD(with_a_number, 0.1), plan, "fp32", ALONE, 2)
        (way,) = ways_of(config, resolve_engine(config, plan, with_a_number))
        with mock.patch("zerovision.training.engines.deepspeed.engine.DeepSpeedEngine"):
            way.build_engine(setup)
        return setup.notes

    assert notes("auto") == [
        "--engine auto chose deepspeed, the only engine that supports flops_profiler, --offload, "
        "how to shard the single number 1"
    ]
    assert notes("deepspeed") == []


@pytest.mark.parametrize(
    ("plan", "keys", "named"),
    [
        (plan_of("fsdp_stage3", 2, "all"), {}, "--offload"),
        (plan_of("ddp", 2), {"flops_profiler": {"enabled": True}}, "flops_profiler"),
        (plan_of("ddp", 2), {"zero_optimization": QUANTIZED}, "zero_quantized_weights"),
    ],
)
def test_what_only_deepspeed_does_goes_to_deepspeed(plan, keys, named, tmp_path):
    assert resolve_engine(asked("auto", tmp_path, keys=keys), plan, model(SMALL)) == "deepspeed"
    if named == "--offload":
        assert resolve_engine(asked("torch", tmp_path, keys=keys), plan, model(SMALL)) == "torch"
    else:
        with pytest.raises(UserError, match=f"--engine torch does not support {named}: use --engine deepspeed or auto"):
            resolve_engine(asked("torch", tmp_path, keys=keys), plan, model(SMALL))
    said = f"--audit 5 needs --engine torch, but other settings need deepspeed, the only engine with {named}"
    with pytest.raises(UserError, match=said):
        resolve_engine(asked("auto", tmp_path, keys=keys), plan, model(SMALL), "--audit 5")


@pytest.mark.parametrize(
    ("plan", "module", "message"),
    [
        (plan_of("fsdp_stage3", 2, "optimizer"), nn.Linear(2, 2), "--offload optimizer: at stage 3 --engine torch"),
        (plan_of("fsdp_stage2", 2), nn.ParameterList([torch.ones(())]), "its parameter 0 is a single number"),
    ],
)
def test_what_torch_cannot_do_is_one_line(plan, module, message):
    with pytest.raises(UserError, match=message):
        resolve_engine(TrainConfig(engine="torch"), plan, module)
    assert resolve_engine(TrainConfig(engine="torch"), plan_of("ddp", 2), module) == "torch"


def test_a_strategys_plan_divides_one_copy_over_the_ranks_asked_for():
    plans = plan_of("fsdp_stage3", 8, shards=4), plan_of("ddp", 8)
    assert [(plan.replicas, plan.shards) for plan in plans] == [(2, 4), (1, 8)]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_users_word_holds(engine):
    assert resolve_engine(TrainConfig(engine=engine), plan_of("ddp", 2), model(LARGE)) == engine


ON_GPU = World(0, 0, 1, 1, GPU)
LONG, SHORT = PIXELS_THAT_PAY, PIXELS_THAT_PAY - 1


@pytest.mark.parametrize(
    ("settings", "pixels", "world", "expected"),
    [
        ({"compile": "on", "model_type": "vgg"}, SHORT, ALONE, True),
        ({"compile": "on", "model_type": "vgg"}, SHORT, ON_GPU, True),
        ({"compile": "off", "model_type": "mobilenet"}, LONG, ALONE, False),
        ({"model_type": "mobilenet"}, LONG, ALONE, True),
        ({"model_type": "mobilenet"}, SHORT, ALONE, False),
        ({"model_type": "basic_cnn"}, LONG, ALONE, False),
        ({"model_type": "mobilenet"}, LONG, ON_GPU, False),
        ({"model_type": "vgg"}, 1000 * LONG, ON_GPU, False),
        ({"model_type": "mobilenet", "activation_checkpointing": True}, LONG, ALONE, False),
    ],
)
def test_auto_compiles_long_runs_of_measured_models(settings, pixels, world, expected):
    assert resolve_compile(TrainConfig(**settings), pixels, world) == expected


def test_compile_without_a_compiler_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"--compile on needs a C\+\+ compiler"):
        resolve_compile(TrainConfig(compile="on"), LONG, ALONE)
    assert not resolve_compile(TrainConfig(model_type="mobilenet"), LONG, ALONE)


class _Uncompilable(nn.Sequential):
    def compile(self, **_: object) -> None:
        self._compiled_call_impl = _fail


def _fail(images: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such compiler\nsecond line")


def _setup(network: nn.Module) -> EngineSetup:
    optimizer = torch.optim.SGD(network.parameters())
    return EngineSetup(network, optimizer, plan_of("ddp", 1), "fp32", ALONE, 2, image_shape=(3, 2, 2))


def test_what_cannot_be_compiled_trains_as_it_is_with_a_note_or_is_one_line():
    network, images = _Uncompilable(nn.Flatten(), nn.Linear(12, 2)), torch.rand(2, 3, 2, 2)
    expected, setup = network(images), _setup(network)
    compile_network(network, setup)
    assert torch.equal(network(images), expected)
    assert setup.notes == [
        "torch.compile failed: RuntimeError, no such compiler second line",
        "trains without torch.compile",
    ]
    with pytest.raises(UserError, match=r"--compile on: torch\.compile failed: RuntimeError, no such compiler"):
        compile_network(network, dataclasses.replace(setup, compile="on"))


COMPILES = """
import sys
sys.path[:0] = ["tests/unit"]
from tests.unit.test_build_engine import _setup, nn, torch
from zerovision.training.engines.compilation import compile_network
torch.manual_seed(0)
network = nn.Sequential(nn.Flatten(), nn.Linear(12, 2), nn.Tanh())
setup = _setup(network)
compile_network(network, setup)
print(setup.notes, network(torch.ones(2, 3, 2, 2)).sum().item().hex())
"""


@pytest.mark.slow
def test_half_a_library_of_a_compiler_that_was_killed_is_compiled_again(tmp_path):
    def compiled() -> str:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        return subprocess.check_output([sys.executable, "-c", COMPILES], cwd=ROOT, env=environment, text=True)

    first = compiled()
    libraries = [*tmp_path.rglob("*.so")]
    assert libraries
    for library in libraries:
        library.write_bytes(library.read_bytes()[:2000])  # with which a process ends by SIGBUS
    killed = subprocess.Popen(["true"])
    killed.wait()
    (tmp_path / f"compiling.{socket.gethostname()}.{killed.pid}").touch()
    assert compiled() == first
    assert first.startswith("[] ")
    assert [*tmp_path.rglob("*.so")]
    assert not [*tmp_path.glob("compiling.*")]


def test_the_trial_of_compiled_code_leaves_no_trace(monkeypatch):
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(16, 2))
    network.eval()
    before, calls, setup = [*map(torch.clone, network.state_dict().values())], [], _setup(network)
    monkeypatch.setattr(network, "compile", lambda: None)
    network.register_forward_hook(lambda module, inputs, _: calls.append((module.training, inputs[0].shape)))
    compile_network(network, setup)
    assert calls == [(True, (2, 3, 2, 2))]
    assert setup.notes == []
    assert not network.training
    assert all(map(torch.equal, network.state_dict().values(), before))
    assert all(parameter.grad is None for parameter in network.parameters())


def test_recomputed_stages_have_synchronized_batchnorms_on_gpus(monkeypatch):
    """PyTorch's SyncBatchNorm replaces the layers that a flat stack such as VGG's recomputes."""
    stack = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.BatchNorm2d(4))
    built = BuiltModel(nn.Sequential(stack), Description("basic_cnn", None, 2, 8))
    monkeypatch.setattr(model_module, "build_model", lambda *_, **__: built)
    monkeypatch.setattr(model_module, "agreed", lambda action, _world: action())
    config = TrainConfig(activation_checkpointing=True, sync_batchnorm=True)
    data = SimpleNamespace(class_names=["a", "b"], preprocessing=Preprocessing(8, None, (0.5,) * 3, (0.5,) * 3))
    data.train = SimpleNamespace(sizes=[8])
    built, _ = model_module.build_training_model(config, data, World(1, 0, 1, 2, GPU))
    ((first, second),) = built.module[0].forward.args
    assert [type(layer) for layer in (first[1], second[0])] == [nn.SyncBatchNorm] * 2
    with pytest.raises(UserError, match=r"^--sync-batchnorm: .* needs GPUs: leave it out"):
        model_module.build_training_model(config, data, World(1, 0, 1, 2, torch.device("cpu")))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deep_copy_computes_with_its_own_weights(precision):
    """Averages of weights, and exports, are built on copies."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    engine = build_engine(EngineSetup(module, optimizer, plan_of("ddp", 1), precision, ALONE, 2))
    images = torch.randn(2, 3, 8, 8)
    copied = copy.deepcopy(engine.module)
    torch.testing.assert_close(copied(images), engine.forward(images), atol=2e-2, rtol=0)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(images).any()
    assert engine.forward(images).any()


@pytest.mark.parametrize("count", [1, 1023, 1024, 1500, 3_000_001])
def test_the_gradient_norm_keeps_its_digits_whatever_the_number_of_values(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    padded = nn.functional.pad(values, (0, -count % BLOCK))
    blocks = len(padded) // BLOCK
    square_sum = SumOfSquares(torch.arange(blocks), ALONE)
    exact = (values.double() ** 2).sum().item()
    assert square_sum(squares_of_rows(padded.view(-1, BLOCK))).item() == pytest.approx(exact, rel=ROUNDING)
    padded[count - 1] = math.inf
    assert square_sum(squares_of_rows(padded.view(-1, BLOCK))).item() == math.inf


@pytest.mark.parametrize(("elements", "pieces"), [(1, 1), (1024, 1), (1025, 5), (4608, 6), (25088, 28), (1031, 1031)])
def test_a_row_is_cut_into_equal_pieces_that_are_no_longer_than_a_block(elements, pieces):
    assert pieces_per_row(elements) == pieces


@pytest.mark.parametrize(
    ("precision", "capability", "is_noted"),
    [("bf16", "AVX2", True), ("bf16", "AVX512", False), ("bf16", "SVE256", False), ("fp32", "AVX2", False)],
)
def test_bf16_on_a_cpu_with_avx2_alone_is_noted(precision, capability, is_noted, monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    notes = note_slow_bf16(precision, torch.device("cpu"))
    assert bool(notes) == is_noted
    assert all("--precision fp32" in note for note in notes)
    assert note_slow_bf16(precision, torch.device("cuda")) == []
