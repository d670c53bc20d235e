"""Which output of loaded weights is which class: by name, with the words that timm knows, and never by number alone."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import timm
import torch

from tests.kit import new_model, save_built
from zerovision.models import build
from zerovision.models.class_order import order_of, published_classes
from zerovision.models.weights_metadata import Preprocessing

PREPROCESSING = Preprocessing(8, None, mean=(0.5,) * 3, std=(0.5,) * 3)
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
KEPT, ORDERED = "head kept: its 3 classes have no names", "head reordered"
REPLACED = "head replaced: its 3 classes differ"


@pytest.mark.parametrize(
    ("names", "known", "expected"),
    [
        (["b", "a"], [["a", "b", "c"]], ([1, 0], [])),
        (["b", "x"], [["a", "b"]], ([1], ["x"])),
        (["a"], [["a", "a", "b"]], ([], ["a"])),  # which of them?
        (["a", "b"], [["a", "x"], ["b", "a"]], ([1, 0], [])),
        (["caf\u00e9"], [["cafe\u0301"]], ([0], [])),
        (["a"], [], ([], ["a"])),
    ],
)
def test_the_list_with_most_of_the_names_counts(names, known, expected):
    assert order_of(names, known) == expected


@pytest.mark.parametrize(
    ("config", "names", "order"),
    [
        ({"num_classes": 1000}, ["n01443537", "n01440764"], [1, 0]),
        ({"num_classes": 1000}, ["goldfish", "tench"], [1, 0]),
        ({"num_classes": 1000}, ["goldfish, Carassius auratus"], [1]),
        ({"num_classes": 1000}, ["crane"], None),  # a bird and a machine
        ({"num_classes": 1000}, ["0", "1"], None),
        ({"num_classes": 21841}, ["n00005787", "n00004475"], [1, 0]),
        ({"num_classes": 2, "label_names": ["dog", "cat"]}, ["cat", "dog"], [1, 0]),
        ({"num_classes": 1000, "label_names": None}, ["n01440764"], [0]),
        ({"num_classes": 10}, ["0"], None),
    ],
)
def test_published_classes_have_the_names_that_timm_knows(config, names, order):
    found, missing = order_of(names, published_classes(config))
    assert (found if not missing else None) == order


@pytest.fixture
def saved(tmp_path):
    """Weights of a network, the logits of its images, and their file: one of ours, or with names beside it, or none."""

    def save(kind: str, names: list[str]):
        torch.manual_seed(1)
        built = new_model("basic_cnn", num_classes=len(names), image_size=8)
        path = tmp_path / "model.safetensors"
        if kind == "ours":
            save_built(path, built, class_names=names, preprocessing=PREPROCESSING, extra={})
        else:
            safetensors.torch.save_file(built.module.state_dict(), path)
        of_timm = {"num_classes": len(names), "label_names": names}
        if beside := {"timm": of_timm, "transformers": {"id2label": dict(enumerate(names))}}.get(kind):
            (tmp_path / "config.json").write_text(json.dumps(beside))
        return built.module.eval()(IMAGES), str(path)

    return save


@pytest.mark.parametrize("kind", ["ours", "timm", "transformers", "none"])
@pytest.mark.parametrize(
    ("names", "note"), [(["a", "b", "c"], None), (["c", "a", "b"], ORDERED), (["a", "b", "x"], REPLACED)]
)
def test_the_head_of_a_file_is_put_in_the_order_of_the_data(saved, kind, names, note):
    logits, path = saved(kind, ["a", "b", "c"])
    torch.manual_seed(2)
    built = new_model("basic_cnn", num_classes=3, image_size=8, weights=path, class_names=names)
    found, notes = built.module.eval()(IMAGES), [text for text in built.notes if text.startswith("head")]
    if kind == "none":
        note, order = KEPT, [0, 1, 2]
    else:
        order = ["abc".find(name) for name in names]
    assert [text.startswith(note or "-") for text in notes] == ([True] if note else [])
    torch.manual_seed(2)
    fresh = new_model("basic_cnn", num_classes=3, image_size=8).module
    if note == REPLACED:
        torch.testing.assert_close(built.module.head.weight, fresh.head.weight)
        assert not torch.equal(built.module.blocks[0][0].weight, fresh.blocks[0][0].weight)
    else:
        torch.testing.assert_close(found, logits[:, order])
    without = new_model("basic_cnn", num_classes=3, image_size=8, weights=path)  # as before, if nobody compares
    torch.testing.assert_close(without.module.eval()(IMAGES), logits)


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["n2", "n0", "n1"], f"timm:test_vit: {ORDERED}"),
        (["n0", "n1", "n2"], None),
        (["0", "1", "2"], f"timm:test_vit: {REPLACED}"),
    ],
)
def test_the_head_of_published_weights_is_put_in_the_order_of_the_data(monkeypatch, names, note):
    torch.manual_seed(1)
    published = timm.create_model("test_vit", num_classes=3, img_size=32)
    published.default_cfg = published.default_cfg | {"num_classes": 3, "label_names": ["n0", "n1", "n2"]}
    head = published.head.weight.detach().clone()
    monkeypatch.setattr(build, "_create_pretrained", lambda *_: published)
    built = new_model("timm:test_vit", num_classes=3, image_size=32, pretrained=True, class_names=names)
    assert [text.startswith(note or "-") for text in built.notes] == ([True] if note else [])
    if note is None or ORDERED in note:
        assert torch.equal(built.module.head.weight, head[[int(name[1:]) for name in names]])
    else:
        assert (built.module.head.weight != head).all()
        assert built.module.patch_embed is published.patch_embed
