"""The head of a network that learns to compare images: a projection in place of the classifier."""

from __future__ import annotations

import torch
from torch import nn

from models.errors import UserError
from models.image_size import as_names


class ProjectionHead(nn.Sequential):
    """Features `[B, F]` to embeddings `[B, width]` in training; in evaluation it returns the features themselves.

    Khosla et al. 2020 (https://arxiv.org/abs/2004.11362, section 3): two layers that are thrown away after the
    training, because the features before them are the better representation.
    """

    def __init__(self, features: int, width: int) -> None:
        """Make the layers, the hidden one as wide as the features."""
        super().__init__(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map features `[B, F]` to `[B, width]`, in evaluation to themselves."""
        return super().forward(features) if self.training else features


def put_projection(module: nn.Module, model_type: str, width: int) -> nn.Module:
    """Put a projection in the place of a network's classifier; return the network.

    Raises:
        UserError: if the classifier is not one linear layer.
    """
    names = as_names(getattr(module, "default_cfg", {}).get("classifier"))
    classifier = module.get_submodule(names[0]) if len(names) == 1 else None
    if not isinstance(classifier, nn.Linear):
        raise UserError(
            f"--loss supcon: the head of model '{model_type}' is not one linear layer, which a projection could "
            "replace: take another model."
        )
    module.set_submodule(names[0], ProjectionHead(classifier.in_features, width))
    return module
