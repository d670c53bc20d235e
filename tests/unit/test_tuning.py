"""Fine-tuning: what is trained, adapters against timm and peft, what a checkpoint holds, and going on from one."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import ALONE
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv, swin_transformer
from torch import nn

from tests.kit import new_model, save_built, train
from zerovision.models.build import BuiltModel
from zerovision.models.timm_models import WholeInputConv2d
from zerovision.models.weights_metadata import Description, Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.base.leaves import Leaves
from zerovision.training.checkpoint.manifest import FROZEN, read_manifest
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.config.file import read_config_file
from zerovision.training.engines.build import set_up_engine
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.recipe.tuning import Adapters, BackboneFreezer, tune

IMAGE_SIZE = 32
FACTS = {"class_names": ["a", "b", "c"], "preprocessing": Preprocessing(32, None, (0.5,) * 3, (0.5,) * 3), "extra": {}}
ADAPTED = (  # with an example of a layer that has an adapter
    ("vit_tiny_patch16_224", "blocks.3.attn.qkv"),
    ("tf_mobilenetv3_small_minimal_100", "conv_stem"),  # "same" padding
    pytest.param("mobilenetv3_small_100", "blocks.4.0.conv_pw", marks=pytest.mark.slow),
    pytest.param("resnet18", "layer4.0.conv1", marks=pytest.mark.slow),
    ("test_convnext", "stages.2.blocks.0.mlp.fc1"),
)
SHORT = {"data": "fake", "epochs": 2, "batch_size": 128, "image_size": 16, "keep_last": 9}


def built(model_type: str, word: str = "full", image_size: int = IMAGE_SIZE) -> BuiltModel:
    torch.manual_seed(0)
    members = "basic_cnn,cnn_lstm"  # of the ensemble
    return tune(new_model(model_type, num_classes=5, image_size=image_size, ensemble_members=members), word)


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def of_parts(module: nn.Module, *prefixes: str) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith(prefixes)}


def test_the_share_of_a_small_head_is_not_rounded_to_nothing():
    module = nn.Sequential()
    module.body, module.head = nn.Linear(3000, 1000, bias=False), nn.Linear(1000, 1, bias=False)
    found = tune(
        BuiltModel(module, Description("basic_cnn", None, 2, 8), head_parameter_names=frozenset({"head.weight"})),
        "head",
    )
    assert found.notes == ["--tune head: 1,000 parameters are trained, 0.0333% of all"]


# --- what is trained -------------------------------------------------------------------------------------------


def test_random_weights_are_not_kept(tmp_path):
    for changes in ({"weights": "w"}, {"pretrained": True}, {"model_type": "mobilenet_finetuned"}, {"resume": "must"}):
        check_config(TrainConfig(tune="head", **changes), FLAG_OF)
    going_on = TrainConfig(tune="head", log_dir=str(tmp_path), run_name="digits", resume="auto")
    with pytest.raises(UserError, match="random weights"):
        check_config(going_on, FLAG_OF)
    (tmp_path / "runs" / "digits" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "checkpoints" / "last").touch()
    check_config(going_on, FLAG_OF)


@pytest.mark.parametrize(
    ("model_type", "word", "prefixes"),
    [
        ("basic_cnn", "head", ["head."]),
        ("basic_cnn", "layers:1", ["head.", "blocks.2."]),
        ("cnn_lstm", "layers:2", ["head.", "lstm.", "blocks.3."]),
        ("mobilenet", "layers:2", ["classifier.", "conv_head.", "blocks.5."]),
        ("timm:resnet18", "layers:2", ["fc.", "layer4."]),
        ("timm:vit_tiny_patch16_224", "layers:2", ["head.", "norm.", "blocks.10.", "blocks.11."]),
        ("timm:convnext_atto", "layers:1", ["head.", "stages.3.blocks.1."]),
        ("timm:densenet121", "layers:1", ["classifier.", "features.denseblock4.denselayer16.", "features.norm5."]),
        ("timm:vit_tiny_patch16_224", "full", [""]),
        # Of an ensemble those of each member.
        ("ensemble", "layers:1", ["members.0.head.", "members.0.blocks.2.", "members.1.head.", "members.1.lstm."]),
    ],
)
def test_the_head_and_the_last_layers_are_trained(model_type, word, prefixes):
    model = built(model_type, word)
    assert trained(model.module) == of_parts(model.module, *prefixes)
    if word != "full":
        assert model.notes[-1].startswith(f"--tune {word}: ")


def test_a_network_with_fewer_layers_or_an_unknown_head_is_refused():
    with pytest.raises(UserError, match="--tune layers:4: there are only 3 layers before the head: use --tune full"):
        built("basic_cnn", "layers:4")
    with pytest.raises(UserError, match="--tune head: it is not known which layer of this model is its head"):
        tune(BuiltModel(nn.Linear(3, 2), Description("basic_cnn", None, 2, 8)), "head")
    # The second one standardizes the weights of its convolutions.
    for model_type, rank in (("basic_cnn", 999), ("timm:nf_resnet50", 1)):
        with pytest.raises(
            UserError, match=f"--tune lora:{rank}: no layer of this model supports an adapter of this rank"
        ):
            built(model_type, f"lora:{rank}")


@pytest.mark.parametrize("word", ["head", "layers:1", "lora:2"])
def test_frozen_batchnorms_keep_their_statistics_and_the_others_do_not(word):
    model = built("basic_cnn", word)
    model.module.blocks[0].append(nn.BatchNorm2d(32, affine=False))  # it has no parameter that could be frozen
    freezer = BackboneFreezer(model.module, model.head_parameter_names)
    freezer.start_epoch(only_head=False)
    before = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    model.module(torch.rand(4, 3, IMAGE_SIZE, IMAGE_SIZE))
    changed = {name for name, buffer in model.module.named_buffers() if not torch.equal(buffer, before[name])}
    last = {name for name in before if name.startswith("blocks.2.")}
    assert changed == (last if word == "layers:1" else set())
    freezer.start_epoch(only_head=True)
    assert not any(child.training for child in model.module.modules() if isinstance(child, nn.BatchNorm2d))


def test_statistics_that_are_the_same_everywhere_are_not_rounded_by_their_mean():
    module = nn.BatchNorm2d(1000)
    module.running_mean.copy_(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    kept = module.running_mean.clone()
    assert not torch.equal((kept + kept + kept) / 3, kept), "else this shows nothing"
    buffers = ModelBuffers(module, Leaves(1, 3))
    buffers.average(ALONE)
    assert torch.equal(module.running_mean, kept)


def test_learning_rates_of_head_and_backbone():
    config = TrainConfig(learning_rate=0.1)
    for word, rates in (("head", {1.0}), ("layers:1", {1.0, 0.1}), ("full", {1.0, 0.1})):
        model = built("basic_cnn", word)
        optimizer = build_optimizer(model.module, config, model.head_parameter_names, discriminative=True)
        assert {group["rate_scale"] for group in optimizer.param_groups} == rates
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in model.module.parameters() if p.requires_grad
        }


@pytest.mark.parametrize("head_epochs", [0, 2])
def test_a_published_backbone_has_its_own_rate_with_and_without_epochs_of_the_head(head_epochs):
    config = TrainConfig(model_type="mobilenet_finetuned", learning_rate=0.1, head_epochs=head_epochs)
    model = built("basic_cnn", "full")
    setup, _ = set_up_engine(config, model, "fp32", ALONE, compiles=False)
    assert {group["rate_scale"] for group in setup.optimizer.param_groups} == {1.0, 0.1}


def test_muon_that_would_update_nothing_is_refused():
    model = built("basic_cnn", "head")
    config, heads = TrainConfig(learning_rate=0.1, optimizer="muon"), model.head_parameter_names
    with pytest.raises(UserError, match=r"it updates only matrices .*: use --optimizer adamw"):
        build_optimizer(model.module, config, heads, discriminative=False)


# --- adapters --------------------------------------------------------------------------------------------------


def randomize_adapters(module: nn.Module) -> None:
    """Give B, which begins with zeros, other values."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)


def test_a_layer_whose_weight_the_network_reads_itself_has_no_adapter():
    model = built("timm:eva02_tiny_patch14_224", "lora:2", image_size=28).module
    model.train()(torch.rand(2, 3, 28, 28)).square().sum().backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert [name for name, parameter in adapters.items() if parameter.grad is None] == []
    assert {"attn.proj", "mlp.fc2"} <= {".".join(name.split(".")[2:4]) for name in adapters}
    assert not any("qkv" in name for name in adapters)


def test_a_network_that_does_not_work_with_adapters_is_refused():
    expected = r"--tune lora:2: this model does not work with adapters \(AttributeError: .*kernel_size.*\): use another"
    with pytest.raises(UserError, match=expected):
        built("timm:davit_tiny", "lora:2")


def test_a_convolution_of_its_whole_input_has_an_adapter():
    torch.manual_seed(0)
    module = nn.Sequential(WholeInputConv2d(3, 16, 8), nn.Flatten(), nn.Linear(16, 5))
    tune(
        BuiltModel(
            module, Description("basic_cnn", None, 2, 8), head_parameter_names=frozenset({"2.weight", "2.bias"})
        ),
        "lora:2",
    )
    randomize_adapters(module)
    images = torch.rand(2, 3, 8, 8)
    expected = module(images)
    module[0].merge()
    assert module[0].get_base_layer().weight.shape == (16, 3, 8, 8)
    torch.testing.assert_close(module[2](module[1](module[0].get_base_layer()(images))), expected)


@pytest.mark.parametrize(("name", "layer"), ADAPTED)
def test_merged_weights_compute_the_same_in_plain_timm(name, layer):
    model = built(f"timm:{name}", "lora:2")
    images = torch.rand(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    size = {"img_size": IMAGE_SIZE} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    plain = timm.create_model(name, num_classes=5, **size).eval()
    names = plain.state_dict().keys()
    begin = Adapters(model.module).merge(model.module.state_dict())
    randomize_adapters(model.module)
    merged = Adapters(model.module).merge({key: value.clone() for key, value in model.module.state_dict().items()})
    assert merged.keys() == names
    assert not torch.equal(merged[f"{layer}.weight"], begin[f"{layer}.weight"])
    plain.load_state_dict(merged)
    for convolution, (_, stride) in ((c, s) for c, s in model.description.stem_stride_changed.items()):
        plain.get_submodule(convolution).stride = (stride, stride)
    with torch.no_grad():
        ours, theirs = model.module.eval()(images), plain(images)
        plain.load_state_dict(begin)
        unadapted = plain(images)
    effect = (ours - unadapted).abs().max()
    assert effect > 0
    assert (ours - theirs).abs().max() < 1e-3 * effect


def test_merging_is_pefts_own():
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(
        new_model("basic_cnn", num_classes=5, image_size=IMAGE_SIZE).module,
        LoraConfig(r=2, lora_alpha=2, target_modules=["blocks.1.0", "blocks.2.3"]),
    )
    randomize_adapters(theirs)
    module = theirs.base_model.model
    ours = Adapters(module).merge({name: tensor.clone() for name, tensor in module.state_dict().items()})
    expected = theirs.merge_and_unload().state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_adapters_are_small_and_all_else_but_the_head_is_frozen():
    model = built("timm:vit_tiny_patch16_224", "lora:2")
    adapters = {name for name, _ in model.module.named_parameters() if "lora_" in name}
    assert trained(model.module) == adapters | model.head_parameter_names
    sizes = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
    share = sum(sizes[name] for name in adapters) / sum(sizes[name] for name in sizes.keys() - adapters)
    assert share < 0.05
    assert "adapters of rank 2 on" in model.notes[-1]
    assert "lower rank" not in model.notes[-1]
    # Adapters grow with their rank: four times as large, they are worth a word.
    larger = built("timm:vit_tiny_patch16_224", "lora:8").notes[-1]
    assert f"they are {4 * share:.1%} of the model: a lower rank keeps them small" in larger
    # The layers whose adapter would not be smaller than they are have none: here the head alone.
    assert {name.partition(".lora_A")[0] for name in adapters if "lora_A" in name} >= {
        "patch_embed.proj",
        "blocks.0.attn.qkv",
    }


# --- other image sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("image_size", "grid"), [(32, (2, 2)), ("32x96", (2, 6))])
def test_position_embeddings_are_resampled_as_timm_does_it(image_size, grid, tmp_path):
    source = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64).state_dict()
    save_file(source, tmp_path / "weights")
    weights = str(tmp_path / "weights")
    model = new_model("timm:vit_tiny_patch16_224", num_classes=3, image_size=image_size, weights=weights)
    found = model.module.state_dict()
    expected = resample_abs_pos_embed(source["pos_embed"], grid, num_prefix_tokens=1)
    assert torch.equal(found["pos_embed"], expected)
    others = found.keys() - {"pos_embed", *model.head_parameter_names}
    assert all(torch.equal(found[name], source[name]) for name in others)
    tokens = 1 + grid[0] * grid[1]
    assert f"adapted to this model's input: pos_embed [1, 17, 192] -> [1, {tokens}, 192]" in model.notes
    assert any("head replaced: 5 -> 3" in note for note in model.notes)


def test_relative_position_tables_are_resampled_as_timm_does_it(tmp_path):
    name, table = "swin_tiny_patch4_window7_224", "layers.3.blocks.0.attn.relative_position_bias_table"
    source = timm.create_model(name, num_classes=3).state_dict()
    save_file(source, tmp_path / "weights")
    found = new_model(f"timm:{name}", num_classes=3, image_size=96, weights=str(tmp_path / "weights")).module
    oracle = timm.create_model(name, num_classes=3, img_size=96)
    oracle.load_state_dict(swin_transformer.checkpoint_filter_fn(source, oracle), strict=False)
    assert found.state_dict()[table].shape == (25, 24), "windows of 3 patches instead of 7"
    for key, expected in oracle.state_dict().items():
        assert torch.equal(found.state_dict()[key], expected), key


def publish(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let timm find these weights of 3 classes as if they were on the hub."""
    overlay = {"file": file, "num_classes": 3, "url": "", "hf_hub_id": None}
    create = functools.partial(timm.create_model, pretrained_cfg_overlay=overlay)
    monkeypatch.setattr("zerovision.models.timm_models.timm.create_model", create)


@pytest.mark.parametrize("pretrained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_embeddings_that_timm_does_not_resample_are_told_with_their_size(pretrained, tmp_path, monkeypatch):
    name = "cait_xxs24_224"
    path, size = str(tmp_path / "weights.safetensors"), "use --image-size 64$"
    save_built(Path(path), new_model(f"timm:{name}", num_classes=3, image_size=64), **FACTS)
    if pretrained:
        size = "--image-size 224 --image-channels 3"
        publish(path, monkeypatch)
    with pytest.raises(UserError, match=size) as caught:
        new_model(
            f"timm:{name}", num_classes=3, image_size=96, pretrained=pretrained, weights="" if pretrained else path
        )
    assert "different model" not in str(caught.value)


def test_published_weights_that_are_resampled_are_told(tmp_path, monkeypatch):
    name, file = "vit_tiny_patch16_224", tmp_path / "weights.safetensors"
    save_file(timm.create_model(name, num_classes=3).state_dict(), file)
    publish(str(file), monkeypatch)
    told = f"timm:{name}: adapted from images of 224 pixels to 96"
    for size in (96, 224):
        notes = new_model(f"timm:{name}", num_classes=3, image_size=size, pretrained=True).notes
        assert (told in notes) == (size == 96)


def test_a_stem_of_another_stride_is_told(tmp_path):
    save_built(tmp_path / "weights", new_model("basic_cnn", num_classes=3, image_size=60), **FACTS)
    for size, told in ((64, True), (32, False)):
        notes = new_model("basic_cnn", num_classes=3, image_size=size, weights=str(tmp_path / "weights")).notes
        found = [note for note in notes if note.startswith("blocks.0.0 has a stride of 2, but had 1 when these")]
        assert len(found) == told, notes


def test_another_network_is_still_refused(tmp_path):
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=5).state_dict(), tmp_path / "weights")
    with pytest.raises(UserError, match="belongs to a different model than 'timm:vit_small_patch16_224'"):
        new_model("timm:vit_small_patch16_224", num_classes=5, image_size=32, weights=str(tmp_path / "weights"))


# --- whole runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A run's weights of basic_cnn with 7 classes; statistics and normalization are not those of a new run."""
    torch.manual_seed(3)
    model = new_model("basic_cnn", num_classes=7, image_size=16)
    for _ in range(3):
        model.module.train()(torch.rand(8, 3, 16, 16))
    path = tmp_path_factory.mktemp("source") / "weights.safetensors"
    images = Preprocessing(16, None, mean=(0.4,) * 3, std=(0.1,) * 3)
    save_built(path, model, class_names=[*"abcdefg"], preprocessing=images, extra={})
    return path


HEAD_FIRST = {"model_type": "mobilenet_finetuned", "head_epochs": 1, "image_size": 8}
HEAD_FIRST |= {"save_every_steps": 1, "keep_last": 99}


@pytest.fixture(scope="module")
def mobilenets(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mobilenet") / "weights"
    torch.manual_seed(0)
    save_file(new_model("mobilenet", num_classes=10, image_size=8).module.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def head_first(logs, mobilenets) -> Path:
    return train(logs, "head-first", **SHORT | HEAD_FIRST, weights=str(mobilenets))


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.mark.parametrize(
    ("word", "averages"),
    [pytest.param("head", {}, marks=pytest.mark.slow), ("lora:2", {"ema": 0.8, "lookahead": 3})],
)
def test_a_run_keeps_the_frozen_tensors_and_goes_on_with_the_same_bytes(word, averages, logs, source, capsys):
    """The weights are for RGB; the first layer of a run on grey images is adapted, and frozen as that."""
    name = word.replace(":", "-")
    whole = train(logs, name, tune=word, **SHORT | averages, weights=str(source), image_channels=1)
    before, after = load_file(source), load_file(whole / "model.safetensors")
    before["blocks.0.0.weight"] = adapt_input_conv(1, before["blocks.0.0.weight"])
    assert after.keys() == before.keys()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    adapted = {f"blocks.{block}.{layer}.weight" for block in range(3) for layer in (0, 3)} if word != "head" else set()
    assert changed == {"head.weight", "head.bias"} | adapted
    file = str(whole / "model.safetensors")
    new_model("basic_cnn", num_classes=10, image_size=16, image_channels=1, weights=file)

    checkpoint = whole / "checkpoints" / "step-00001-0000000"
    facts = read_manifest(checkpoint).frozen
    file = checkpoint / FROZEN
    assert hashlib.sha256(file.read_bytes()).hexdigest() == facts.sha256
    assert sum(path.stat().st_size for path in checkpoint.glob("shard*")) < file.stat().st_size / 4

    # The starting weights do not matter any more: they are in the checkpoint's file.
    same = {"image_channels": 1, "resume": str(checkpoint), **averages}
    resumed = train(logs, f"{name}-resumed", tune=word, **SHORT | same)
    for path in ("model.safetensors", "checkpoints/step-00002-0000000/shard-00000.safetensors"):
        assert (resumed / path).read_bytes() == (whole / path).read_bytes()
    assert read_config_file(resumed / "config.json")["weights"] == str(source)
    with pytest.raises(AssertionError):
        train(logs, f"{name}-other", tune="full", **SHORT | same)
    assert f"was made with --tune '{word}', but this run has 'full'" in capsys.readouterr().err
    *content, last = file.read_bytes()
    file.write_bytes(bytes([*content, last ^ 1]))
    with pytest.raises(AssertionError):
        train(logs, f"{name}-damaged", tune=word, **SHORT | same)
    assert f"{file.name} is damaged: its sha256 does not match" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["step-00000-0000007", "step-00001-0000000", "step-00001-0000001"])
def test_a_run_goes_on_around_the_moment_at_which_the_backbone_joins(checkpoint, logs, mobilenets, head_first):
    changes = {**HEAD_FIRST, "weights": str(mobilenets), "resume": str(head_first / "checkpoints" / checkpoint)}
    resumed = train(logs, f"head-first-{checkpoint}", **SHORT | changes)
    assert (resumed / "model.safetensors").read_bytes() == (head_first / "model.safetensors").read_bytes()
