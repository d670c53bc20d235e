"""Nothing in a hostfile or metadata is run: random cases; those of arguments and variables are in tests/cluster."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest
from crafted_weights import craft_metadata, peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.kit import new_model
from tests.unit.launcher_fuzz import CANARY, fuzz_settings, hostfile_text, value
from zerovision.launch.hosts import read_hostfile, ssh_command
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model, preprocess, save_weights

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@settings(fuzz_settings, max_examples=250)
@given(text=hostfile_text)
def test_a_hostfile_is_read_or_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text, newline="")
    refusal = ""
    try:
        hosts = read_hostfile(path)
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert refusal.isprintable()
        return
    meant = [line.split("#")[0].split() for line in text.splitlines()]
    assert [[host, f"slots={slots}"] for host, slots in hosts.items()] == [line for line in meant if line]
    for host in hosts:
        assert set(host) <= set(f"{LETTERS}.-")
        assert {host[0], host[-1]} <= set(LETTERS)


SIZES = [-5, 0, 1, 3, 32, 4096, 4097, 8192, 2 * 10**6, 10**9, 2**63, 10**400]
STRANGE = st.one_of(
    st.sampled_from([None, True, "", "32", "cat", [], {}, math.nan, math.inf, 1e-300, 0.5, *SIZES]),
    st.sampled_from(["vgg", "ensemble", "timm:vit_tiny_patch16_224", "timm:beit_base_patch16_224", "vgg16_bn"]),
    st.integers(0, 40).map(lambda count: ["basic_cnn"] * count),
    st.integers(-1, 2000).map(lambda count: [str(number) for number in range(count)]),
    st.lists(st.floats() | st.integers(), min_size=3, max_size=3),
    st.dictionaries(st.sampled_from(["blocks.0.0", "head", "x"]), st.lists(st.sampled_from(SIZES), max_size=3)),
    st.text(max_size=5),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner)),
)
ENTRIES = [
    *["description", "class_names", "preprocessing", "extra", "extra.epoch"],
    *[f"description.{key}" for key in ("model_type", "timm_name", "num_classes", "image_size", "members")],
    *["description.stem_stride_changed", *(f"preprocessing.{key}" for key in ("image_size", "resize_size", "std"))],
    *["preprocessing.mean", "preprocessing.interpolation"],
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a small model for images of 32 pixels and 4 classes."""
    built = new_model("basic_cnn", num_classes=4, image_size=32)
    file = tmp_path_factory.mktemp("weights") / "w.safetensors"
    preprocessing = Preprocessing(32, None, mean=(0.5,) * 3, std=(0.5,) * 3)
    facts = {"description": built.description, "class_names": [*"abcd"], "preprocessing": preprocessing}
    save_weights(file, built.module.state_dict(), **facts)
    return file.read_bytes()


@settings(fuzz_settings, max_examples=150)
@given(changes=st.dictionaries(st.sampled_from(ENTRIES), STRANGE, min_size=1, max_size=3))
def test_metadata_is_understood_or_refused_in_one_line(tmp_path: Path, weights: bytes, changes: dict) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(weights)
    craft_metadata(file, dict(sorted(changes.items(), key=lambda change: -change[0].count("."))))
    before, refusal = peak_bytes(), ""
    try:
        model, metadata = load_model(file)
        preprocess(metadata)
    except UserError as error:
        refusal = str(error)
    assert peak_bytes() - before < 2**30
    assert refusal.isprintable()
    assert len(refusal) < 1000
    if not refusal and metadata["preprocessing"].image_size <= 64:
        image = Image.new("RGB", (40, 30))
        assert model(preprocess(metadata)(image)[None]).shape == (1, 4)


def test_the_words_for_another_machine_come_through_its_shell_whole(tmp_path: Path) -> None:
    @settings(fuzz_settings, max_examples=40)
    @given(words=st.lists(value, max_size=4))
    def check(words):
        command, _ = ssh_command("node-1", ["printf", r"%s\0", "first", *words])
        assert command[command.index("--") + 1 : -1] == ["node-1"]
        remote = subprocess.run(["sh", "-c", command[-1]], cwd=tmp_path, capture_output=True, check=True)
        assert remote.stdout == "".join(f"{word}\0" for word in ["first", *words]).encode()
        assert not (tmp_path / CANARY).exists()

    check()
