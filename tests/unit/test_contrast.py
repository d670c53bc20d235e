"""Training that compares images: the paper's formula, one graph, scikit-learn's neighbours; the head that follows."""

from __future__ import annotations

import copy
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from tests.kit import ALONE, assert_equal, assert_same_but_rounding, new_model, save_built
from tests.training.engine_ranks import configuration, make_engine
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.base.leaves import Leaves
from zerovision.training.base.timing import SpanClock
from zerovision.training.checkpoint.weights import load_model, read_metadata
from zerovision.training.config import FLAG_OF
from zerovision.training.config.check import check_config
from zerovision.training.config.command_line import parse_args
from zerovision.training.data.loader import SampleRows
from zerovision.training.data.reader import Batch
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.engines.engine import StepInput, TimedEngine
from zerovision.training.tasks.contrast.comparison import GradientCache, contrast
from zerovision.training.tasks.nearest import NEIGHBOURS, TEMPERATURE, log_votes

CLASSES, IMAGES, CHUNK = 3, 32, 4
LABELS = torch.tensor([0, 1, 2, 1] * (IMAGES // 4))
NAMES = [f"class-{number}" for number in range(CLASSES)]
PREPROCESSING = Preprocessing(32, None, mean=(0.5,) * 3, std=(0.5,) * 3)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formula(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return L_out of each image as equation 2 of Khosla et al. 2020 has it, term by term."""
    z, losses = embeddings / embeddings.norm(dim=1, keepdim=True), []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        below = sum(torch.exp(z[i] @ z[a] / temperature) for a in others)
        positives = [p for p in others if labels[p] == labels[i]]
        terms = [torch.log(torch.exp(z[i] @ z[p] / temperature) / below) for p in positives]
        losses.append(-sum(terms) / len(positives) if positives else torch.zeros((), dtype=z.dtype))
    return torch.stack(losses)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
@pytest.mark.parametrize("rows", [1, 6, 12])
def test_losses_and_gradient_are_the_papers(temperature, rows):
    # The last but two is alone in its class; the last two do not count.
    embeddings, labels = drawn(12, 5), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 0, 2, 0, 1])
    weights = torch.tensor([1.0] * 10 + [0.0] * 2)
    losses, shares, gradient = contrast(embeddings, labels, weights, temperature, CLASSES, rows)
    exact = embeddings[:10].double().requires_grad_()
    expected = formula(exact, labels[:10], temperature)
    expected.sum().backward()
    assert_same_but_rounding(losses[:10], expected)
    assert_same_but_rounding(gradient[:10], exact.grad)
    assert not gradient[10:].any()
    torch.testing.assert_close(shares[:10].sum(1), torch.ones(10))


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_losses_and_gradient_are_another_librarys(temperature):
    library = pytest.importorskip("pytorch_metric_learning.losses")
    embeddings, labels = drawn(64, 16), torch.arange(64) % 5  # every image has others of its class
    losses, _, gradient = contrast(embeddings, labels, torch.ones(64), temperature, 5, 16)
    other = embeddings.clone().requires_grad_()
    mean = library.SupConLoss(temperature)(other, labels)
    mean.backward()
    assert_same_but_rounding(losses.mean(), mean)
    assert_same_but_rounding(gradient / 64, other.grad)


def test_an_image_that_is_compared_with_none_has_neither_loss_nor_gradient():
    labels, weights = torch.zeros(4, dtype=torch.int64), torch.tensor([1.0, 0, 0, 0])
    losses, _, gradient = contrast(drawn(4, 5), labels, weights, 0.1, 1, 2)
    assert not losses[0]
    assert not gradient.any()


class Network(nn.Module):
    """BatchNorm, dropout, and a projection whose embeddings are of any length."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: BatchNorm takes it off again, so that its gradient is rounding alone.
        self.convolution, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.norm(self.convolution(images))).mean((2, 3))))


class NoUpdate(TimedEngine):
    """An engine whose gradients are read before an update; it counts the bytes that graphs keep."""

    def __init__(self, module: nn.Module, leaves: int) -> None:
        self.module, self.kept, self.most_kept = module, 0, 0
        config = configuration(engine="torch", gradient_accumulation_steps=leaves, gradient_clipping=0.0)
        super().__init__(make_engine(ALONE, module, config), SpanClock())
        self.optimizer.step = lambda: None

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the last step: of the flat buffers, in the names of the network."""
        buckets = self.engine._distribution._buckets
        return {
            name: place.clone()
            for bucket in buckets
            for name, place in zip(bucket.parameters, bucket._places, strict=True)
        }

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Saved(self, tensor), lambda saved: saved.tensor):
            return super().forward(images)

    def keep(self, count: int) -> None:
        self.kept += count
        self.most_kept = max(self.most_kept, self.kept)


class Saved:
    """A tensor that a graph keeps, counted as long as it lives."""

    def __init__(self, engine: NoUpdate, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        engine.keep(tensor.nbytes)
        weakref.finalize(self, engine.keep, -tensor.nbytes)


def batches_of(images: torch.Tensor, labels: torch.Tensor, size: int) -> list[Batch]:
    weights = torch.ones(len(labels))
    weights[-2:] = 0  # padding
    parts = (tensor.split(size) for tensor in (images, labels, weights, torch.arange(len(labels))))
    return [Batch(*part) for part in zip(*parts, strict=True)]


def seed(leaf: int) -> None:
    torch.manual_seed(100 + leaf)


def step_of(leaves: int) -> GradientCache:
    return GradientCache(ALONE, Leaves(1, leaves), 0.1, CLASSES)


@pytest.mark.parametrize("leaves", [1, 2, 8])
def test_the_gradient_is_that_of_one_graph_over_the_same_leaves(leaves):
    """BatchNorm counts each micro-batch once."""
    torch.manual_seed(0)
    module = Network()
    oracle, engine = copy.deepcopy(module), NoUpdate(module, leaves)
    batches, count = batches_of(drawn(IMAGES, 3, 6, 6), LABELS, IMAGES // leaves), IMAGES - 2
    assert step_of(leaves)(engine, StepInput(iter(batches), seed, leaves / count, lambda *_: None)) is not None
    outputs = []
    for leaf, batch in enumerate(batches):
        seed(leaf)
        outputs.append(oracle(batch.images))
    (formula(torch.cat(outputs)[:count], LABELS[:count], 0.1).sum() / count).backward()
    gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2
    assert engine.gradients.keys() == gradients.keys()
    for name, gradient in engine.gradients.items():
        assert_same_but_rounding(gradient, gradients[name], msg=name)
    assert engine.buffers.by_name()["norm.num_batches_tracked"].tolist() == [1] * leaves


def test_a_batch_of_32_chunks_keeps_the_activations_of_one():
    one, many = (NoUpdate(Network(), leaves) for leaves in (1, 32))
    for engine, leaves in ((one, 1), (many, 32)):
        images = drawn(CHUNK * leaves, 3, 24, 24)
        labels = LABELS.repeat(CHUNK)[: CHUNK * leaves]
        batches = batches_of(images, labels, CHUNK)
        step_of(leaves)(engine, StepInput(batches, seed, 1.0, lambda *_: None))
    assert one.most_kept > 16 * CHUNK * 24 * 24 * 4
    assert many.most_kept == one.most_kept


def test_only_the_image_that_is_not_finite_is_to_blame():
    engine = NoUpdate(Network(), 2)
    images = drawn(8, 3, 6, 6)
    engine.module.norm = nn.Identity()  # which would spread it over the micro-batch
    images[5] = math.nan
    blamed: list[bool] = []
    note = lambda batch, losses, logits, evidence: blamed.extend((~evidence.isfinite()).tolist())  # noqa: E731
    step_of(2)(engine, StepInput(batches_of(images, LABELS[:8], 4), seed, 1.0, note))
    assert blamed == [number == 5 for number in range(8)]


def rows_of(features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, stride: int = 1) -> SampleRows:
    """Keep these, which come in batches in another order than that of their indices."""
    source = SimpleNamespace(labels=labels)
    rows = SampleRows(SimpleNamespace(dataset=SimpleNamespace(source=source)), ALONE, stride)  # type: ignore[arg-type]
    for part in torch.arange(0, len(labels), stride).flip(0).split(16):
        rows.add(Batch(torch.empty(0), labels[part], weights[part], part), features[part])
    return rows


def test_neighbours_are_scikit_learns():
    features, labels = drawn(200, 6), torch.arange(200) % CLASSES
    features[:, :CLASSES] += 1.5 * nn.functional.one_hot(labels, CLASSES)
    weights = torch.ones(200)
    weights[7] = 0  # unreadable
    queries = drawn(50, 6, seed=1)
    oracle = KNeighborsClassifier(
        NEIGHBOURS, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / TEMPERATURE)
    )
    oracle.fit(features[weights > 0].numpy(), labels[weights > 0].numpy())
    rows = rows_of(features, labels, weights)
    is_read = rows.weights > 0
    bank = nn.functional.normalize(rows.values[is_read])
    found = log_votes(queries, bank, rows.labels[is_read], CLASSES).exp()
    expected = (NEIGHBOURS * oracle.predict_proba(queries.numpy()) + 1 / CLASSES) / (NEIGHBOURS + 1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(found.argmax(1).numpy(), oracle.predict(queries.numpy()))


def test_of_a_large_set_every_second_image_is_compared():
    keys = [key for rank in (0, 1) for key in EvaluationPlan(5, 2, 2, stride=2).epoch_keys(0, rank)]
    pairs = [pair for key in keys for pair in zip(key.indices, key.weights, strict=True)]
    assert sorted(index for index, weight in pairs if weight) == [0, 2, 4, 6, 8]


def test_rows_are_of_the_images_that_are_compared():
    features, labels = drawn(41, 6), torch.arange(41) % CLASSES
    rows = rows_of(features, labels, torch.ones(41), stride=2)
    assert torch.equal(rows.values, features[::2])
    assert torch.equal(rows.labels, labels[::2])
    assert rows.weights.tolist() == [1.0] * 21


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The file of a network with a projection, and the network."""
    built = new_model("basic_cnn", num_classes=CLASSES, image_size=32, loss="supcon")
    path = tmp_path_factory.mktemp("run") / "model.safetensors"
    save_built(path, built, class_names=NAMES, preprocessing=PREPROCESSING)
    return path, built


def test_a_projection_is_trained_and_its_input_evaluated(trained):
    _, built = trained
    module, images = copy.deepcopy(built.module), drawn(2, 3, 32, 32)
    assert module(images).shape == (2, 128)
    features = module.eval()(images)
    module.head = nn.Identity()
    assert torch.equal(features, module(images))
    assert built.head_parameter_names == {f"head.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    "model", ["mobilenet", "timm:vit_tiny_patch16_224", "timm:resnet18", "vgg", "cnn_lstm", "airbench"]
)
def test_models_take_a_projection(model):
    size = 64 if model == "timm:vit_tiny_patch16_224" else 32
    with torch.device("meta"):
        built = new_model(model, num_classes=CLASSES, image_size=size)
        projected = new_model(model, num_classes=CLASSES, image_size=size, loss="supcon")
    assert len(projected.head_parameter_names) == 4
    assert not built.head_parameter_names & projected.head_parameter_names


def test_the_backbone_becomes_a_classifier(trained):
    path, projected = trained
    built = new_model("basic_cnn", num_classes=5, image_size=32, weights=str(path))  # also for other classes
    states = (network.module.state_dict() for network in (built, projected))
    assert_equal(*({name: tensor for name, tensor in state.items() if "head" not in name} for state in states))
    assert built.module.head.weight.shape == (5, 128)
    assert any("head replaced: between a classifier and a projection" in note for note in built.notes)


def test_weights_of_a_projection_go_on_with_it(trained):
    path, projected = trained
    built = new_model("basic_cnn", num_classes=CLASSES, image_size=32, weights=str(path), loss="supcon")
    assert_equal(built.module.state_dict(), projected.module.state_dict())


def test_a_classifiers_weights_begin_the_training_of_features(tmp_path):
    classifier = new_model("basic_cnn", num_classes=CLASSES, image_size=32)
    path = tmp_path / "others.pth"
    torch.save(classifier.module.state_dict(), path)
    built = new_model("basic_cnn", num_classes=CLASSES, image_size=32, weights=str(path), loss="supcon")
    name = "blocks.0.0.weight"
    assert torch.equal(built.module.state_dict()[name], classifier.module.state_dict()[name])
    assert built.module.head[2].weight.shape == (128, 128)


def test_what_tells_no_classes_is_not_used_as_a_classifier(trained):
    path, _ = trained
    assert read_metadata(path)["description"].embedding == 128
    with pytest.raises(UserError, match=r"--loss supcon and has no classifier yet.*--tune head"):
        load_model(path)


@pytest.mark.parametrize(
    ("words", "micro_batch", "steps"),
    [
        ("--batch-size 64 --loss supcon::16", 16, 4),
        ("--batch-size 64 --gradient-accumulation-steps 2 --loss supcon::16", 16, 8),
        ("--batch-size 64 --loss supcon::16 --global-batch 512", 16, 1),  # which the ranks divide
        ("--batch-size 64 --loss supcon::64", 64, 1),
        ("--batch-size 64 --loss supcon", 64, 1),
    ],
)
def test_chunks_are_micro_batches(words, micro_batch, steps):
    config, _ = parse_args(words.split())
    assert (config.batch_size, config.gradient_accumulation_steps) == (micro_batch, steps)
    assert check_config(config, FLAG_OF) == config  # also of the file of a run
