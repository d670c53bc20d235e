"""Every model under every strategy on two real ranks; the guide's commands, through `deepspeed` and `accelerate`."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from commands import ENTRY, assert_success, read_metrics, run_command, train_here
from PIL import Image
from ranks import free_port
from safetensors.torch import load_file

from tests.kit import ROUNDING, assert_same_but_rounding, call, new_model, save_built
from zerovision.launch.node_launcher import local_ranks_command
from zerovision.models import MODELS
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.data import DataOptions, load_data
from zerovision.training.engines.ways import STRATEGIES

pytestmark = pytest.mark.timeout(900)

TRAIN_IMAGES, VAL_IMAGES, BATCH_SIZE = 64, 8, 8
EPOCHS = {"quick": 2, "slow": 4}
SLOW = ("vgg", "ensemble", "airbench", "airbench_small", "efficientnet", "mobilenet")  # two minutes
QUICK = tuple(name for name in MODELS if name not in SLOW)
EVERY_MODEL = pytest.mark.parametrize("model", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    """A folder of small photographs, so to say: bright and dark ones. Few, because a step of vgg takes seconds here."""
    root = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for part, count in (("train", TRAIN_IMAGES), ("val", VAL_IMAGES)):
        for number in range(count):
            name, level = (("bright", 190), ("dark", 60))[number % 2]
            pixels = (level + noise.normal(0, 25, (40, 48, 3))).clip(0, 255).astype(np.uint8)
            (root / part / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / part / name / f"{number}.jpg")
    return root


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A local file in the place of hub weights: mobilenet with a head of seven classes."""
    return save_start(tmp_path_factory.mktemp("weights") / "pretrained.safetensors", "mobilenet", 7)


def save_start(path, model, classes):
    """Write random weights as a run leaves its own; return the path."""
    torch.manual_seed(0)
    built = new_model(model, num_classes=classes, image_size=32)
    save_built(
        path,
        built,
        class_names=[f"class-{number}" for number in range(classes)],
        preprocessing=load_data(DataOptions()).preprocessing,
    )
    return path


def train_two_ranks(entry, members, images, logs, *words):
    """Train on a folder of images; return the folder of the runs."""
    flags = ["--data", str(images), "--image-size", "32", "--augmentation", "none", "--workers", "0"]
    flags += ["--batch-size", str(BATCH_SIZE), "--log-every-steps", "1", "--tensorboard", "false", "--report", "false"]
    flags += ["--learning-rate", "0.0001", "--warmup-epochs", "1", "--label-smoothing", "0"]
    flags += ["--model-type", f"ensemble:{members}", "--log-dir", str(logs)]
    launcher = local_ranks_command("deepspeed", has_gpus=False)
    launcher += ["--nproc_per_node=2", f"--master_port={free_port()}"]
    # vgg's tensors are large: without these glibc gives them back to the kernel after every step.
    malloc = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
    assert_success(run_command(*launcher, entry, *flags, *words, OMP_NUM_THREADS="1", **malloc))
    return logs / "runs"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, two_classes, pretrained):
    """A function from a strategy and a model to the folder of its run; the ensemble is a small one here."""

    @functools.cache
    def train(models):
        flags = ["--epochs", str(EPOCHS["slow" if models == SLOW else "quick"]), "--weights", str(pretrained)]
        flags += ["--head-epochs", "0:1"]
        entry, members = "tests/training/matrix_entry.py", "mobilenet,basic_cnn"
        return train_two_ranks(entry, members, two_classes, tmp_path_factory.mktemp("logs"), *flags, ",".join(models))

    return lambda strategy, model: train(SLOW if model in SLOW else QUICK) / f"{strategy}-{model}"


def assert_learned(folder):
    losses = [entry["loss"] for entry in read_metrics(folder, "step")]
    half = len(losses) // 2
    assert half >= TRAIN_IMAGES / (2 * BATCH_SIZE) / 2
    assert np.mean(losses[half:]) < np.mean(losses[:half]), losses
    load_model(folder / "model.safetensors")


@EVERY_MODEL
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_model_learns_under_every_strategy(model, strategy, run_folder):
    assert_learned(run_folder(strategy, model))


@EVERY_MODEL
@pytest.mark.parametrize("strategy", ["fsdp_stage2", "fsdp_stage3"])
def test_the_strategies_agree_on_the_losses(model, strategy, run_folder):
    expected, found = (
        [entry["loss"] for entry in read_metrics(run_folder(name, model), "step")][:3] for name in ("ddp", strategy)
    )
    assert_same_but_rounding(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_ensemble_learns(strategy, two_classes, tmp_path):
    """With all of mobilenet, efficientnet and vgg: a minute each on two cores."""
    flags = ["--strategy", strategy, "--model-type", "ensemble", "--epochs", "1", "--run-name", "whole"]
    runs = train_two_ranks(ENTRY, "mobilenet,efficientnet,vgg", two_classes, tmp_path, *flags)
    assert_learned(runs / "whole")


@pytest.mark.slow  # `--local_rank`, which deepspeed adds: tests/unit/test_config.py
def test_the_guides_direct_command(two_classes, tmp_path):
    result = run_command(
        "deepspeed",
        "--num_gpus=2",
        f"--master_port={free_port()}",
        ENTRY,
        *["--model-type", "efficientnet", "--strategy", "fsdp_stage2", "--epochs", "1", "--batch-size", "16"],
        *["--gradient-accumulation-steps", "2", "--learning-rate", "0.001"],
        *["--data", str(two_classes), "--image-size", "32", "--run-name", "r", "--log-dir", str(tmp_path)],
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "global batch 64 = 16 per CPU rank x 2 CPU ranks x 2 accumulation steps" in result.stdout
    assert "BatchNorm sees micro-batches of 16" in result.stdout
    load_model(tmp_path / "runs" / "r" / "model.safetensors")


@pytest.mark.slow
def test_accelerate_which_starts_torchrun(tmp_path):
    result = run_command(
        *["accelerate", "launch", "--multi_gpu", "--num_processes=2", f"--main_process_port={free_port()}"],
        *[ENTRY, "--model-type", "cnn_lstm"],
        *["--strategy", "fsdp_stage3", "--epochs", "1", "--batch-size", "50", "--data", "fake", "--image-size", "16"],
        *["--precision", "bf16", "--activation-checkpointing", "--offload", "all"],
        *["--run-name", "r", "--log-dir", str(tmp_path), "--optimizer", "adan", "--learning-rate", "0.01"],
        *["--log-every-steps", "1"],
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    losses = [entry["loss"] for entry in read_metrics(tmp_path / "runs" / "r", "step")]
    assert losses[-1] < losses[0]


STARTS = {"torchrun": ("--nproc-per-node=4", "--master-port"), "deepspeed": ("--num_gpus=4", "--master_port")}
# What divides the ranks, and how far from one rank the weights may be.
MESHES = {"--pipeline-parallel": 0.0, "--tensor-parallel": ROUNDING}
OF_MESHES = (
    *("--model-type", "timm:test_vit", "--image-size", "32", "--data", "fake", "--batch-size", "50", "--workers", "0"),
    *("--epochs", "1", "--optimizer", "momentum", "--learning-rate", "0.02", "--run-name", "r"),
)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The weights that one rank trains from the images of two pipelines or groups of two micro-batches each."""
    logs = tmp_path_factory.mktemp("one")
    assert_success(train_here(*OF_MESHES, "--gradient-accumulation-steps", "4", "--log-dir", str(logs)))
    return load_file(logs / "runs" / "r" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", STARTS)
@pytest.mark.parametrize("flag", MESHES)
def test_meshes_under_other_launchers(launcher, flag, one_rank, tmp_path):
    count, port = STARTS[launcher]
    words = [launcher, count, f"{port}={free_port()}", ENTRY, *OF_MESHES, flag, "2", "--log-dir", str(tmp_path)]
    result = assert_success(run_command(*words, "--gradient-accumulation-steps", "2", OMP_NUM_THREADS="1"))
    assert "global batch 200 = 50 per group of 2 CPU ranks x 2 groups x 2 accumulation steps" in result.stdout
    found = load_file(tmp_path / "runs" / "r" / "model.safetensors")
    assert_same_but_rounding(found, one_rank, MESHES[flag])


@pytest.mark.slow
def test_adapters_of_stages_are_exported_merged(tmp_path):
    """The run of a pipeline and its export have the bytes of one rank: adapters are gone, what they learned is not."""
    start = save_start(tmp_path / "start.safetensors", "timm:test_vit", 10)
    flags = (*OF_MESHES, "--tune", "lora:2", "--weights", str(start), "--gradient-accumulation-steps", "4", "--log-dir")
    assert_success(train_here(*flags, str(tmp_path / "one")))
    launcher = ("torchrun", "--nproc-per-node=2", f"--master-port={free_port()}", ENTRY)
    done = run_command(*launcher, *flags, str(tmp_path / "two"), "--pipeline-parallel", "2", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = [tmp_path / ranks / "runs" / "r" for ranks in ("one", "two")]
    kept = [(run / "model.safetensors").read_bytes() for run in runs]
    assert kept[0] == kept[1]
    for run in runs:
        assert call("export", run, "--format", "safetensors")[0] == 0
    of_one, of_two = (load_file(*(run / "export").glob("*.safetensors")) for run in runs)
    before = load_file(start)
    assert of_one.keys() == of_two.keys() == before.keys()
    assert all(torch.equal(of_two[name], tensor) for name, tensor in of_one.items())
    changed = {name for name, tensor in before.items() if not torch.equal(of_two[name], tensor)}
    assert {"blocks.0.attn.qkv.weight", "blocks.5.mlp.fc2.weight", "head.weight"} <= changed
