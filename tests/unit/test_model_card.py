"""The model card as the hub's library reads it, and scripts/publish.py: what it would send is what timm loads."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from made_runs import end, epoch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from tests.kit import ALONE, call, new_model, save_built
from zerovision.delivery.calibration import calibration_file
from zerovision.delivery.publish import write_model_card
from zerovision.models import ImageSize, sides
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base import plugins
from zerovision.training.base.files import sha256_of, write_json
from zerovision.training.base.plugins import load_plugins
from zerovision.training.checkpoint.weights import load_model, preprocess, save_weights
from zerovision.training.config import TrainConfig
from zerovision.training.config.command_line import parse_args
from zerovision.training.config.values import OF_ONE_RUN, launch_command
from zerovision.training.data.reading.sources import Source
from zerovision.training.observe.evaluation import describe_scores, write_scores
from zerovision.training.tasks.labels import OneLabel

ENVIRONMENT = {
    "ranks": 8,
    "ranks_per_machine": 8,
    "device": "8 x NVIDIA H100",
    "python": "3.11.7",
    "packages": {"torch": "2.15.0"},
    "precision": "bf16",
    "data_fingerprint": "0322",
    "git_commit": "abc",
    "git_has_changes": False,
    "training_images": 1437,
}
CONFIG = TrainConfig(model_type="mobilenet", learning_rate=0.004, label_smoothing=0.0, data="~/my photos", run_name="r")


def write_lines(folder: Path, *lines: dict) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two classes, one with a hostile name."""
    built = new_model("mobilenet", num_classes=2, image_size=32)
    names = ["cat", "a|b`<script>"]
    write_json(tmp_path / "config.json", dataclasses.asdict(CONFIG))
    (tmp_path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    write_lines(tmp_path, end(40, 1.0) | {"images_per_second": 310.4})
    facts = {"class_names": names, "preprocessing": Preprocessing(32, None, mean=(0.5,) * 3, std=(0.5,) * 3)}
    save_built(tmp_path / "model.safetensors", built, **facts, extra={"epoch": 3})
    recorder = OneLabel(2).recorder()
    logits, labels = torch.tensor([[2.0, 0.0], [0.5, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    recorder.add(logits, labels, torch.ones(3), torch.arange(3))
    scores = recorder.gather(ALONE)
    write_scores(tmp_path / "evaluation", {"epoch": 3, "split": "val"} | describe_scores(scores, names, Source()))
    return tmp_path


def card_of(run: Path) -> str:
    return write_model_card(run).read_text(encoding="utf-8")


def test_a_run_that_was_given_more_epochs_says_so(run: Path):
    config = dataclasses.replace(CONFIG, epochs=4)
    write_json(run / "config.json", dataclasses.asdict(config))
    told = "Up to epoch 2 this was a run of 2 epochs."
    for epochs in ((4, 4), (2, 2)):
        write_lines(run, *(epoch(number, 0.5, epochs=of) for number, of in enumerate((*epochs, 4, 4), start=1)))
        assert (told in card_of(run)) == (epochs == (2, 2))
    write_lines(run, *(epoch(number, 0.5, epochs=of) for number, of in ((1, 2), (2, 2), (2, 4))))
    assert "Up to epoch 1 this was a run of 2 epochs." in card_of(run)


def test_the_hubs_library_reads_the_front_matter(run: Path):
    card = ModelCard.load(write_model_card(run))
    data = card.data.to_dict()
    assert data["pipeline_tag"] == "image-classification"
    assert (data["library_name"], data["license"], data["license_name"]) == ("timm", "other", "to-be-filled-in")
    assert "zerovision, which trained it, is under the Apache License 2.0" in card.text, "its own, not the weights'"
    results = {one.metric_name: one for one in card.data.eval_results}
    found = results["top-1"]
    assert (found.metric_value, found.dataset_name, found.dataset_split) == (pytest.approx(2 / 3), "my photos", "val")
    assert "mAP" not in results
    path = run / "evaluation" / "scores.json"
    write_json(path, json.loads(path.read_text()) | {"map": 0.75})
    results = {one.metric_name: one for one in ModelCard.load(write_model_card(run)).data.eval_results}
    assert results["mAP"].metric_value == 0.75
    assert "| top-1 | 66.67 % [20.77, 93.85] |" in card.text
    assert "top-5" not in card.text, "of few classes it says nothing"
    assert "which was chosen for its top-1 on these" in card.text
    assert "310 images/s" in card.text
    assert "Global batch 128" in card.text
    assert "`a|b'<script>`" in card.text, "shown as code, which nobody runs"


def test_weights_of_the_hub_are_named_by_their_repository(run: Path):
    revision = "a" * 40
    weights = f"/home/me/.cache/hub/models--team--net/snapshots/{revision}/model.safetensors"
    write_json(run / "config.json", dataclasses.asdict(dataclasses.replace(CONFIG, weights=weights)))
    text = card_of(run)
    assert f"launch_distributed.sh timm:hf-hub:team/net@{revision} ddp 8" in text
    assert "models--" not in text


def test_a_calibration_is_in_the_card(run: Path):
    weights = run / "model.safetensors"
    facts = {"temperature": 1.5, "threshold": 0.625, "ece_before": 0.1, "ece": 0.02, "coverage": 0.9, "accuracy": 0.75}
    facts |= {"flip": False, "shift_pixels": 0, "data": "digits", "split": "val", "samples": 3}
    for digest, is_told in (("of other weights", False), (sha256_of(weights), True)):
        write_json(calibration_file(weights), facts | {"weights_sha256": digest})
        text = card_of(run)
        assert "average" not in text.partition("## Recipe")[0]
        assert ("divide the logits by 1.5000" in text) == is_told
        assert ("90.00 % of those images are not rejected, and 75.00 % of them are right." in text) == is_told
    write_json(calibration_file(weights), facts | {"flip": True, "weights_sha256": digest})
    assert "before the softmax and average over plain and mirrored images (--flip), which takes" in card_of(run)


def test_a_run_without_its_environment_has_no_card(run: Path):
    (run / "environment.json").unlink()
    assert write_model_card(run) is None
    assert not (run / "README.md").exists()


@pytest.mark.parametrize("model", ["mobilenet", "timm:test_vit"])
def test_the_code_for_timm_runs_and_gives_our_logits(run: Path, monkeypatch, model: str):
    """Of a vision transformer it names the size."""
    built = new_model(model, num_classes=2, image_size=32)
    _, metadata = load_model(run / "model.safetensors")
    facts = metadata | {"description": built.description}
    save_weights(run / "model.safetensors", built.module.state_dict(), **facts)
    code = re.search(r"```python\n(.*?)```", card_of(run), re.DOTALL)
    monkeypatch.chdir(run)
    exec(code[1], names := {})
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(names["model"](images), built.module.eval()(images))


def test_a_class_named_in_bytes_that_are_no_text_is_in_the_card(run: Path):
    module, metadata = load_model(run / "model.safetensors")
    save_weights(run / "model.safetensors", module.state_dict(), **metadata | {"class_names": ["cat", "caf\udce9"]})
    assert b"caf\xe9" in write_model_card(run).read_bytes()


def repeated(words: list[str]) -> TrainConfig:
    """Return the configuration of a launcher's command."""
    _, _, model, strategy, _, batch, epochs, *flags = words
    given = ["--model-type", model, "--strategy", strategy, "--batch-size", batch, "--epochs", epochs]
    return parse_args([*given, *flags])[0]


def test_the_command_repeats_the_configuration(run: Path):
    text = card_of(run)
    _, script, _, _, ranks, *_ = words = shlex.split(re.search(r"^bash .*$", text, re.MULTILINE)[0])
    assert (script, ranks) == ("scripts/launch_distributed.sh", "8")
    assert repeated(words) == dataclasses.replace(CONFIG, run_name="", data="my photos")


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("/srv/people/jane/photos", "photos"),
        ("../people/jane/photos/", "photos"),
        ("people/jane/photos.csv", "photos.csv"),
        ("npz:/srv/people/jane/digits.npz", "npz:digits.npz"),
        ("hf:people/jane:train", "hf:people/jane:train"),
        ("s3://people/jane/photos", "s3://people/jane/photos"),
    ],
)
def test_no_folder_of_the_machine_is_in_the_card(run: Path, data: str, shown: str, monkeypatch):
    monkeypatch.setattr(plugins, "_LOADED", {})  # else all weights that are saved later would name the file
    paths = {one.name: "./people/jane/x.csv" for one in dataclasses.fields(TrainConfig) if one.metadata.get("is_path")}
    del paths["data"]
    plugin = run / "people" / "jane" / "mine.py"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    others = {"log_dir": "/srv/people/jane/logs", "distill": "kl:2", "plugin": load_plugins(str(plugin))}
    config = dataclasses.replace(CONFIG, data=data, **paths, **others)
    write_json(run / "config.json", dataclasses.asdict(config))
    about = {"weights_sha256": sha256_of(run / "model.safetensors"), "data": data, "split": "val", "samples": 3}
    facts = {"temperature": 1.5, "threshold": 0.5, "ece_before": 0.1, "ece": 0.0, "coverage": 0.9, "accuracy": None}
    write_json(calibration_file(run / "model.safetensors"), facts | {"flip": False, "shift_pixels": 0} | about)
    text = card_of(run)
    assert f"trained with zerovision on `{shown}`" in text
    assert f"(`{shown}`, val)" in text
    flags = shlex.split(re.search(r"^bash (.*)$", text, re.MULTILINE)[1])
    assert flags.count(f"--data={shown}") == 1
    assert {"--teacher=x.csv", "--weights=x.csv", "--class-weights=x.csv"} < {*flags}
    assert f"--plugin=mine.py@{sha256_of(plugin)[:16]}" in flags
    assert "people/jane" not in text.replace(shown, "")


def test_what_was_chosen_of_the_recipe_is_in_the_card(run: Path):
    chosen = {"ema": 0.99, "mixup": 0.4, "lookahead": 6, "fallback_optimizer": "sgd"}
    write_json(run / "config.json", dataclasses.asdict(dataclasses.replace(CONFIG, workers="3", **chosen)))
    text = card_of(run)
    _, _, recipe = text.partition("## Recipe")
    rows = dict(re.findall(r"^\| (\S+) \| (\S*) \|$", recipe.replace("\\_", "_"), re.MULTILINE))
    assert {name: rows[name] for name in chosen} == {name: str(value) for name, value in chosen.items()}
    assert "The weights are an exponential moving average" in recipe
    assert rows.keys().isdisjoint({"cutmix", "workers", "data", "run_name"})
    assert [*rows].index("epochs") == 2, "below the heading, the table's first row"


def test_values_of_a_preset_that_were_overridden_are_repeated():
    words = "--preset fashion-mnist --label-smoothing 0.1 --lookahead 0 --precision auto"
    config = parse_args(words.split())[0]
    assert repeated(launch_command(config, 2, 2, OF_ONE_RUN)) == dataclasses.replace(config, preset="")


def test_a_value_that_looks_like_a_flag_is_repeated():
    config = TrainConfig(class_weights="-cat=2,dog=1")
    assert repeated(launch_command(config, 2, 2)).class_weights == config.class_weights


def test_several_machines_have_their_launcher():
    config = TrainConfig(model_type="vgg", batch_size=4, epochs=7, activation_checkpointing=True)
    assert " ".join(launch_command(config, 32, 8)) == (
        "bash scripts/launch_multi_node.sh vgg ddp 4 8 4 7 --activation-checkpointing=true"
    )


@pytest.mark.parametrize("diverged", [None, "the validation loss is nan"])
def test_a_divergence_is_named(run: Path, diverged: str | None):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(epoch(4, 0.5, diverged=diverged)) + "\n")
    sentence = "**The training diverged**: after its last epoch (4) the validation loss is nan."
    assert (sentence in card_of(run)) == bool(diverged)


def test_a_card_that_the_user_took_over_is_left_alone(run: Path):
    card = write_model_card(run)
    text = card.read_text(encoding="utf-8")
    card.write_text(text.replace("310 images/s", "slow"), encoding="utf-8")
    write_model_card(run)
    assert "310 images/s" in card.read_text(encoding="utf-8"), "ours is written anew"
    card.write_text("# mine\n", encoding="utf-8")
    assert write_model_card(run) is None
    assert card.read_text(encoding="utf-8") == "# mine\n"


TOKEN = "hf_secretsecretsecret"


def make_run(folder: Path, model: str, side: ImageSize, **preprocessing) -> Path:
    """What a finished run leaves, of random weights."""
    folder.mkdir()
    torch.manual_seed(0)
    built = new_model(model, num_classes=3, image_size=side)
    prepared = Preprocessing(side, **{"resize_size": None, "mean": (0.4,) * 3, "std": (0.3,) * 3} | preprocessing)
    facts = {"class_names": ["cat", "cow", "dog"], "preprocessing": prepared}
    save_built(folder / "model.safetensors", built, **facts, extra={"epoch": 1})
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("license_name: to-be-filled-in\n")
    return folder


def published(*words: object) -> tuple[int, str, str, mock.Mock]:
    """Run the script without a network: exit code, output, errors, and what the hub was asked for."""
    hub = mock.create_autospec(HfApi, instance=True)
    with (
        mock.patch("zerovision.delivery.publish.HfApi", return_value=hub),
        mock.patch.object(huggingface_hub, "get_token", return_value=TOKEN),
    ):
        return *call("publish", *words), hub


def write_sent(hub: mock.Mock, folder: Path) -> None:
    """Write the files that the hub was given, as who downloads them has them."""
    folder.mkdir()
    for one in hub.create_commit.call_args.args[1]:
        sent = one.path_or_fileobj
        (folder / one.path_in_repo).write_bytes(sent if isinstance(sent, bytes) else Path(sent).read_bytes())


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
    write_sent(hub, tmp_path / "hub")
    names = ["README.md", "class_map.txt", "config.json", "model.safetensors"]
    repository = hub.create_commit.call_args.args[0]
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


@pytest.mark.parametrize(("model", "side"), [("timm:resnet10t", 64), ("basic_cnn", 16)])
def test_what_is_sent_labels_images_as_the_run_does(model, side, tmp_path):
    """Named by its folder, as in its card, or by its file."""
    run, sent = make_run(tmp_path / "run", model, side), tmp_path / "sent"
    write_sent(published(run, "my-team/photos")[3], sent)
    assert (sent / "config.json").exists() == model.startswith("timm:")
    picture = tmp_path / "photo.png"
    Image.effect_noise((80, 70), 60).convert("RGB").save(picture)
    expected = call("predict", run, picture, "--format", "json")
    assert (expected[0], expected[2]) == (0, "")
    for given in (sent, sent / "model.safetensors"):
        assert call("predict", given, picture, "--format", "json") == expected
    assert f"folder '{sent}' is not a run: it has no run's config.json." in call("report", sent)[2]


def test_a_dry_run_sends_nothing_and_says_what_timm_cannot_load(tmp_path):
    run = make_run(tmp_path / "run", "timm:resnet10t", 32)
    code, output, errors, hub = published(run, "my-team/photos", "--dry-run")
    assert (code, errors, hub.mock_calls) == (0, "", [])
    lines = output.splitlines()
    assert lines[0].startswith("note: config.json is left out: timm would use the usual stride in its first layer")
    assert lines[1] == f"note: the license in {run / 'README.md'} is still to-be-filled-in"
    sent = [f"would upload {name}" for name in ("model.safetensors", "README.md", "class_map.txt")]
    assert [line.split(",")[0] for line in lines[2:]] == [*sent, "nothing was uploaded to my-team/photos (--dry-run)"]


def test_a_calibration_of_these_weights_is_sent_with_them(tmp_path):
    run = make_run(tmp_path / "run", "basic_cnn", 16)
    facts = {"temperature": 1.5, "threshold": 0.5, "flip": False, "shift_pixels": 0, "weights_sha256": "of others"}
    (run / "model.calibration.json").write_text(json.dumps(facts))
    assert "model.calibration" not in published(run, "my-team/photos", "--dry-run")[1]
    facts["weights_sha256"] = sha256_of(run / "model.safetensors")
    (run / "model.calibration.json").write_text(json.dumps(facts))
    assert "would upload model.calibration.json, " in published(run, "my-team/photos", "--dry-run")[1]


def test_a_size_that_timm_does_not_compute_is_a_note(tmp_path):
    run = make_run(tmp_path / "run", "timm:resnet10t", "64x96", resize_size="80x100")
    code, output, errors, _ = published(run, "my-team/photos", "--dry-run")
    assert (code, errors) == (0, "")
    assert output.startswith("note: config.json is left out: timm cuts off the same share of height and width; ")


def test_what_the_hub_refuses_is_one_line_without_the_token(tmp_path):
    run = make_run(tmp_path / "run", "basic_cnn", 16)
    refusal = HfHubHTTPError(f"403 Forbidden\nfor token {TOKEN}", response=mock.Mock())
    with mock.patch.object(mock, "create_autospec", return_value=mock.Mock(create_repo=mock.Mock(side_effect=refusal))):
        code, _, errors, _ = published(run, "my-team/photos", "--public")
    assert code == 2
    said = "publish: 'my-team/photos' was not published: HfHubHTTPError, 403 Forbidden for token ***."
    assert (errors.startswith(said), errors.count("\n"), TOKEN in errors) == (True, 1, False)
    (run / "README.md").unlink()
    code, _, errors, _ = published(run, "my-team/photos", "--dry-run")
    said = f"publish: '{run}' has no README.md, the model card, which a run writes when it finishes.\n"
    assert (code, errors) == (2, said)
