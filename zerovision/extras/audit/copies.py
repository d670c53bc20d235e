"""Finds images that are copies of one another: re-encoded, resized, brightened, mirrored or cropped.

Every image is described by the lowest frequencies of its cosine transform, as in a perceptual hash (Zauner 2010,
http://phash.org/docs/pubs/thesis_zauner.pdf, section 3.2), but by the values rather than their signs. Candidates are
found by comparing the descriptions of an image's windows and of its mirror image. The pictures are then aligned, and
the remaining difference is compared with the usual difference between similar images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

SIDE = 32  # side of the pictures that are compared, in pixels
FREQUENCIES = 6  # in each direction; one of them is the mean, which brightness changes
SCALES, PLACES = (0.87, 0.74), (0.0, 0.5, 1.0)  # of the windows, in each direction
SMALLEST_WINDOW = 0.6
NEAREST = 4  # number of images to find for each window
MOST_CANDIDATES = 8  # for an image, and as many for its mirror image
TYPICAL_RANK = 8  # an image's typical difference is its difference from its 8th nearest image
FLAT_LEVELS = 2.0  # standard deviation below which an image is considered blank
CANDIDATE_SHARE, LAID_ROUGHLY_SHARE, COPY_SHARE = 0.7, 0.7, 0.09  # of the typical difference
DETAIL_SIDE = 5  # side of the squares whose means are subtracted, which leaves lines and texture
DETAIL_SHARE = 0.40  # of the cube of the typical difference of details: stricter if all images are alike
LEAST_LIMIT = 0.001
REPORTED = 0.7  # confidence; most pairs below it show different objects of one kind, such as two shirts on one table
ROUGH_STEPS, FINE_STEPS, STEP = 8, 32, 0.02
COMPARED_AT_ONCE = 2**24  # numbers
CELL_IMAGES, CELLS_SEARCHED = 10_000, 3  # with more than two cells, an image is compared only with a few cells


class Copy(NamedTuple):
    """Two images that show the same scene."""

    one: int  # position of the first image
    other: int  # position of the second image, larger than `one`
    is_mirrored: bool  # whether one is the mirror image of the other
    difference: float  # 1 - the correlation of the aligned images or of their details, relative to its limit

    @property
    def confidence(self) -> float:
        """The confidence that the images show the same scene: 1 for identical pictures, 0.5 at the limit."""
        return 1 - 0.5 * self.difference


def find_copies(pictures: np.ndarray) -> list[Copy]:
    """Return the pairs of images that show the same scene with a confidence of `REPORTED` or more.

    `pictures` are the whole images in gray, uint8 [N, SIDE, SIDE]; blank ones are skipped.
    """
    images = torch.from_numpy(pictures)
    seen = torch.cat([part.float().flatten(1).std(1) >= FLAT_LEVELS for part in images.split(4096)])
    numbers = seen.nonzero()[:, 0]
    images = images[seen]
    if len(images) < 2:
        return []
    bank = _Bank(_describe(images, 0))
    cosines, likes = bank.nearest(bank.features, min(TYPICAL_RANK + 1, len(images)))  # including the image itself
    typical = 1 - cosines[:, -1]
    pairs = _candidates(images, bank, typical)
    looks = _typical_looks(images, likes)
    usual = torch.minimum(looks[:, pairs.one], looks[:, pairs.other]).clamp(max=1)
    limits = torch.stack([COPY_SHARE * usual[0], DETAIL_SHARE * usual[1] ** 3]).clamp(min=LEAST_LIMIT)
    found: dict[tuple[int, int], Copy] = {}
    for place, difference in _laid_on(images, pairs, limits):
        one, other = sorted((int(pairs.one[place]), int(pairs.other[place])))
        copy = Copy(int(numbers[one]), int(numbers[other]), bool(pairs.mirrored[place]), difference)
        if (one, other) not in found or difference < found[one, other].difference:
            found[one, other] = copy
    return [found[key] for key in sorted(found)]


class _Pairs(NamedTuple):
    """Candidate pairs, all [P]: a window of picture `one`, mirrored or not, may be the whole picture `other`."""

    one: torch.Tensor
    other: torch.Tensor
    mirrored: torch.Tensor
    window: torch.Tensor


WINDOWS = [(1.0, 0.0, 0.0), *((scale, *place) for scale in SCALES for place in product(PLACES, repeat=2))]


def _basis(scale: float, place: float) -> torch.Tensor:
    """Return the cosines over a window along one axis, float32 [FREQUENCIES, SIDE]."""
    length = scale * SIDE
    start = place * (SIDE - length)
    edges = torch.arange(SIDE + 1, dtype=torch.float64).clamp(start, start + length)
    centres = (edges[1:] + edges[:-1]) / 2 - start
    waves = torch.cos(math.pi / length * torch.arange(FREQUENCIES)[:, None] * centres)
    return ((edges[1:] - edges[:-1]) * waves).float()


def _describe(images: torch.Tensor, window: int, *, mirrored: bool = False) -> torch.Tensor:
    """Return unit vectors, float32 [N, FREQUENCIES^2 - 1], that describe a window of each image."""
    scale, down, across = WINDOWS[window]
    rows, columns = _basis(scale, down), _basis(scale, across)
    signs = torch.ones(FREQUENCIES)
    if mirrored:  # mirroring negates the odd cosines
        signs[1::2] = -1
    parts = [
        (rows @ part.float() @ columns.T * signs).flatten(1)[:, 1:] for part in images.split(COMPARED_AT_ONCE // 2**12)
    ]
    return F.normalize(torch.cat(parts))


class _Bank:
    """Descriptions to search for nearest neighbors: all of them or, if there are many, only those in nearby cells."""

    def __init__(self, features: torch.Tensor) -> None:
        self.features = features
        cells = len(features) // CELL_IMAGES if len(features) > 2 * CELL_IMAGES else 1
        every = np.random.Generator(np.random.PCG64(0)).permutation(len(features))[:cells]
        self._centres = features[torch.from_numpy(np.sort(every))]
        owner = torch.cat([(part @ self._centres.T).argmax(1) for part in features.split(65536)])
        self._members = [(owner == cell).nonzero()[:, 0] for cell in range(cells)]

    def nearest(self, queries: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and positions of the nearest descriptions, [Q, count], nearest first."""
        cosines = torch.full((len(queries), count), -1.0)
        indices = torch.zeros((len(queries), count), dtype=torch.long)
        searched = min(CELLS_SEARCHED, len(self._members))
        cells = torch.cat([(part @ self._centres.T).topk(searched).indices for part in queries.split(65536)])
        for cell, members in enumerate(self._members):
            bank = self.features[members].T.contiguous()
            asking = (cells == cell).any(1).nonzero()[:, 0]
            for rows in asking.split(max(1, COMPARED_AT_ONCE // max(1, len(members)))):
                best = (queries[rows] @ bank).topk(min(count, len(members)))
                both = torch.cat([cosines[rows], best.values], 1).topk(count)
                cosines[rows] = both.values
                indices[rows] = torch.cat([indices[rows], members[best.indices]], 1).gather(1, both.indices)
        return cosines, indices


def _unit(images: torch.Tensor) -> torch.Tensor:
    """Return images [P, SIDE, SIDE] as vectors with mean 0 and length 1."""
    flat = images.float().flatten(1)
    return F.normalize(flat - flat.mean(1, keepdim=True))


def _looks(images: torch.Tensor) -> torch.Tensor:
    """Return vectors [2, P, SIDE^2] of pictures and of their details, which are pixels minus the mean around them."""
    pictures = images.float()
    details = pictures - F.avg_pool2d(pictures, DETAIL_SIDE, 1, DETAIL_SIDE // 2, count_include_pad=False)
    # Without the square roots, a few strong edges, such as a frame, would dominate the details.
    return torch.stack([_unit(pictures), _unit(details.sign() * details.abs().sqrt())])


def _typical_looks(images: torch.Tensor, likes: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of each image, and of its details, from similar images, float32 [2, N]."""
    found = []
    for part in torch.arange(len(likes)).split(COMPARED_AT_ONCE // SIDE**2 // likes.shape[1]):
        others = _looks(images[likes[part].flatten()]).view(2, len(part), -1, SIDE**2)
        found.append(1 - (others @ _looks(images[part])[..., None]).amin((2, 3)))
    return torch.cat(found, 1)


def _candidates(images: torch.Tensor, bank: _Bank, typical: torch.Tensor) -> _Pairs:
    """Return the pairs whose descriptions are unusually close, limited to the nearest few of each image."""
    found: list[torch.Tensor] = []
    ones = torch.arange(len(images))[:, None].expand(-1, NEAREST + 1)
    for mirrored, window in product((False, True), range(len(WINDOWS))):
        cosines, others = bank.nearest(_describe(images, window, mirrored=mirrored), NEAREST + 1)
        share = (1 - cosines) / torch.minimum(typical[ones], typical[others]).clamp(min=1e-6)
        is_one = (share <= CANDIDATE_SHARE) & (ones != others)
        kind = torch.full_like(ones, len(WINDOWS) * mirrored + window)
        columns = (ones, others, kind, (share * 2**20).long())
        found.append(torch.stack([column[is_one] for column in columns], 1))
    rows = torch.cat(found)
    # Keep the best window of each pair and orientation, and the best few pairs of each image and orientation.
    owners = rows[:, 0] * 2 + rows[:, 2] // len(WINDOWS)
    order = np.lexsort((rows[:, 3], owners))
    rows, owners = rows[order], owners[order]
    first = np.sort(np.unique((owners * len(images) + rows[:, 1]).numpy(), return_index=True)[1])
    rows, owners = rows[first], owners[first]
    rows = rows[torch.arange(len(rows)) - torch.searchsorted(owners, owners) < MOST_CANDIDATES]
    kind = rows[:, 2]
    return _Pairs(rows[:, 0], rows[:, 1], kind >= len(WINDOWS), kind % len(WINDOWS))


def _laid_on(images: torch.Tensor, pairs: _Pairs, limits: torch.Tensor) -> Iterator[tuple[int, float]]:
    """Align the pairs; for each similar pair, yield its position and its difference as a share of the limits [2, P]."""
    for places in torch.arange(len(pairs.one)).split(COMPARED_AT_ONCE // SIDE**2 // 8):
        scales, *starts = torch.tensor(WINDOWS)[pairs.window[places]].T
        boxes = torch.stack([2 * (1 - scales) * start - 1 for start in reversed(starts)], 1)
        boxes = torch.cat([boxes, boxes + 2 * scales[:, None]], 1)
        boxes, differences = _fit(images, pairs, places, boxes, ROUGH_STEPS)
        near = differences <= LAID_ROUGHLY_SHARE / COPY_SHARE * limits[0, places]
        places = places[near]
        boxes, _ = _fit(images, pairs, places, boxes[near], FINE_STEPS)
        laid = _looks(_windows(_whole(images, pairs, places), boxes))
        shares = ((1 - (laid * _looks(images[pairs.other[places]])).sum(2)) / limits[:, places]).amin(0)
        same = shares <= 2 * (1 - REPORTED)
        yield from zip(places[same].tolist(), shares[same].tolist(), strict=True)


def _whole(images: torch.Tensor, pairs: _Pairs, places: torch.Tensor) -> torch.Tensor:
    whole = images[pairs.one[places]].float()
    return torch.where(pairs.mirrored[places][:, None, None], whole.flip(2), whole)


def _windows(whole: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Return the part of each picture [SIDE, SIDE] in its box (see `_fit`), resized to that shape."""
    theta = torch.zeros(len(boxes), 2, 3)
    first, last = boxes[:, :2], boxes[:, 2:]
    theta[:, [0, 1], [0, 1]], theta[:, :, 2] = (last - first) / 2, (last + first) / 2
    grid = F.affine_grid(theta, [len(boxes), 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(whole[:, None], grid, padding_mode="border", align_corners=False)[:, 0]


def _fit(
    images: torch.Tensor, pairs: _Pairs, places: torch.Tensor, boxes: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the windows with Adam to where the pictures differ least; return the windows and the smallest differences.

    `boxes` are the left, upper, right and lower edges of the windows, float32 [P, 4] in -1 to 1, for the pairs at
    `places`, int64 [P]. Each edge moves independently; otherwise, the center of a window that covers the whole image
    could not move before its size changes.
    """
    whole = _whole(images, pairs, places)
    wanted = _unit(images[pairs.other[places]])
    boxes = boxes.clone().requires_grad_()
    best, least = boxes.detach().clone(), torch.full((len(places),), math.inf)
    optimizer = torch.optim.Adam([boxes], lr=STEP)
    for _ in range(steps):
        differences = 1 - (_unit(_windows(whole, boxes)) * wanted).sum(1)
        with torch.no_grad():
            is_better = differences < least
            least = torch.where(is_better, differences, least)
            best = torch.where(is_better[:, None], boxes, best)
        optimizer.zero_grad()
        differences.sum().backward()
        optimizer.step()
        with torch.no_grad():  # keep the windows inside their images
            boxes[:, 2:].clamp_(2 * SMALLEST_WINDOW - 1, 1)
            boxes[:, :2] = torch.minimum(boxes[:, :2].clamp(min=-1), boxes[:, 2:] - 2 * SMALLEST_WINDOW)
    return best, least
