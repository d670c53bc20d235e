"""One real run through the launcher on the handwritten digits, and everything that it must leave."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import assert_success, read_metrics, run_command, train_alone, train_here
from PIL import Image
from ranks import free_port
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, classification_report, confusion_matrix, log_loss, top_k_accuracy_score

from tests.kit import ROUNDING, assert_same_but_rounding, new_model
from tests.stored_tensors import whole_tensors
from zerovision import __version__
from zerovision.training.base.errors import DIVERGED_EXIT_CODE
from zerovision.training.base.run_folder import LEARNING_RATE
from zerovision.training.checkpoint.manifest import read_manifest
from zerovision.training.checkpoint.shards import CheckpointReader
from zerovision.training.checkpoint.weights import load_model, preprocess
from zerovision.training.config.command_line import parse_args
from zerovision.training.data import DataOptions, load_data
from zerovision.training.engines.deepspeed import read_strategy_json
from zerovision.training.tasks.labels import OneLabel
from zerovision.training.world.world import World

EPOCHS = 3
DATA = DataOptions(image_size=16)  # the digits, twice as large as they are


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(log folder, what the launcher printed) of a run over two ranks, started from the launcher's own folder."""
    logs = tmp_path_factory.mktemp("logs")
    words = ["basic_cnn", "ddp", "2", "16", str(EPOCHS), "--learning-rate", "0.004", "--deterministic"]
    words += ["--image-size", str(DATA.image_size), "--run-name", "digits", "--log-dir", str(logs)]
    result = assert_success(run_command("bash", "-c", 'cd scripts && bash launch_distributed.sh "$@"', "-", *words))
    return logs, result


@pytest.fixture(scope="module")
def run_folder(trained):
    return trained[0] / "runs" / "digits"


@pytest.fixture(scope="module")
def predictions(run_folder):
    """(labels [360], probabilities [360, 10] as float64) of the saved file on the held-out digits, plain PyTorch."""
    model, metadata = load_model(run_folder / "model.safetensors")
    assert (run_folder / "class_map.txt").read_text().split("\n") == [*metadata["class_names"], ""]
    data = load_data(DATA)
    images = torch.stack([data.val[0, index][0] for index in range(len(data.val))])
    with torch.no_grad():
        probabilities = model(images).double().softmax(1).numpy()
    assert metadata["class_names"] == data.class_names
    return data.val.source.labels.numpy(), probabilities


def test_says_what_it_runs_on_and_where_everything_is(trained, run_folder):
    logs, result = trained
    assert "no GPU found: running 2 CPU ranks over gloo" in result.stderr
    assert "global batch 32 = 16 per CPU rank x 2 CPU ranks x 1 accumulation step;" in result.stdout
    assert "--deterministic repeats a run on the same hardware" in result.stdout
    for path in (run_folder / "model.safetensors", logs / "training.log", logs / "tensorboard"):
        assert str(path) in result.stdout
        assert path.exists()
    assert "Traceback" not in result.stdout + result.stderr


def test_says_where_the_time_went(trained, run_folder):
    (end,) = read_metrics(run_folder, "end")
    shares = end["time_shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for name, share in shares.items()), shares
    assert shares["forward"] + shares["backward"] > 0.2
    assert (
        f"time         data {100 * shares['data']:.0f} %, forward {100 * shares['forward']:.0f} %" in trained[1].stdout
    )
    epochs, steps = read_metrics(run_folder, "epoch"), read_metrics(run_folder, "step")
    in_epochs = sum(entry["seconds"] for entry in epochs)
    assert in_epochs <= end["seconds"] + 0.1, "what lies between the epochs comes on top"
    assert end["images_per_second"] == pytest.approx(EPOCHS * 1437 / end["seconds"])
    for entry in epochs:
        assert entry["images_per_second"] == pytest.approx(1437 / entry["seconds"]), "padding is not counted"
    counted = [point["images_per_second"] * point["seconds"] for point in steps]
    assert sum(counted) == pytest.approx(EPOCHS * 1437)
    for point in steps:
        assert sum(point["time_shares"].values()) == pytest.approx(1.0)
        assert point["time_shares"].keys() == shares.keys()
        assert 0 < point["memory_allocated_bytes"] <= point["memory_bytes"]
        assert point["tflops_per_second"] > 0
        assert point["mfu"] is None, "no peak is known of a CPU"
        assert point["disk_free_bytes"] == pytest.approx(shutil.disk_usage(run_folder).free, rel=0.2)
        assert point["cpu_utilization"].keys() == {socket.gethostname()}
    assert 0 < max(point["cpu_utilization"][socket.gethostname()] for point in steps) <= 1


def test_learns(run_folder):
    epochs = read_metrics(run_folder, "epoch")
    assert [entry["epoch"] for entry in epochs] == list(range(1, EPOCHS + 1))
    assert epochs[-1]["val_top1"] > 0.8
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]


def test_reported_accuracy_is_that_of_the_saved_file_by_scikit_learn(run_folder, predictions, trained):
    labels, probabilities = predictions
    best = max(read_metrics(run_folder, "epoch"), key=lambda entry: entry["val_top1"])
    assert best["val_samples"] == len(labels) == 360
    assert best["val_top1"] == pytest.approx(accuracy_score(labels, probabilities.argmax(1)), abs=1e-12)
    assert best["val_top5"] == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5), abs=1e-12)
    assert best["val_loss"] == pytest.approx(log_loss(labels, probabilities), rel=ROUNDING)
    assert f"top-1 {100 * best['val_top1']:.2f} % on 360 held-out images" in trained[1].stdout


def test_weights_predict_from_an_image_file(run_folder, predictions, tmp_path):
    """The README's four lines, on a picture file that a user might have."""
    _, probabilities = predictions
    model, metadata = load_model(run_folder / "model.safetensors")
    data = load_data(DATA)
    pixels = data.val.source.images[0].expand(3, -1, -1).permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    image = preprocess(metadata)(Image.open(tmp_path / "digit.png"))
    with torch.no_grad():
        ours = model(image[None]).double().softmax(1).numpy()[0]
    np.testing.assert_allclose(ours, probabilities[0], atol=1e-4)


def test_held_out_digits_are_the_stratified_360():
    data = load_data(DATA)
    assert sum(data.train_counts) == 1437
    counts = np.bincount(load_digits().target)
    np.testing.assert_allclose(np.array(data.val_counts) / 360, counts / counts.sum(), atol=0.003)


def test_saved_configuration_can_be_used_again(run_folder):
    config, _ = parse_args(["--config", str(run_folder / "config.json")])
    assert (config.model_type, config.learning_rate, config.run_name) == ("basic_cnn", 0.004, "digits")
    config, _ = parse_args(["--config", str(run_folder / "config.json"), "--learning-rate", "0.1"])
    assert (config.model_type, config.learning_rate) == ("basic_cnn", 0.1)


def test_environment_and_sharding_are_recorded(run_folder):
    facts = json.loads((run_folder / "environment.json").read_text())
    assert facts["packages"]["zerovision"] == __version__
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert facts["ranks"] == 2
    assert "--model-type" in facts["command"]
    assert not (run_folder / "deepspeed_config.json").exists()


def test_checkpoints_are_the_last_two_and_the_best(run_folder):
    folder = run_folder / "checkpoints"
    names = {pointer: (folder / pointer).read_text().strip() for pointer in ("last", "best")}
    assert names["last"] == f"step-{EPOCHS:05d}-0000000"
    before = f"step-{EPOCHS - 1:05d}-0000000"
    assert {path.name for path in folder.iterdir()} == {"last", "best", before, *names.values()}


def test_run_name_is_not_used_twice(trained):
    result = train_here("--run-name", "digits", "--log-dir", str(trained[0]), "--epochs", "1")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "already contains a run" in result.stderr


def test_tensorboard_serves_the_scalars(trained, run_folder):
    """The real server on localhost, and the scalars read back over HTTP."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(trained[0] / "tensorboard")]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--host", "127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}/data/plugin"
    try:
        top1 = fetch_when_there(f"{address}/scalars/scalars?run=digits&tag=epoch%2Fval_top1")
        expected = [entry["val_top1"] for entry in read_metrics(run_folder, "epoch")]
        np.testing.assert_allclose([value for _, _, value in top1], expected, atol=1e-6)
        tags = fetch_when_there(f"{address}/scalars/tags")["digits"]
        assert {"train/loss", "train/learning_rate", "train/gradient_norm", "speed/images_per_second"} < set(tags)
        assert "memory/bytes_per_rank" in tags
        pictures = fetch_when_there(f"{address}/images/tags")["digits"]
        assert {"augmented training images", "confusion matrix"} <= set(pictures)
        assert "configuration/text_summary" in fetch_when_there(f"{address}/text/tags")["digits"]
    finally:
        server.terminate()
        server.wait(timeout=20)


def fetch_when_there(address: str):
    """GET JSON, once the server has come up and read the event file."""
    for _ in range(120):
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                content = json.load(response)
            if content:
                return content
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"nothing at {address}")


def test_fine_tuning_leaves_the_backbone_alone_in_the_head_epochs(tmp_path, monkeypatch):
    for name, count in (("FAKE_TRAIN_IMAGES", 100), ("FAKE_VAL_IMAGES", 20)):
        monkeypatch.setattr(f"zerovision.training.data.arrays.{name}", count)
    network, start = new_model("mobilenet", num_classes=10, image_size=8).module, tmp_path / "weights.safetensors"
    save_file(network.state_dict(), start)
    flags = ["--model-type", "mobilenet_finetuned", "--weights", str(start), "--data", "fake", "--epochs", "2"]
    flags += ["--learning-rate", "0.01", "--log-dir", str(tmp_path), "--batch-size", "25", "--image-size", "8"]
    flags += ["--report", "false", "--tensorboard", "false"]
    states = [network.state_dict()]
    for head_epochs in (2, 1):
        assert_success(train_here(*flags, "--head-epochs", str(head_epochs), "--run-name", f"head{head_epochs}"))
        states.append(load_last(tmp_path / "runs" / f"head{head_epochs}"))
    # The optimizer has begun anew with the backbone.
    manifests = [read_manifest(last_checkpoint(tmp_path / "runs" / name)) for name in ("head2", "head1")]
    assert manifests[0].applied_steps == 2 * manifests[1].applied_steps > 0
    before, resting, awake = states
    head = {"classifier.weight", "classifier.bias"}
    assert head < before.keys()
    for name in before:
        same = torch.equal(before[name], resting[name])
        assert same == (name not in head), name
    moved = [name for name in before if not torch.equal(before[name], awake[name])]
    assert len(moved) > 0.9 * len(before)


def last_checkpoint(run_folder: Path) -> Path:
    folder = run_folder / "checkpoints"
    return folder / (folder / "last").read_text().strip()


def load_last(run_folder: Path) -> dict[str, torch.Tensor]:
    """Return weights and buffers of the newest checkpoint of a run of one rank."""
    checkpoint = last_checkpoint(run_folder)
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    return {**whole_tensors(reader)["weights"], **{name: buffer[0] for name, buffer in reader.buffers([0], 1).items()}}


def test_timm_model_loads_in_timm_by_its_own_name_and_is_profiled(tmp_path):
    import timm

    flags = ["--model-type", "timm:test_resnet", "--data", "fake", "--epochs", "1", "--batch-size", "100"]
    profile = ["--profile", "3"]
    result = train_here(*flags, "--image-size", "64", "--run-name", "r", "--log-dir", str(tmp_path), *profile)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "runs" / "r"
    assert f"profile of 3 steps: {folder}/profile/trace.json.gz, summary.txt" in result.stdout
    with gzip.open(folder / "profile" / "trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"forward", "backward", "optimizer"} <= names
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    assert "aten::convolution_backward" in (folder / "profile" / "summary.txt").read_text()
    path = folder / "model.safetensors"
    theirs = timm.create_model("test_resnet", num_classes=10, checkpoint_path=str(path)).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), load_model(path)[0](images))


def test_early_stopping_waits_for_its_patience_and_deepspeed_counts_operations(tmp_path):
    measured = read_strategy_json("ddp") | {"flops_profiler": {"enabled": True, "profile_step": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(measured))
    flags = ["--model-type", "basic_cnn", "--data", "fake", "--batch-size", "100", "--image-size", "8"]
    flags += ["--epochs", "30"]
    flags += ["--learning-rate", "1e-9", "--early-stopping-patience", "2", "--warmup-epochs", "0", "--best-by", "auroc"]
    flags += ["--deepspeed-config", str(tmp_path / "ds.json")]
    result = assert_success(train_here(*flags, "--run-name", "r", "--log-dir", str(tmp_path)))
    epochs = read_metrics(tmp_path / "runs" / "r", "epoch")
    best = max(range(len(epochs)), key=lambda number: epochs[number]["score"])
    assert len(epochs) == best + 1 + 2 < 30
    assert "no better AUROC for 2 epochs: stopping early" in result.stdout
    evaluated = json.loads((tmp_path / "runs" / "r" / "evaluation" / "scores.json").read_text())
    assert evaluated["auroc"] == epochs[best]["score"]
    assert f"AUROC {100 * evaluated['auroc']:.2f} % on " in result.stdout
    assert "fwd+bwd FLOPS per GPU" in result.stdout, "the key flops_profiler works"
    # Its patience is over: a run that goes on from it elsewhere ends at once, without a better epoch of its own.
    again = train_here(*flags, "--run-name", "again", "--log-dir", str(tmp_path), "--resume", str(tmp_path / "runs/r"))
    weights = tmp_path / "runs" / "again" / "model.safetensors"
    assert f"(best epoch: {best + 1}; its weights are saved)\nweights      {weights}\n" in again.stdout, again.stderr
    for name in (weights.name, "class_map.txt"):
        assert (weights.parent / name).read_bytes() == (tmp_path / "runs" / "r" / name).read_bytes()
    assert (weights.parent / "evaluation" / "worst.png").exists()
    assert (weights.parent / "README.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp_stage2", "fsdp_stage3"])
def test_an_automatic_learning_rate_under_deepspeed(strategy, tmp_path):
    """Its trials see the losses of PyTorch's engine; the engine after them is built anew, and trains."""
    flags = ["--model-type", "basic_cnn", "--data", "fake", "--image-size", "16", "--batch-size", "40", "--epochs", "1"]
    flags += ["--learning-rate", "auto", "--strategy", strategy, "--tensorboard", "false", "--log-dir", str(tmp_path)]
    losses = []
    for engine in ("deepspeed", "torch"):
        assert_success(train_alone(*flags, "--engine", engine, "--run-name", engine))
        folder = tmp_path / "runs" / engine
        found = json.loads((folder / LEARNING_RATE).read_text())
        assert json.loads((folder / "config.json").read_text())["learning_rate"] == found["suggested"]
        losses.append(found["tried"][0][2])  # of the lowest rate
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_run_that_diverges_says_so_and_calls_nothing_the_best(tmp_path):
    flags = ["--model-type", "basic_cnn", "--data", "fake", "--batch-size", "100", "--epochs", "2", "--workers", "0"]
    flags += ["--image-size", "16", "--learning-rate", "100", "--tensorboard", "false", "--progress", "off"]
    flags += ["--log-dir", str(tmp_path)]
    result = train_here(*flags, "--run-name", "r")
    assert result.returncode == DIVERGED_EXIT_CODE, result.stdout + result.stderr
    folder, lines = tmp_path / "runs" / "r", result.stdout.splitlines()
    (first, *_), epochs = read_metrics(folder, "diverged"), read_metrics(folder, "epoch")
    assert first["reason"] == epochs[0]["diverged"]
    assert "epoch 1 has diverged: the " in result.stdout
    assert "tensorboard --logdir" not in result.stdout, "nothing was written for it"
    assert any(line.startswith("the training diverged in epoch ") for line in lines[-8:]), lines
    sound = [epoch for epoch in epochs if epoch["is_best"]]
    assert all(epoch["diverged"] is None for epoch in sound)
    assert (folder / "model.safetensors").exists() == bool(sound)
    assert "no weights are saved: every epoch diverged" in lines
    assert "Diverged: after epoch 2 of 2 the " in (folder / "report.html").read_text(encoding="utf-8")
    assert "Traceback" not in result.stderr


def test_a_run_ends_with_the_evaluation_of_its_weights_and_a_model_card(run_folder, predictions):
    labels, probabilities = predictions
    scores = json.loads((run_folder / "evaluation" / "scores.json").read_text())
    best = max(read_metrics(run_folder, "epoch"), key=lambda epoch: (epoch["val_top1"], -epoch["epoch"]))
    assert (scores["epoch"], scores["top1"], scores["loss"]) == (best["epoch"], best["val_top1"], best["val_loss"])
    assert scores["samples"] == best["val_samples"] == len(labels)
    report = classification_report(labels, probabilities.argmax(1), output_dict=True, zero_division=0)
    assert [one["f1"] for one in scores["classes"]] == [report[str(number)]["f1-score"] for number in range(10)]
    assert scores["loss"] == pytest.approx(log_loss(labels, probabilities), rel=ROUNDING)
    for one in scores["worst"]:
        assert one["confidence"] == pytest.approx(probabilities[one["index"]].max(), abs=1e-5)
    names = {path.name for path in (run_folder / "evaluation").iterdir()}
    pictures = {"confusion.png", "worst.png", "worst", "typical"}
    assert names == pictures | {"scores.json", "per_class.csv", "confusion.csv", "worst.csv"}
    card = (run_folder / "README.md").read_text()
    assert f"| top-1 | {100 * scores['top1']:.2f} % [" in card
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    flags = f"--learning-rate=0.004 --image-size={DATA.image_size} --compile=off --threads-per-rank={threads}"
    flags += " --deterministic=true"
    assert f"bash scripts/launch_distributed.sh basic_cnn ddp 2 16 {EPOCHS} {flags}" in card


def test_a_run_ends_with_its_report(trained, run_folder):
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    best = max(entry["val_top1"] for entry in read_metrics(run_folder, "epoch"))
    assert f"report       {run_folder / 'report.html'}\n" in trained[1].stdout
    assert f"Finished: {EPOCHS} epochs, {EPOCHS * 45} steps." in page
    assert f"{100 * best:.2f}\u202f%" in page
    assert f"{round(360 * best)} of 360 images" in page


def test_every_ranks_memory_and_the_time_of_evaluation_are_told(run_folder):
    (end,) = read_metrics(run_folder, "end")
    epochs = read_metrics(run_folder, "epoch")
    for line in (end, *epochs):
        assert len(line["memory_bytes_per_rank"]) == 2
        assert all(10**8 < memory < 10**10 for memory in line["memory_bytes_per_rank"])
    total = sum(epoch["evaluation_seconds"] for epoch in epochs)
    assert total == pytest.approx(end["evaluation_seconds"], rel=0.2, abs=0.1)


def test_scores_of_samples_are_scikit_learns_in_any_order_and_padded(predictions):
    labels, probabilities = predictions
    recorder = OneLabel(10).recorder()
    logits, targets = torch.from_numpy(probabilities).log(), torch.from_numpy(labels)
    # In uneven pieces of a random order, each with padding that must not count.
    for piece in torch.randperm(360, generator=torch.Generator().manual_seed(0)).split(77):
        padded = torch.cat([piece, piece[:5]])
        weights = torch.cat([torch.ones(len(piece)), torch.zeros(5)])
        given = logits[padded]
        given[-5:] = float("inf")
        recorder.add(given, targets[padded], weights, padded)
    scores = recorder.gather(World(0, 0, 1, 1, torch.device("cpu")))
    details = scores.details
    np.testing.assert_array_equal(details.confusion(10), confusion_matrix(labels, probabilities.argmax(1)))
    assert scores.top1 == accuracy_score(labels, probabilities.argmax(1))
    assert scores.top5 == top_k_accuracy_score(labels, probabilities, k=5)
    assert scores.loss == pytest.approx(log_loss(labels, probabilities), abs=1e-7)
    assert scores.samples == len(details) == 360
    assert torch.equal(details.indices, torch.arange(360))
    assert torch.equal(details.labels, targets)
    assert_same_but_rounding(details.confidences, probabilities.max(1))
