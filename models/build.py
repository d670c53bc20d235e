"""Builds a network from the table: creates it, fits it to the image size, loads weights, and describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zerovision.models import MODELS, MOST_MEMBERS, ImageSize, model_spec
from zerovision.models.class_order import head_by_name, published_classes
from zerovision.models.dry_run import as_names, create_for_image_size, set_strides
from zerovision.models.ensemble import Ensemble
from zerovision.models.timm_models import adapt_weights, check_rates, create
from zerovision.models.weights_file import StateDict, load_weights_file
from zerovision.models.weights_metadata import Description
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.settings import RunSettings

MOST_BUFFER_BYTES, BUFFERS_PER_WEIGHT = 2**30, 16  # index tables are smaller than the larger of the two
PROJECTED_BY = "--loss supcon"  # what users type to train a network with a `ProjectionHead`


@dataclass(frozen=True)
class BuiltModel:
    """A network that is ready to train, with its description.

    Attributes:
        module: Maps images `[B, C, H, W]` float32 to logits `[B, num_classes]`, or to embeddings (see
            `ProjectionHead`).
        description: Description of the network for `rebuild_model`.
        notes: One-line messages for the log.
        head_parameter_names: Names of the classifier's parameters, which are trained first in fine-tuning.
    """

    module: nn.Module
    description: Description
    notes: list[str] = field(default_factory=list)
    head_parameter_names: frozenset[str] = frozenset()


def build_model(
    config: RunSettings,
    num_classes: int,
    image_size: ImageSize,
    image_channels: int = 3,
    *,
    loads_weights: bool = True,
    class_names: Sequence[str] = (),
) -> BuiltModel:
    """Build the network to train, in float32 on PyTorch's default device.

    Args:
        config: settings with the model and its initial weights. Dropout and drop path are not part of the description,
            because only training uses them; the batch size is needed to reject a size that BatchNorm cannot use.
        num_classes: width of the head.
        image_size: size of the images, in pixels.
        image_channels: number of channels of the images.
        loads_weights: whether the network starts from the configured weights; otherwise, every model starts from random
            weights.
        class_names: class names of the data, by which the loaded classifier is reordered; empty to keep its order.

    Raises:
        UserError: for a name, size, batch or file that does not work (the message says what to use instead), and for
            dropout or drop path in a model that does not support it.
    """
    pretrained, weights = loads_weights and config.pretrained, loads_weights and config.weights
    if pretrained and weights:
        raise UserError("--pretrained and --weights both give the starting weights: leave one of them out")
    name = config.model_type
    members, timm_name = _checked_members(name, config.ensemble_members.split(",")), model_spec(name).timm_name
    description = Description(name, timm_name, num_classes, image_size, members, {}, image_channels, config.embedding)
    strides: dict[str, list[int]] = {}
    modules: list[nn.Module] = []
    heads: list[str] = []
    notes: list[str] = []
    given = (("drop_rate", config.dropout), ("drop_path_rate", config.drop_path))
    rates = {rate: value for rate, value in given if value != "auto"}
    for prefix, part in _parts(description).items():
        check_rates(part, rates)
        make = partial(_create, rates=rates)
        # This comes before any download, because the size may not work.
        module, changes = create_for_image_size(make, part, config)
        always = model_spec(part.model_type).always_pretrained and loads_weights
        if not weights and (pretrained or always):
            fresh, module = module, _create_pretrained(part, make, notes)
            set_strides(module, {name: new for name, (_, new) in changes.items()})
            notes += _order_head(part, module, fresh, class_names)
        modules.append(module)
        heads += [prefix + name for name in as_names(getattr(module, "default_cfg", {}).get("classifier"))]
        for name, (old, new) in changes.items():
            strides[prefix + name] = [old, new]
            why = f"so that {image_size}-pixel images keep detail"
            notes.append(f"{part.model_type}: stem stride {old} -> {new}, {why}")
    description = replace(description, stem_stride_changed=strides)
    module = _assemble(description, modules)
    if weights:
        adapt = partial(_adapt_weights, description)
        notes += load_weights_file(
            module, weights, description=description, heads=heads, adapt=adapt, class_names=class_names
        )
    head_names = (name for name, _ in module.named_parameters() for head in heads if name.startswith(f"{head}."))
    return BuiltModel(module, description, notes, frozenset(head_names))


def rebuild_model(description: Description) -> nn.Module:
    """Rebuild a network from its `BuiltModel.description`, with random weights and without internet access.

    Raises:
        UserError: for a description that `build_model` did not write.
    """
    with _one_line_for_a_wrong_description():
        module = _assemble(description, [_create(part) for part in _parts(description).values()])
        set_strides(module, {name: new for name, (_, new) in description.stem_stride_changed.items()})
    return module


def tensor_mismatch(description: Description, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return how a description differs from a file's tensors, or None; this allocates no tensors.

    The network is built from tensors that have shapes but no data, so that a file cannot use more memory than its own
    size. Otherwise, a short description could create any number of parameters, or of indices computed from the image
    size.

    Args:
        description: a `BuiltModel.description`.
        shapes: shape of every tensor in the file, by name.

    Raises:
        UserError: for a description that `build_model` did not write.
    """
    left = {name: list(shape) for name, shape in shapes.items()}
    buffer_bytes = 0
    with _one_line_for_a_wrong_description():
        for prefix, part in _parts(description).items():
            with torch.device("meta"):
                module = _create(part)
            for name, tensor in module.state_dict().items():
                found = left.pop(prefix + name, None)
                if found != list(tensor.shape):
                    held = "is missing" if found is None else f"is {found}"
                    return f"{prefix + name!r} {held}, {list(tensor.shape)} is described"
            buffer_bytes += sum(buffer.nbytes for buffer in module.buffers())
    if left:
        return f"{len(left)} of its tensors are not described, first {next(iter(left))!r}"
    if buffer_bytes > max(MOST_BUFFER_BYTES, BUFFERS_PER_WEIGHT * 4 * sum(map(math.prod, shapes.values()))):
        return f"it has no room for {buffer_bytes / 1e9:.0f} GB of tables, which the image size needs"
    return None


@contextmanager
def _one_line_for_a_wrong_description() -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a wrong description may raise any exception
        raise UserError(f"not a description of a model: {one_line(f'{type(error).__name__}: {error}')}") from error


def _checked_members(model_type: str, members: Sequence[str]) -> tuple[str, ...]:
    """Return the members of an ensemble; () for other models. Raise a UserError for invalid names."""
    if not model_spec(model_type).takes_members:
        return ()
    if len(members) < 2:
        raise UserError(f"an ensemble needs at least two members, not {len(members)}, such as ensemble:mobilenet,vgg")
    if len(members) > MOST_MEMBERS:
        raise UserError(f"an ensemble has at most {MOST_MEMBERS} members, not {len(members)}: leave some out")
    for member in members:
        if model_spec(member).takes_members:
            allowed = ", ".join(name for name, spec in MODELS.items() if not spec.takes_members)
            raise UserError(f"'{member}' cannot be a member of an ensemble. Allowed: {allowed}.")
    return tuple(members)


def _parts(description: Description) -> dict[str, Description]:
    """Return each member's description by the prefix of its parameter names, which is '' if there are no members."""
    if not description.members:
        return {"": description}
    alone = replace(description, members=(), stem_stride_changed={}, embedding=0)
    return {
        f"members.{i}.": replace(alone, model_type=name, timm_name=model_spec(name).timm_name)
        for i, name in enumerate(description.members)
    }


def _assemble(description: Description, parts: list[nn.Module]) -> nn.Module:
    return Ensemble(parts) if description.members else parts[0]


def _create(part: Description, **options: Any) -> nn.Module:
    """Create a part with options for `create`, or raise a UserError if a projection cannot replace its classifier."""
    module = create(part, **options)
    if part.embedding:
        names = as_names(getattr(module, "default_cfg", {}).get("classifier"))
        classifier = module.get_submodule(names[0]) if len(names) == 1 else None
        if not isinstance(classifier, nn.Linear):
            raise UserError(
                f"{PROJECTED_BY}: the head of model '{part.model_type}' is not a single linear layer, so it cannot be "
                "replaced with a projection: use another model."
            )
        module.set_submodule(names[0], ProjectionHead(classifier.in_features, part.embedding))
    return module


def _adapt_weights(description: Description, tensors: StateDict) -> StateDict:
    """Adapt tensors to the described network's images; return them unchanged if that fails."""
    adapted: StateDict = {}
    for prefix, part in _parts(description).items():
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        adapted |= {prefix + key: tensor for key, tensor in adapt_weights(part, own).items()}
    return adapted


def _create_pretrained(part: Description, make: Callable[..., nn.Module], notes: list[str]) -> nn.Module:
    """Create a part with the hub's weights, and note what happened to its head."""
    name, timm_name = part.model_type, part.timm_name
    if timm_name is None:
        raise UserError(f"model '{name}' has no pretrained weights: leave out --pretrained, or use --weights FILE")
    try:
        module = make(part, pretrained=True)
    except UserError as error:
        twins = [n for n, s in MODELS.items() if s.timm_name == timm_name and not s.always_pretrained]
        random = f"--model-type {twins[0]}" if model_spec(name).always_pretrained else "--pretrained false"
        raise UserError(
            f"{error}. Type --pretrained false --weights FILE, or {random} to start from random weights."
        ) from error
    notes.append(f"{name}: pretrained weights of timm's {timm_name} loaded")
    published = getattr(module, "default_cfg", {})
    hub_classes = published.get("num_classes")
    if hub_classes not in (None, part.num_classes):
        notes.append(f"{name}: head replaced: {hub_classes} -> {part.num_classes} classes")
    if published.get("fixed_input_size") and published["input_size"][-1] != part.image_size:
        notes.append(f"{name}: adapted from images of {published['input_size'][-1]} pixels to {part.image_size}")
    if part.image_channels != 3:
        notes.append(f"{name}: first layer adapted: 3 -> {part.image_channels} channels")
    return module


def _order_head(part: Description, module: nn.Module, fresh: nn.Module, class_names: Sequence[str]) -> Iterator[str]:
    """Fit a published classifier to the data as `head_by_name` does, and yield notes; `fresh` has random weights."""
    published = getattr(module, "default_cfg", {})
    if not class_names or part.embedding or published.get("num_classes") != len(class_names):
        return
    prefixes = tuple(f"{name}." for name in as_names(published.get("classifier")))
    head, random = (
        {key: tensor for key, tensor in network.state_dict().items() if key.startswith(prefixes)}
        for network in (module, fresh)
    )
    head, notes = head_by_name(head, random, class_names, published_classes(published))
    module.load_state_dict(head, strict=False)
    yield from (f"{part.model_type}: {note}" for note in notes)


class ProjectionHead(nn.Sequential):
    """Maps features `[B, F]` to embeddings `[B, width]` in training; in evaluation, returns the features unchanged.

    As in Khosla et al. 2020 (https://arxiv.org/abs/2004.11362, section 3), the head has two layers that are discarded
    after training, because the features before these layers are the better representation.
    """

    def __init__(self, features: int, width: int) -> None:
        """Create the layers; the hidden layer is as wide as the features."""
        super().__init__(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map features `[B, F]` to `[B, width]`; in evaluation, return the features unchanged."""
        return super().forward(features) if self.training else features
