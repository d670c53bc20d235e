"""When a network's CUDA graphs are replayed, and when they are not taken; tests/gpu replays real ones."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.kit import ALONE
from zerovision.models.ensemble import Ensemble
from zerovision.training.config import TrainConfig
from zerovision.training.engines.compilation import MOST_EXCHANGED_BYTES, Recorded, record, records
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.ways import plan_of
from zerovision.training.setup import _is_static
from zerovision.training.world.world import World

BATCH_SIZE, SHAPE = 4, (3, 6, 6)
ON_GPU = World(0, 0, 1, 1, torch.device("cuda", 0))


class Replays(nn.Module):
    """In the place of PyTorch's graphs: computes what the network does with its weights and buffers."""

    def __init__(self, recording: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        recording(torch.zeros(BATCH_SIZE, *SHAPE))
        output, recording.output = recording.output, torch.empty(0)
        self.recording, self.change, self.calls = copy.deepcopy(recording), change, 0
        recording.output = output
        for own, original in zip(self.recording.modules(), recording.modules(), strict=True):
            own._parameters, own._buffers = original._parameters, original._buffers

    def forward(self, images):
        self.calls += 1
        return self.change(self.recording(images))


@pytest.fixture
def graphs(monkeypatch):
    """Let `record` run without a GPU; the namespace has what a replay does to logits, the free memory, and all made."""
    told = SimpleNamespace(change=lambda logits: logits, free=80e9, made=[])

    def make(recording, images, **_):
        if isinstance(told.change, Exception):
            raise told.change
        told.made.append(Replays(recording, told.change))
        return told.made[-1]

    generator = SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=lambda state: told.made.append(state))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (told.free, 80e9))
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return told


def make_network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 5))


def setup_of(module: nn.Module, world: World = ALONE, **changes: object) -> EngineSetup:
    rule = torch.optim.SGD(module.parameters(), lr=0.1)
    setup = EngineSetup(module, rule, plan_of("ddp", world.size), "fp32", world, BATCH_SIZE, image_shape=SHAPE)
    return dataclasses.replace(setup, static_graph=True, **changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_called_as_it_was_recorded_is_replayed(precision, graphs):
    """In the mode of the model within: the wrapper for autocast is never told."""
    module, images = make_network(), torch.rand(BATCH_SIZE, *SHAPE)
    recorded = record(under_autocast(module, precision, images.device), setup_of(module, precision=precision))
    (replays,) = graphs.made
    before = replays.calls
    recorded(images)
    assert replays.calls == before + 1
    module.eval()
    recorded(images)
    module.train()
    recorded(images[:2])
    with torch.no_grad():
        recorded(images)
    assert replays.calls == before + 1


def test_a_recording_leaves_no_trace(graphs):
    network, untouched = make_network().eval(), make_network().eval()
    setup = setup_of(network)
    assert isinstance(record(network, setup), Recorded)
    assert setup.notes == []
    assert not network.training
    for (name, found), expected in zip(network.state_dict().items(), untouched.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    assert all(parameter.grad is None for parameter in network.parameters())


class OffInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, logits):
        return logits.clone()

    @staticmethod
    def backward(context, gradient):
        return 1.05 * gradient


@pytest.mark.parametrize(
    ("change", "free", "told"),
    [
        (lambda logits: logits + 1e-6 * logits.detach().abs().max(), 80e9, "replayed, logits are off by up to .*"),
        (OffInBackward.apply, 80e9, "replayed, gradients are off by .*"),
        (lambda logits: logits * torch.nan, 80e9, "replayed, logits are off by up to nan.*"),
        (RuntimeError("stream is capturing"), 80e9, "RuntimeError, stream is capturing"),
        (lambda logits: logits, 7.9e9, r"they would leave 7\.9 of 80\.0 GB of the GPU's memory"),
    ],
)
def test_a_recording_that_computes_something_else_fails_or_fills_the_memory_is_not_taken(change, free, told, graphs):
    graphs.change, graphs.free, network = change, free, make_network()
    setup = setup_of(network)
    assert record(network, setup) is network
    (note,) = setup.notes
    assert re.fullmatch(f"no CUDA graphs: {told}", note)
    if isinstance(change, Exception):
        assert graphs.made == ["clone"], "the generator counts again"


def test_numbers_drawn_on_the_host_are_found(graphs):
    class Draws(nn.Linear):
        drawn = None

        def forward(self, images):
            return super().forward(images.flatten(1)) * (Draws.drawn or random.random())

    def replay(logits):  # with the number of the recording
        Draws.drawn = None
        return logits

    graphs.change, network = replay, Draws(108, 5)
    setup = setup_of(network)
    Draws.drawn = 0.5
    assert record(network, setup) is network
    assert "logits are off" in setup.notes[0]


def test_the_members_of_an_ensemble_are_replayed_each_with_its_seed(graphs):
    ensemble = Ensemble([make_network(), make_network()])
    setup, images = setup_of(ensemble), torch.rand(BATCH_SIZE, *SHAPE)
    recorded = record(ensemble, setup)
    assert isinstance(recorded, Recorded), setup.notes
    before = [one.calls for one in graphs.made]
    torch.manual_seed(3)
    found = recorded(images)
    torch.manual_seed(3)
    assert torch.equal(found, ensemble(images))
    assert [one.calls for one in graphs.made] == [calls + 1 for calls in before]
    copied = copy.deepcopy(ensemble)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(images).any(), "a copy computes with its own weights"


def test_only_a_gpu_records_and_several_only_small_gradients():
    """Also compiled networks, but for ensembles, whose members are compiled singly."""
    network, wide = make_network(), nn.Linear(MOST_EXCHANGED_BYTES // 4, 1, bias=False)
    wider, ensemble = nn.Sequential(wide, nn.Linear(1, 1)), Ensemble([make_network(), make_network()])
    several = dataclasses.replace(ON_GPU, size=8)
    for module, world in ((network, ON_GPU), (network, several), (wide, several), (wider, ON_GPU), (ensemble, ON_GPU)):
        assert records(setup_of(module, world))
    assert records(setup_of(network, ON_GPU, compile="auto"))
    assert not records(setup_of(ensemble, ON_GPU, compile="auto"))
    assert not records(setup_of(wider, several))
    assert not records(setup_of(network))
    for changes in ({"image_shape": None}, {"static_graph": False}):
        assert not records(dataclasses.replace(setup_of(network, ON_GPU), **changes))


@pytest.mark.parametrize(
    ("changes", "head_epochs", "expected"),
    [
        ({}, 0, True),
        ({"mixup": 0.2, "gradient_accumulation_steps": 4, "ema": 0.99}, 0, True),
        ({"tune": "head"}, 0, False),
        ({}, 1, False),
        ({"activation_checkpointing": True}, 0, False),
        ({"sync_batchnorm": True}, 0, False),
        ({"loss": "supcon"}, 0, False),
        ({"features": "cached"}, 0, False),
        ({"tensor_parallel": 2}, 0, False),
        ({"pipeline_parallel": 2}, 0, False),
    ],
)
def test_a_network_that_changes_during_a_run_is_not_recorded(changes, head_epochs, expected):
    config = dataclasses.replace(TrainConfig(), **changes)
    run = SimpleNamespace(config=config, model=SimpleNamespace(head_epochs=head_epochs))
    assert _is_static(run) == expected
