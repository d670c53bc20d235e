"""Models: the table, sizes, stems, weights files, and recomputed activations against the plain network."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import pickle
import re
import time
from functools import cache, partial
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import DropPath
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peers.job import mean_cross_entropy
from tests.kit import ROUNDING, assert_equal, assert_same_but_rounding, new_model
from zerovision.models import MODELS, check_model_name
from zerovision.models.build import BuiltModel, rebuild_model
from zerovision.models.cnn_lstm import HAS_BF16
from zerovision.models.dry_run import forward_failure
from zerovision.models.ensemble import Ensemble
from zerovision.models.weights_metadata import Description, Preprocessing, WrongMetadata
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import save_weights
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing

SMALL_MEMBERS = "basic_cnn,mobilenet"
SMALL_OF_TIMM = "timm:test_efficientnet"  # with mobilenet's names
# One of every family, without the two that are slow or need the hub.
QUICK_MODELS = (
    *("basic_cnn", "airbench_small", "mobilenet", "efficientnet", "cnn_lstm", "ensemble"),
    *("timm:resnet18", "timm:convnext_atto"),
)


def build(model_type: str, num_classes: int = 5, image_size: int = 32, **options) -> BuiltModel:
    torch.manual_seed(0)
    options.setdefault("ensemble_members", SMALL_MEMBERS)
    return new_model(model_type, num_classes=num_classes, image_size=image_size, **options)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# --- the table -------------------------------------------------------------------------------------------------


def test_unknown_timm_name_gets_the_nearest_of_timm():
    check_model_name("timm:resnet81")
    with pytest.raises(UserError, match=r"no such name. Did you mean 'timm:resnet"):
        build("timm:resnet81")
    with pytest.raises(UserError, match=r"unknown weights tag .* Allowed: .*resnet18.a1_in1k"):
        build("timm:resnet18.nosuchtag")
    with pytest.raises(UserError, match=r"no such name. Use the name of its architecture, .* --weights FILE"):
        build("timm:hf-hub:someone/something")
    with pytest.raises(UserError, match=r"Did you mean 'timm:resnet18.a1_in1k'\?$"):
        build("timm:hf-hub:timm/resnet18.a1_in1k")


# --- shapes and sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [m for m in MODELS if m not in ("mobilenet_finetuned", "vgg", "ensemble")])
@pytest.mark.parametrize("image_size", [28, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 64)), 224])
def test_sizes_of_the_table(model_type, image_size):
    built = build(model_type, image_size=image_size)
    assert forward_failure(built.module, image_size, batch_size=2) is None


def test_vgg_sizes():
    module = build("vgg").module
    assert [size for size in (28, 32, 64, 224, 512) if forward_failure(module, size, 2)] == [28]
    assert forward_failure(module, 512, 1 << 20) is None  # without data: such a batch would have 3 TB


@pytest.mark.parametrize("model_type", [*QUICK_MODELS, "timm:vit_tiny_patch16_224"])
def test_real_forward_head_and_a_rebuild_from_the_description(model_type):
    built = build(model_type)
    images = torch.randn(3, 3, 32, 32)
    assert built.module.train()(images).shape == ((3, 5, 2) if model_type == "ensemble" else (3, 5))
    logits = built.module.eval()(images)
    assert logits.shape == (3, 5)
    assert logits.dtype == torch.float32
    parameters = dict(built.module.named_parameters())
    assert built.head_parameter_names
    assert built.head_parameter_names < parameters.keys()
    assert {len(parameters[name]) for name in built.head_parameter_names} == {5}
    rebuilt = rebuild_model(Description.from_dict(json.loads(json.dumps(built.description.to_dict()))))
    rebuilt.load_state_dict(built.module.state_dict())
    assert torch.equal(rebuilt.eval()(images), logits)


@pytest.mark.parametrize(
    ("model_type", "has_bf16"), [("cnn_lstm", HAS_BF16), ("cnn_lstm", False), ("ensemble", HAS_BF16)]
)
def test_autocast_trains_on_any_cpu(model_type, has_bf16, monkeypatch):
    """For processors without AVX-512, oneDNN has no LSTM in bf16."""
    monkeypatch.setattr("zerovision.models.cnn_lstm.HAS_BF16", has_bf16)
    module = build(model_type, ensemble_members="basic_cnn,cnn_lstm").module.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = module(torch.randn(4, 3, 32, 32))
    assert logits.dtype == torch.bfloat16 or model_type == "ensemble"
    mean_cross_entropy(logits.float(), torch.arange(4)).backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in module.parameters())


def works_in_timm(name: str, size: int, **options) -> bool:
    """The oracle of a size: a real step's forward of timm's own network."""
    try:
        return timm.create_model(name, num_classes=5, **options).train()(torch.randn(2, 3, size, size)).shape == (2, 5)
    except (RuntimeError, AssertionError):
        return False


def test_a_failing_size_names_the_smallest_that_works():
    with pytest.raises(UserError, match=r"'timm:dla46_c' .* but it works with 32 pixels: use --image-size 32"):
        build("timm:dla46_c", image_size=24)
    assert works_in_timm("dla46_c", 32)
    assert not works_in_timm("dla46_c", 24)


def test_sizes_off_the_usual_list_and_refused_at_creation():
    with pytest.raises(UserError, match="use --image-size 240"):
        build("timm:crossvit_tiny_240", image_size=224)
    assert works_in_timm("crossvit_tiny_240", 240, img_size=240)
    assert not works_in_timm("crossvit_tiny_240", 224, img_size=224)
    with pytest.raises(UserError, match=r"'timm:nest_tiny' does not work with 30-pixel .* use --image-size (32|64)"):
        build("timm:nest_tiny", image_size=30)


def test_one_image_per_batch_is_refused_where_batchnorm_needs_two():
    with pytest.raises(UserError, match=r"'timm:dla46_c' .*batches of 1.* use --batch-size 2"):
        build("timm:dla46_c", batch_size=1)
    with pytest.raises(ValueError, match="more than 1 value"):  # the oracle: what training would have run into
        timm.create_model("dla46_c").train()(torch.randn(1, 3, 32, 32))
    assert build("mobilenet", batch_size=1).module(torch.randn(1, 3, 32, 32)).shape == (1, 5)


@pytest.mark.parametrize("model_type", ["mobilenet", "timm:convit_tiny"])
def test_the_size_check_changes_nothing(model_type, caplog):
    module = build(model_type).module
    before, random_state = state_of(module), torch.get_rng_state()
    assert forward_failure(module, 32, 4) is None
    assert forward_failure(module, 3, 1) is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert type(module(torch.randn(2, 3, 32, 32))) is torch.Tensor
    assert not caplog.records


def test_batchnorm_for_another_number_of_channels_is_a_failure():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8 * 30 * 30, 5)]
    failure = forward_failure(nn.Sequential(*layers), 32, 2)
    layers[1] = nn.BatchNorm2d(8)
    assert failure is not None
    assert forward_failure(nn.Sequential(*layers), 32, 2) is None


def test_batchnorm_of_what_has_data_is_computed_during_a_size_check():
    """As another thread may use it at the same moment."""
    table, found = torch.arange(8.0).reshape(4, 2), []

    class Normalizes(nn.Linear):
        def forward(self, images):
            found.append(nn.functional.batch_norm(table, None, None, training=True))
            return super().forward(images.flatten(1))

    assert forward_failure(Normalizes(3 * 8 * 8, 5), 8, 2) is None
    assert torch.equal(found[0], nn.functional.batch_norm(table, None, None, training=True))


def test_a_network_that_fake_tensors_do_not_take_is_not_refused():
    """Fake tensors alone cannot run it; on real ones it works."""
    assert forward_failure(timm.create_model("coat_tiny"), 224, 2) is None


# --- the stem --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stem", "changed"), [("auto", {"conv1": [2, 1]}), ("keep", {})])
def test_small_images_lower_the_stem_stride_of_timms_network_unless_it_is_kept(stem, changed):
    built = build("timm:resnet18", image_size=32, stem=stem)
    assert built.description.stem_stride_changed == changed
    assert any("stem stride 2 -> 1" in note for note in built.notes) == bool(changed)
    network, images = timm.create_model("resnet18", num_classes=5), torch.randn(2, 3, 32, 32)
    network.load_state_dict(built.module.state_dict())
    network.conv1.stride = (1, 1) if changed else (2, 2)
    with torch.no_grad():
        assert torch.equal(network.eval()(images), built.module.eval()(images))


@pytest.mark.parametrize(
    ("model_type", "image_size"),
    [
        ("mobilenet", 64),  # large enough
        ("timm:convnext_atto", 32),  # a patch embedding: kernel = stride
        ("timm:vit_tiny_patch16_224", 32),
        ("timm:fastvit_t8", 32),  # parallel branches in the stem: one changed branch would not fit the others
    ],
)
def test_other_stems_stay(model_type, image_size):
    built = build(model_type, image_size=image_size)
    assert built.description.stem_stride_changed == {}
    assert built.module(torch.randn(2, 3, image_size, image_size)).shape == (2, 5)


def test_a_damaged_description_is_refused():
    """Others are in test_weights.py."""
    with pytest.raises(WrongMetadata):
        Description.from_dict(build("mobilenet").description.to_dict() | {"members": 3})
    with pytest.raises(WrongMetadata, match="has no metadata 'model_type'"):
        Description.from_dict({})


@pytest.mark.parametrize(
    ("model_type", "rate", "rate_of_timm"),
    [
        *((name, {"drop_path": 0.2}, {"drop_path_rate": 0.2}) for name in ("mobilenet", "timm:convnext_atto")),
        *(
            (name, {"dropout": 0.5}, {"drop_rate": 0.5})
            for name in ("mobilenet", "timm:convnext_atto", "timm:test_vit")
        ),
    ],
)
def test_what_is_dropped_is_timms_and_changes_neither_weights_nor_description(model_type, rate, rate_of_timm):
    built, plain = build(model_type, **rate, stem="keep"), build(model_type, stem="keep")
    fixed = {"img_size": 32} if "vit" in model_type else {}
    oracle = timm.create_model(built.description.timm_name, num_classes=5, **rate_of_timm, **fixed)
    oracle.load_state_dict(built.module.state_dict())
    assert built.description == plain.description
    assert_equal(built.module.state_dict(), plain.module.state_dict())
    images = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(built.module.eval()(images), plain.module.eval()(images))
        drawn = []
        for network in (built.module, oracle, plain.module):
            torch.manual_seed(1)
            drawn.append(network.train()(images))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("model_type", ["basic_cnn", "cnn_lstm"])
def test_our_own_dropout_is_a_fifth_or_what_is_asked_for(model_type):
    for given, expected in (("auto", 0.2), (0.0, 0.0), (0.7, 0.7)):
        network = build(model_type, dropout=given).module.train()
        assert network.dropout.p == expected
        assert model_type == "basic_cnn" or network.lstm.dropout == expected
        images = torch.randn(8, 3, 32, 32)
        assert torch.equal(network(images), network(images)) == (expected == 0)


def test_dropout_of_a_network_of_timm_that_has_none_is_refused():
    said = r"^--dropout 0.2: model 'timm:deepseek_vit_412m_enc' does not support dropout: leave it out.$"
    with pytest.raises(UserError, match=said):
        build("timm:deepseek_vit_412m_enc", dropout=0.2)


def highest_rates(network):
    """The highest dropout and drop path of a network's layers."""
    parts = [*network.modules()]
    dropout = [part.p if isinstance(part, nn.Dropout) else getattr(part, "drop_rate", 0.0) for part in parts]
    return max(dropout), max([0.0, *(p.drop_prob for p in parts if isinstance(p, DropPath))])


@pytest.mark.parametrize(
    ("model_type", "own"), [("timm:swin_tiny_patch4_window7_224", (0.0, 0.1)), ("timm:rexnet_100", (0.2, 0.0))]
)
def test_timms_own_rates_stay_unless_others_are_given(model_type, own):
    with torch.device("meta"):
        assert highest_rates(build(model_type, image_size=224).module) == pytest.approx(own)
        assert highest_rates(build(model_type, image_size=224, dropout=0.0, drop_path=0.0).module) == (0, 0)


@pytest.mark.parametrize("model_type", ["airbench", "vgg"])
def test_0_is_a_rate_of_every_model(model_type):
    with torch.device("meta"):
        build(model_type, image_size=56, dropout=0.0, drop_path=0.0)


# --- the ensemble ----------------------------------------------------------------------------------------------


def test_ensemble_averages_probabilities():
    torch.manual_seed(0)
    members = [nn.Linear(6, 4) for _ in range(3)]
    ensemble, inputs, labels = Ensemble(members).eval(), 20 * torch.randn(8, 6), torch.randint(0, 4, (8,))
    average = torch.stack([member(inputs).double().softmax(1) for member in members]).mean(0)
    assert_same_but_rounding(ensemble(inputs), average.log())
    assert_same_but_rounding(ensemble(inputs).softmax(1), average)
    expected = functional.nll_loss(average.log(), labels)
    assert_same_but_rounding(functional.cross_entropy(ensemble(inputs), labels), expected)


def test_ensemble_stays_finite_where_probabilities_underflow():
    ensemble = Ensemble([nn.Identity(), nn.Identity()]).eval()
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    loss = functional.cross_entropy(ensemble(logits), torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(500.0)
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0]]))


# --- weights ---------------------------------------------------------------------------------------------------


NAMESPACE = argparse.Namespace(model="mobilenet", lr=0.1)
# What a file contains, by who writes it, and what the notes say; of an average, `average` is what is to be taken.
PEERS = {
    "plain": (lambda raw, average: raw, ""),
    "state_dict": (lambda raw, average: {"state_dict": raw, "state_dict_ema": None, "args": NAMESPACE}, ""),
    "timm": (
        lambda raw, average: {"state_dict": raw, "state_dict_ema": average, "args": NAMESPACE, "optimizer": {}},
        "'state_dict_ema', the average of the weights over the steps, is used",
    ),
    "torchvision": (
        lambda raw, average: {
            "model": raw,
            "model_ema": {"n_averaged": torch.tensor(1)} | under("module.", average),
            "args": NAMESPACE,
        },
        "'model_ema', the average of the weights over the steps, is used",
    ),
    "DDP": (lambda raw, average: under("module.", raw), "prefix 'module.' removed"),
    "DDP, compiled": (lambda raw, average: under("_orig_mod.module.", raw), "prefix '_orig_mod.module.' removed"),
    "compiled, DDP": (lambda raw, average: under("module._orig_mod.", raw), "prefix 'module._orig_mod.' removed"),
    "Lightning": (
        lambda raw, average: {
            "state_dict": under("model._orig_mod.", raw) | {"criterion.weight": torch.ones(5)},
            "hyper_parameters": {"lr": 0.1},
            "pytorch-lightning_version": "2.6",
        },
        "its tensors outside of the network are not used: 'criterion.weight'",
    ),
    "tutorial": (lambda raw, average: {"epoch": 1, "model_state_dict": under("net.", raw)}, "prefix 'net.' removed"),
    "DeepSpeed": (lambda raw, average: {"module": under("backbone.", raw)}, "prefix 'backbone.' removed"),
    "safetensors": (lambda raw, average: raw, ""),
    "transformers": (lambda raw, average: under("timm_model.", raw), "prefix 'timm_model.' removed"),
}


def under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("peer", "is_ensemble"),
    [
        *((peer, False) for peer in PEERS),
        *(pytest.param(peer, True, marks=[] if peer == "timm" else pytest.mark.slow) for peer in PEERS),
    ],
)
def test_weights_of_peers_start_a_model_and_a_note_says_what_was_taken(tmp_path, peer, is_ensemble):
    file, model_type = tmp_path / "weights", "ensemble" if is_ensemble else SMALL_OF_TIMM
    raw = state_of(build(model_type).module)
    average = {name: tensor + 1 for name, tensor in raw.items()}
    content, note = PEERS[peer]
    save = save_file if peer in ("safetensors", "transformers") else torch.save
    save(content(raw, average), file)
    torch.manual_seed(7)
    built = new_model(model_type, num_classes=5, image_size=32, weights=str(file), ensemble_members=SMALL_MEMBERS)
    expected = average if "average" in note else raw
    assert_equal(built.module.state_dict(), expected)
    notes = built.notes[[note.startswith("weights loaded") for note in built.notes].index(True) + 1 :]
    assert note in "; ".join(notes)
    assert bool(notes) == bool(note), notes


@pytest.mark.parametrize(
    "model_type", ["mobilenet", pytest.param("vgg", marks=pytest.mark.slow), "ensemble", "cnn_lstm"]
)
def test_another_class_count_keeps_the_backbone(tmp_path, model_type):
    file = tmp_path / "weights.safetensors"
    state = state_of(build(model_type, num_classes=7).module)
    save_file(state, file)
    built = build(model_type, num_classes=3, weights=str(file))
    assert any("head replaced: 7 -> 3 classes" in note for note in built.notes)
    for name, tensor in built.module.state_dict().items():
        if name in built.head_parameter_names:
            assert len(tensor) == 3
        else:
            assert torch.equal(tensor, state[name])


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch executed",)


@cache
def small_model() -> BuiltModel:
    return build(SMALL_OF_TIMM)


def without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in state.items() if other != name}


def save_with_names(class_names: object, state: dict[str, torch.Tensor], file: Path) -> None:
    """Save weights with the metadata of a network of two classes, and these names of classes."""
    preparation = Preprocessing(32, None, mean=(0.5,) * 3, std=(0.5,) * 3)
    facts = {"description": dataclasses.replace(small_model().description, num_classes=2), "preprocessing": preparation}
    save_weights(file, state, class_names=class_names, **facts)


CODE = "could run code is refused"
# Files that do not fit the small network: what its line says, and what writes the file, given that network's weights.
BAD_FILES = {
    "missing": ("does not exist", lambda state, file: None),
    "folder": ("is not a file", lambda state, file: file.mkdir()),
    "empty": ("cannot be read", lambda state, file: file.write_bytes(b"")),
    "text": ("neither safetensors nor", lambda state, file: file.write_text("not weights at all\n")),
    "code": (CODE, lambda state, file: file.write_bytes(pickle.dumps(RunsCode(), protocol=2))),
    "code of protocol 4": (CODE, lambda state, file: file.write_bytes(pickle.dumps(RunsCode(), protocol=4))),
    "code in torch file": (CODE, lambda state, file: torch.save({"state_dict": RunsCode()}, file)),
    "code beside arguments": (
        r"\(asks for (posix|nt)\.system; a file that could run code is refused\)",
        lambda state, file: torch.save({"model": state, "args": argparse.Namespace(x=RunsCode())}, file),
    ),
    "whole model": (
        r"\(asks for \S+; a file that could run code is refused\)",
        lambda state, file: torch.save(build("basic_cnn").module, file),
    ),
    "two networks": (
        r"contains 2 such networks \('student\.', 'teacher\.'\): save the state_dict of one",
        lambda state, file: torch.save(under("student.", state) | under("teacher.", state), file),
    ),
    "prefix of another model": (
        r"1 tensor missing, 0 unexpected \(first missing 'bn1.weight'\)",
        lambda state, file: torch.save(under("model.", without(state, "bn1.weight")), file),
    ),
    "prefix of some": (
        rf"to a different model than '{SMALL_OF_TIMM}': \d+ tensors missing",
        lambda state, file: torch.save(
            {name if name.startswith("bn1") else f"module.{name}": tensor for name, tensor in state.items()}, file
        ),
    ),
    "no tensors": ("has no state_dict", lambda state, file: torch.save({"epoch": 3}, file)),
    "list": ("has no state_dict", lambda state, file: torch.save([1, 2], file)),
    "names no text": ("has no state_dict", lambda state, file: torch.save({1: torch.zeros(1)}, file)),
    "name of two lines": (
        "0 tensors missing, 1 unexpected",
        lambda state, file: save_file({**state, "a\nb": torch.zeros(1)}, file),
    ),
    "other model": (
        rf"to a different model than '{SMALL_OF_TIMM}': \d+ tensors missing, \d+ unexpected \(first missing '",
        lambda state, file: save_file(state_of(build("basic_cnn").module), file),
    ),
    "other shape": (
        r"'conv_stem.weight' is \[24, 3, 5, 5\] there, \[24, 3, 3, 3\] here",
        lambda state, file: save_file({**state, "conv_stem.weight": torch.zeros(24, 3, 5, 5)}, file),
    ),
    "narrow head": (
        r"'classifier.weight' is \[5, 9\] there, \[5, 256\] here",
        lambda state, file: save_file({**state, "classifier.weight": torch.zeros(5, 9)}, file),
    ),
    "one missing": (
        "1 tensor missing, 0 unexpected .first missing 'bn1.weight'",
        lambda state, file: save_file(without(state, "bn1.weight"), file),
    ),
    "class names": ("2 class names, but a head of 5 classes", partial(save_with_names, ["a", "b"])),
    "class names no list": ("has the metadata class_names 7: expected a list of names", partial(save_with_names, 7)),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_weights_files_are_refused_in_one_line(tmp_path, monkeypatch, kind, recwarn):
    monkeypatch.chdir(tmp_path)
    message, write = BAD_FILES[kind]
    write(state_of(small_model().module), tmp_path / "weights")
    with pytest.raises(UserError, match=message) as caught:
        build(SMALL_OF_TIMM, weights="weights")
    assert "\n" not in str(caught.value)
    assert not recwarn.list, "a warning would be printed beside the line"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_truncated_files_are_refused(tmp_path, suffix):
    file = tmp_path / f"weights.{suffix}"
    state = state_of(build("basic_cnn").module)
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    whole = file.read_bytes()
    for end in [1, 8, 9, 50, 500, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(UserError):
            build("basic_cnn", weights=str(file))


def test_pretrained_weights_come_from_the_hubs_cache_and_without_them_the_refusal_is_quick(tmp_path, monkeypatch):
    nobody = "http://127.0.0.1:9"
    template = f"{nobody}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    facts = {"ENDPOINT": nobody, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path)}
    for name, value in facts.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    started = time.perf_counter()
    said = r"^the pretrained weights of timm's mobilenetv3_small_100 could not be loaded"
    with pytest.raises(UserError, match=said) as caught:
        build("mobilenet_finetuned")
    assert time.perf_counter() - started < 10
    assert all(words in str(caught.value) for words in ("--weights FILE", "--model-type mobilenet "))
    repository = "models--" + timm.get_pretrained_cfg("mobilenetv3_small_100").hf_hub_id.replace("/", "--")
    snapshot = tmp_path / repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / repository / "refs").mkdir()
    (tmp_path / repository / "refs" / "main").write_text("0" * 40)
    state = state_of(timm.create_model("mobilenetv3_small_100"))
    save_file(state, snapshot / "model.safetensors")
    built = build("mobilenet_finetuned")
    assert any("head replaced: 1000 -> 5 classes" in note for note in built.notes)
    assert built.module.conv_stem.stride == (1, 1)
    assert torch.equal(built.module.conv_stem.weight, state["conv_stem.weight"])


# --- recomputed activations ------------------------------------------------------------------------------------


def train_step(module: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], int]:
    """Return loss, gradients, buffers, and how many numbers autograd kept for the backward pass."""
    saved = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)  # dropout draws the same masks in every call
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = mean_cross_entropy(module(images), torch.arange(4))
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()], list(module.buffers()), saved


def check_step(recomputing: nn.Module, plain: nn.Module, bound_of_gradients: float = ROUNDING) -> None:
    """Check that a step of one network is that of the other, with far less kept for backward."""
    (loss, gradients, buffers, saved), (new_loss, new_gradients, new_buffers, new_saved) = (
        train_step(module) for module in (plain, recomputing)
    )
    torch.testing.assert_close((new_loss, new_buffers), (loss, buffers), rtol=0, atol=0)
    for new, gradient in zip(new_gradients, gradients, strict=True):
        assert_same_but_rounding(new, gradient, bound_of_gradients)
    assert new_saved < 0.6 * saved


@pytest.mark.parametrize("model_type", [*QUICK_MODELS, "timm:vit_tiny_patch16_224", "timm:regnety_002"])
def test_recomputing_changes_nothing_but_memory(model_type):
    plain = build(model_type).module.train()
    recomputing = copy.deepcopy(plain)
    assert enable_activation_checkpointing(recomputing) >= 2
    assert list(recomputing.state_dict()) == list(plain.state_dict())
    recomputing = copy.deepcopy(recomputing)  # a copy must run its own layers
    check_step(recomputing, plain)


def test_a_flat_stack_is_recomputed_from_pooling_to_pooling():
    torch.manual_seed(0)
    channels = [8, "M", 16, "M", 32, 32, "M"]  # timm's VGG16 has the same parts, and a hundred million weights
    plain = timm.models.vgg.VGG(channels, num_classes=5, mlp_ratio=0.01, norm_layer=nn.BatchNorm2d, drop_rate=0.5)
    recomputing = copy.deepcopy(plain)
    assert enable_activation_checkpointing(recomputing) == 3 + 2  # the poolings' stages, pre_logits and head
    check_step(recomputing, plain, bound_of_gradients=0.0)


def test_evaluation_recomputes_nothing():
    plain = build("mobilenet").module.eval()
    recomputing = copy.deepcopy(plain)
    enable_activation_checkpointing(recomputing)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(recomputing(images), plain(images))


def test_the_page_of_models_counts_parameters():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    sizes: dict[str, str] = {}
    for row in page.splitlines():
        if " million" in row:
            _, names, _, counts, *_ = row.split("|")
            sizes |= zip(re.findall(r"`(\w+)`", names), re.findall(r"([\d.]+) million", counts), strict=True)
    assert set(sizes) == set(MODELS)
    for name, size in sizes.items():
        with torch.device("meta"):
            module = new_model(name, num_classes=1000, image_size=224, loads_weights=False).module
        count = sum(parameter.numel() for parameter in module.parameters()) / 1e6
        assert f"{count:.{1 if '.' in size else 0}f}" == size, name


def test_airbench_has_the_published_size_and_work():
    """Jordan 2024: 1.97 million parameters, and 3.6e14 operations in 9.9 epochs of 50,000 images of 32 pixels."""
    module = build("airbench", num_classes=10).module
    assert round(sum(parameter.numel() for parameter in module.parameters()) / 1e6, 2) == 1.97
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, 32, 32)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(3.6e14 / (9.9 * 50_000), rel=0.05)
