"""The centre of an image is the same whether the image is thin or not; a thin one takes no more memory."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data.augment import evaluation_geometry, evaluation_transform
from zerovision.training.data.reading.image_numbers import BYTES

RESIZES_BYTES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
SIZES = [(36, 32), (48, 48), (40, 44)]  # resize_size, image_size
SIDES = [(1, 1), (30, 40), (9, 180), (60, 2000), (1, 21), (1, 97), (2, 43), (3, 200), (7, 150), (31, 700)]


def preprocessing(sizes: tuple[int, int], filter_name: str, values: str = BYTES) -> Preprocessing:
    return Preprocessing(sizes[1], sizes[0], (0.5,), (0.5,), interpolation=filter_name, values=values)


@pytest.mark.parametrize("filter_name", ["bilinear", "bicubic"])
@pytest.mark.parametrize("sides", SIDES)
def test_the_centre_is_that_of_the_whole_image_resized(sides, filter_name):
    generator = torch.Generator().manual_seed(0)
    for sizes, channels, turned in product(SIZES, (1, 3, 4), (False, True)):
        image = torch.randint(0, 256, (*sides[:: -1 if turned else 1], channels), generator=generator).byte()
        image = image.permute(2, 0, 1)
        resize = v2.Resize(sizes[0], interpolation=InterpolationMode(filter_name), antialias=True)
        expected = v2.CenterCrop(sizes[1])(resize(image))
        found = evaluation_geometry(preprocessing(sizes, filter_name))(image)
        is_thin = max(sides) > 20 * min(sides)
        torch.testing.assert_close(found, expected, atol=int(is_thin and not RESIZES_BYTES), rtol=0)
        floats = image[:1] / 255
        expected = v2.CenterCrop(sizes[1])(resize(floats))
        found = evaluation_geometry(preprocessing(sizes, filter_name))(floats)
        torch.testing.assert_close(found, expected, atol=1e-4 * is_thin, rtol=0)


@pytest.mark.parametrize("shape", [(3, 65000, 3), (3, 3, 65000)])
@pytest.mark.parametrize("values", [BYTES, "float32"])
def test_a_thin_image_takes_the_memory_of_its_centre(shape, values):
    """4.3 GB for the whole image as bytes; PyTorch's own memory is seen as what the process holds."""
    image = torch.zeros(shape, dtype=torch.uint8 if values == BYTES else torch.float32)
    given = preprocessing((256, 224), "bilinear", values)
    transform = pickle.loads(pickle.dumps(evaluation_transform(given)))  # as workers get it
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert transform(image).shape == (3, 224, 224)
    taken = sum(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0)
    assert 3 * 224 * 224 < taken < 20 * 3 * 256 * 256 * 8
