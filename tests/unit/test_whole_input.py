"""`WholeInputConv2d`: a convolution's numbers, from a product of matrices if its kernel is as large as its input."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rounding import assert_same_but_rounding
from zerovision.models.dry_run import without_data
from zerovision.models.timm_models import create
from zerovision.models.whole_input import WholeInputConv2d

KERNEL_SIZE, CHANNELS = 3, 4
SIZES = pytest.mark.parametrize("size", [KERNEL_SIZE, KERNEL_SIZE + 2], ids=["its-whole-input", "larger-input"])


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def products_and_convolutions(network: nn.Module, size: int, channels: int = 3) -> tuple[int, int]:
    with Operators() as found, torch.no_grad():
        without_data(network)(torch.empty(2, channels, size, size, device="meta"))
    return sum(name in ("mm", "addmm") for name in found.names), found.names.count("convolution")


def numbers_of(layer: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    images = images.clone().requires_grad_()
    outputs = layer(images)
    outputs.square().sum().backward()
    return [outputs, images.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@SIZES
def test_outputs_and_gradients_are_those_of_a_convolution(layout, size):
    torch.manual_seed(0)
    plain, ours = nn.Conv2d(CHANNELS, 6, KERNEL_SIZE), WholeInputConv2d(CHANNELS, 6, KERNEL_SIZE)
    ours.load_state_dict(plain.state_dict())
    images = torch.randn(2, CHANNELS, size, size)
    found = numbers_of(ours.to(memory_format=layout), images.to(memory_format=layout))
    for ours_of, expected in zip(found, numbers_of(plain, images), strict=True):
        assert_same_but_rounding(ours_of, expected)
    assert products_and_convolutions(ours, size, CHANNELS) == ((1, 0) if size == KERNEL_SIZE else (0, 1))


@pytest.mark.parametrize(("image_size", "products"), [(32, 3), (224, 3), (256, 1)])
def test_the_products_of_vgg(image_size, products):
    """Its whole classifier; on 256 pixels the first two layers see 8 x 8 and 2 x 2 pixels."""
    with torch.device("meta"):
        network = create("vgg16_bn", 10, image_size, 3)
    assert products_and_convolutions(network, image_size)[0] == products
