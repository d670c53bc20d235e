"""scripts/publish.py: what it would send is what timm loads, and what the hub says becomes one line."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from zerovision.commands import run_command
from zerovision.models.build import build_model
from zerovision.models.sides import ImageSize, sides
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.checkpoint.weights import load_model, preprocess, save_weights

TOKEN = "hf_secretsecretsecret"


def make_run(folder: Path, model: str, side: ImageSize, **preprocessing) -> Path:
    """What a finished run leaves, of random weights."""
    folder.mkdir()
    torch.manual_seed(0)
    built = build_model(model, num_classes=3, image_size=side)
    plain = Preprocessing(side, None, mean=(0.4,) * 3, std=(0.3,) * 3)
    save_weights(
        folder / "model.safetensors",
        built.module.state_dict(),
        description=built.description,
        class_names=["cat", "cow", "dog"],
        preprocessing=replace(plain, **preprocessing),
        extra={"epoch": 1},
    )
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("license_name: to-be-filled-in\n")
    return folder


def published(*words: object) -> tuple[int, str, str, mock.Mock]:
    """Run the script without a network: exit code, output, errors, and what the hub was asked for."""
    hub, output, errors = mock.create_autospec(HfApi, instance=True), io.StringIO(), io.StringIO()
    with (
        mock.patch("zerovision.delivery.publish.HfApi", return_value=hub),
        mock.patch.object(huggingface_hub, "get_token", return_value=TOKEN),
        mock.patch("sys.argv", ["publish.py", *map(str, words)]),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        return run_command("publish"), output.getvalue(), errors.getvalue(), hub


@pytest.mark.parametrize(
    ("model", "side", "preparation"),
    [
        ("timm:resnet10t", 64, {"resize_size": 72}),
        ("timm:vit_tiny_patch16_224", 96, {}),
        ("timm:mobilenetv3_small_050", 64, {"fit": "pad"}),
        ("timm:mobilenetv3_small_050", "64x96", {"fit": "pad"}),
        ("timm:mobilenetv3_small_050", "96x64", {"resize_size": "109x73"}),  # both sides by 0.875, rounded down
        ("timm:resnet10t", "64x160", {"resize_size": "67x168"}),  # by 0.95
        ("timm:vit_tiny_patch16_224", "32x64", {}),
    ],
)
def test_timm_loads_what_is_sent(model, side, preparation, tmp_path):
    run = make_run(tmp_path / "run", model, side, **preparation)
    code, output, errors, hub = published(run, "my-team/photos")
    assert (code, errors) == (0, "")
    assert output.endswith("published    https://huggingface.co/my-team/photos\n")
    hub.create_repo.assert_called_once_with("my-team/photos", private=True, exist_ok=True)
    (repository, operations), _ = hub.create_commit.call_args
    (tmp_path / "hub").mkdir()
    for one in operations:
        sent = one.path_or_fileobj
        (tmp_path / "hub" / one.path_in_repo).write_bytes(sent if isinstance(sent, bytes) else Path(sent).read_bytes())
    names = ["README.md", "class_map.txt", "config.json", "model.safetensors"]
    assert (repository, sorted(path.name for path in (tmp_path / "hub").iterdir())) == ("my-team/photos", names)

    loaded = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    ours, metadata = load_model(run / "model.safetensors")
    picture = Image.effect_noise((200, 150), 60).convert("RGB")
    transform = create_transform(**resolve_model_data_config(loaded), is_training=False)
    images = transform(picture)[None]
    assert images.shape[2:] == sides(side)
    with torch.no_grad():
        assert torch.equal(loaded(images), ours(images))
    assert loaded.pretrained_cfg["label_names"] == ["cat", "cow", "dog"]
    # torchvision resizes pictures for timm, and tensors for us: edges differ by a level of 255 or so.
    assert (images - preprocess(metadata)(picture)[None]).abs().mean() < 0.05


def test_a_dry_run_sends_nothing_and_says_what_timm_cannot_load(tmp_path):
    run = make_run(tmp_path / "run", "timm:resnet10t", 32)
    code, output, errors, hub = published(run, "my-team/photos", "--dry-run")
    assert (code, errors, hub.mock_calls) == (0, "", [])
    lines = output.splitlines()
    assert lines[0].startswith("note: without config.json: timm would give its first layer the usual stride")
    assert lines[1] == "note: the licence in README.md is still to-be-filled-in"
    assert [line.split(",")[0] for line in lines[2:5]] == [
        *("would send model.safetensors", "would send README.md", "would send class_map.txt"),
    ]
    assert lines[5:] == ["nothing was sent to my-team/photos (--dry-run)"]


def test_a_size_that_timm_does_not_compute_is_a_note(tmp_path):
    run = make_run(tmp_path / "run", "timm:resnet10t", "64x96", resize_size="80x100")
    code, output, errors, _ = published(run, "my-team/photos", "--dry-run")
    assert (code, errors) == (0, "")
    assert output.startswith("note: without config.json: timm cuts off the same share of height and width; ")


@pytest.mark.parametrize("name", ["photos", "a/b/c", "my team/photos", "https://huggingface.co/a/b", "a/b..c", "/", ""])
def test_a_wrong_name_is_one_line(name, tmp_path):
    code, output, errors, hub = published(make_run(tmp_path / "run", "basic_cnn", 16), name)
    assert (code, output, hub.mock_calls) == (2, "", [])
    assert errors == (
        f"publish: {name!r} is no name on the hub: give ORG/NAME, of letters, digits, '-', '_' and '.', such as "
        "my-team/photos.\n"
    )


def test_what_the_hub_refuses_is_one_line_without_the_token(tmp_path):
    run = make_run(tmp_path / "run", "basic_cnn", 16)
    refusal = HfHubHTTPError(f"403 Forbidden\nfor token {TOKEN}", response=mock.Mock())
    with mock.patch.object(mock, "create_autospec", return_value=mock.Mock(create_repo=mock.Mock(side_effect=refusal))):
        code, _, errors, _ = published(run, "my-team/photos", "--public")
    assert code == 2
    assert errors.startswith(
        "publish: 'my-team/photos' was not published: HfHubHTTPError, 403 Forbidden for token ***."
    )
    assert (errors.count("\n"), TOKEN in errors) == (1, False)
    (run / "README.md").unlink()
    code, _, errors, _ = published(run, "my-team/photos", "--dry-run")
    assert (code, errors) == (
        2,
        f"publish: '{run}' has no README.md, the model card, which a run writes when it finishes.\n",
    )
