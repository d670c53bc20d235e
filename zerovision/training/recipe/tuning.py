"""Fine-tuning: chooses the parameters to train, adds adapters to frozen layers, and computes a frozen first layer.

Half of the filters of a whitening first layer are the eigenvectors with the largest eigenvalues of the covariance of
training image patches, each divided by the square root of its eigenvalue. The other half are the negatives of the first
half, because a ReLU often follows (Jordan 2024, https://arxiv.org/abs/2404.00498, and the paper's code,
`init_whitening_conv`).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import auto_group_layers
from torch import nn
from torch.nn import functional

from zerovision.models.build import BuiltModel
from zerovision.models.dry_run import forward_failure, without_data
from zerovision.models.ensemble import Ensemble
from zerovision.models.timm_models import PLAIN_CONVOLUTIONS
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import cure_of_missing
from zerovision.training.data.bad_images import read_or_replace
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.reading.files import ImageError
from zerovision.training.recipe import read_tune

# In layers of other types, adding an adapter's weight to the layer's weight does not add the adapter's output.
ADAPTABLE = (nn.Linear, *PLAIN_CONVOLUTIONS)
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
SMALL_SHARE = 0.05  # share of the model; a note points out adapters that are larger
MOST_IMAGES = 1000
EPSILON = 5e-4  # added to the eigenvalues


def tune(built: BuiltModel, word: str) -> BuiltModel:
    """Freeze the parameters that `--tune` does not train, and add adapters, in place.

    Args:
        built: the network with its trained weights, on the CPU.
        word: value of `--tune`: 'full', 'head', 'layers:N' or 'lora:R'.

    Returns:
        The same network with a note for the log.

    Raises:
        UserError: if the network's head is unknown, if the network has fewer than N layers or no layer that can have an
            adapter, or if the network does not work with adapters.
    """
    kind, number = read_tune(word)
    module, heads = built.module, built.head_parameter_names
    if kind == "full":
        return built
    if not heads:
        raise UserError(f"--tune {word}: it is not known which layer of this model is its head: use --tune full.")
    trained = heads | (_last_layers(module, heads, number) if kind == "layers" else frozenset())
    trained &= {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    # Adapters are added first, because peft freezes everything else, including the head.
    adapted = _add_adapters(built, number) if kind == "lora" else 0
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained or is_adapters(name))
    count = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in module.parameters())
    note = f"--tune {word}: {count:,} parameters are trained, {100 * count / total:.3g}% of all"
    if adapted:
        in_adapters = sum(parameter.numel() for name, parameter in module.named_parameters() if is_adapters(name))
        note += f", adapters of rank {number} on {adapted} layers"
        if in_adapters > SMALL_SHARE * (total - in_adapters):
            note += f"; they are {in_adapters / (total - in_adapters):.1%} of the model: a lower rank keeps them small"
    return dataclasses.replace(built, notes=[*built.notes, note])


def _last_layers(module: nn.Module, heads: Collection[str], count: int) -> frozenset[str]:
    """Return the names of the parameters in the last `count` layers before the head, of each member of an ensemble."""
    if isinstance(module, Ensemble):
        names: frozenset[str] = frozenset()
        for prefix, member in ((f"members.{i}.", member) for i, member in enumerate(module.members)):
            own_heads = {name.removeprefix(prefix) for name in heads if name.startswith(prefix)}
            names |= {prefix + name for name in _last_layers(member, own_heads, count)}
        return names
    # The layers of timm's layer decay, counted from the input.
    matcher: Any = getattr(module, "group_matcher", None)
    layer_of = auto_group_layers(module) if matcher is None else group_parameters(module, matcher(), reverse=True)
    layers: dict[int, list[str]] = {}
    for name, layer in layer_of.items():
        if name not in heads:
            layers.setdefault(layer, []).append(name)
    parts: list[list[str]] = []
    for _, names_of_layer in sorted(layers.items()):
        # A norm that timm counts as a separate layer, such as the norm before the head, belongs to the layer before it.
        if parts and all(module.get_parameter(name).ndim < 2 for name in names_of_layer):
            parts[-1] += names_of_layer
        else:
            parts.append(names_of_layer)
    if count > len(parts):
        raise UserError(f"--tune layers:{count}: there are only {len(parts)} layers before the head: use --tune full.")
    return frozenset(name for part in parts[-count:] for name in part)


def _add_adapters(built: BuiltModel, rank: int) -> int:
    """Add LoRA adapters to all layers larger than their adapter, and return their number, or raise a UserError.

    W x becomes W x + B A x, where A has `rank` rows and random initial values, and B is initialized with zeros (Hu et
    al. 2021, https://arxiv.org/abs/2106.09685). Layers that the network does not call receive no adapter, because the
    network reads their weights directly, as BEiT does for queries, keys and values.
    """
    module, heads = built.module, built.head_parameter_names
    size, channels = built.description.image_size, built.description.image_channels
    called = set[str]()
    with ExitStack() as hooks:
        for name, layer in _adaptable(module, rank):
            if f"{name}.weight" not in heads:
                hooks.enter_context(layer.register_forward_hook(lambda *_, name=name: called.add(name)))
        forward_failure(module, size, 2, channels)
    names = sorted(called)
    if not names:
        raise UserError(
            f"--tune lora:{rank}: no layer of this model supports an adapter of this rank: use another --tune."
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model  # importing peft takes seconds
    except ImportError as error:
        raise UserError(
            f"--tune lora:{rank}: the package peft cannot be imported ({error}): {cure_of_missing('peft')}."
        ) from None
    # A pattern, because with a list of names, peft would also adapt every layer whose name ends with one of them.
    pattern = "|".join(map(re.escape, names))
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=pattern), module)
    failure = forward_failure(module, size, 2, channels)
    if failure:
        raise UserError(f"--tune lora:{rank}: this model does not work with adapters ({failure}): use another --tune.")
    return len(names)


def _adaptable(module: nn.Module, rank: int) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if type(layer) not in ADAPTABLE:
            continue
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        # peft does not create dilated adapters, and does not merge adapters of grouped convolutions.
        is_plain = isinstance(layer, nn.Linear) or (
            layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        )
        weight = layer.weight
        if is_plain and rank * (weight[0].numel() + len(weight)) < weight.numel():
            yield name, layer


class Adapters:
    """The adapters of a network, which can be merged into the network's weights.

    Args:
        module: the whole network.
    """

    def __init__(self, module: nn.Module) -> None:
        names = {name.rpartition(".lora_A.")[0] for name, _ in module.named_parameters() if is_adapters(name)}
        self._layers: Mapping[str, Any] = {
            name: without_data(module.get_submodule(name)) for name in sorted(names - {""})
        }

    @torch.no_grad()
    def merge(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the equivalent network without adapters, by that network's names.

        Args:
            weights: all tensors of the network by name, in CPU memory, or an empty mapping; merged tensors are changed
                in place.
        """
        merged = dict(weights)
        for name, empty in self._layers.items() if weights else ():
            layer = copy.deepcopy(empty)
            layer.load_state_dict({key: merged.pop(f"{name}.{key}") for key in layer.state_dict()}, assign=True)
            layer.merge()  # adds to the base layer's weight, to which there is no other reference
            merged |= {f"{name}.{key}": tensor for key, tensor in layer.get_base_layer().state_dict().items()}
        return merged


class BackboneFreezer:
    """Puts a model into training mode, except for its frozen layers.

    BatchNorms of frozen layers normalize with their running statistics and do not update them. In head-first
    fine-tuning, only the new head is trained for the first epochs: the graph is cut in front of the head, so that no
    gradient of the backbone is computed. The backbone's parameters stay in the optimizer, at learning rate 0 (see
    `Schedule.set_learning_rates`), because sharding is fixed for the whole run. The optimizer is reset when training
    of the backbone starts, because the backbone's zero moments would otherwise be treated as those of many steps (see
    `Engine.restart_optimizer`).
    """

    def __init__(self, module: nn.Module, head_parameter_names: Collection[str]) -> None:
        """Find the frozen layers of the model; an engine may shard the model's parameters afterward."""
        self._module = module
        head_names = {name.rpartition(".")[0] for name in head_parameter_names}
        self._heads = [module.get_submodule(name) for name in sorted(head_names)]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._frozen_norms = [
            norm for name, norm in module.named_modules() if isinstance(norm, BATCHNORMS) and _is_frozen(module, name)
        ]

    def start_epoch(self, *, only_head: bool) -> None:
        """Set the mode of every layer; must be called again after each `module.train()`."""
        self._module.train()
        for layer in self._module.modules() if only_head else self._frozen_norms:
            if isinstance(layer, BATCHNORMS):
                layer.eval()  # so that it uses its running statistics and does not update them
        if not only_head:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        elif not self._hooks:
            self._hooks = [head.register_forward_pre_hook(_detach_inputs) for head in self._heads]


def is_adapters(name: str) -> bool:
    """Return whether a parameter with this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def _is_frozen(module: nn.Module, name: str) -> bool:
    """Return whether no parameter of a layer, or else of the innermost enclosing module that has any, is trained."""
    while not (parameters := [*module.get_submodule(name).named_parameters()]) and name:
        name = name.rpartition(".")[0]
    return not any(parameter.requires_grad and not is_adapters(own) for own, parameter in parameters)


def _detach_inputs(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(value.detach() for value in inputs)


@torch.no_grad()
def whiten_stem(built: BuiltModel, data: DatasetPair, *, computes: bool) -> None:
    """Set the weights of a model's first convolution to whitening filters, and freeze them.

    Args:
        built: a model with `ModelSpec.whitens_stem`, on the CPU.
        data: data whose training images determine the filters: at most 1000, evenly spaced over the set, and
            preprocessed as in evaluation.
        computes: whether to compute the filters; only one rank needs to, because all ranks receive its frozen weights.
    """
    stem: nn.Conv2d = built.module.get_submodule(built.module.default_cfg["first_conv"])  # type: ignore
    if computes:
        half = whitening_filters(_sample(data), stem.weight.shape[2:])[: stem.out_channels // 2]
        stem.weight.copy_(torch.cat([half, -half]).view_as(stem.weight))
    stem.weight.requires_grad_(False)


def whitening_filters(images: Iterable[torch.Tensor], size: tuple[int, ...]) -> torch.Tensor:
    """Return the whitening filters of all patches by descending eigenvalue, float32 [n, n] with n = C x height x width.

    The images are float32 [C, H, W]; `size` is the height and width of a patch.
    """
    products, patches = torch.zeros(()), 0
    for image in images:
        columns = functional.unfold(image[None].double(), size)[0]
        products, patches = products + columns @ columns.T, patches + columns.shape[1]
    values, vectors = torch.linalg.eigh(products / patches)
    return (vectors / (values + EPSILON).sqrt()).T.flip(0).float()


def _sample(data: DatasetPair) -> Iterator[torch.Tensor]:
    images = ImageDataset(data.train.source, data.preprocessing)
    count, is_any = min(len(images), MOST_IMAGES), False
    for number in range(count):
        with suppress(ImageError):  # reported when the image is used in training
            yield images[0, number * len(images) // count][0]
            is_any = True
    if not is_any:
        yield read_or_replace(lambda index: images[0, index][0], 0, data.train)[0]
