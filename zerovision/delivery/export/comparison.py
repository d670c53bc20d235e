"""Compares an exported file with the trained model: logits and accuracy on real images, and time per image."""

from __future__ import annotations

import dataclasses
import statistics
import timeit
from collections import defaultdict
from dataclasses import dataclass

import torch

from zerovision.delivery.export import ExportRefused
from zerovision.delivery.export.export_job import CheckImages, ExportJob, Forward, run_in_batches
from zerovision.delivery.export.pictures import FromPictures
from zerovision.delivery.intervals import Interval, of_difference
from zerovision.delivery.views import probabilities_of
from zerovision.training.base.units import percent, plural

SMALL_BATCHES = (1, 2)
ROUNDING = 1e-9  # allowance in points, because 1.0 - 0.99 is slightly more than 0.01
TIMED_RUNS = 20


# fp32 has 24 significant bits (2^-24 = 6e-8). Kernels differ in the order in which they sum several thousand products,
# in up to a few hundred layers. The largest difference measured was 2e-6; 1e-4 leaves room for deeper networks. A wrong
# constant causes a much larger difference.
# bf16 has 8 significant bits, so the relative error of a weight is at most 2^-9. Independent errors average out within
# a dot product, and grow with the square root of the number of layers: 2^-9 x 0.6 x 10 is 1 % after a hundred layers.
# The differences measured were 0.05 to 2.2 %, and 2^-4 is 6 %. A single logit may change by ten times as much, so the
# bound on the largest difference is wider (up to 11 % was measured). Arithmetic stays in fp32, so other batch sizes
# have the same bound as for fp32.
# For int8, accuracy is decisive. Other batch sizes use other kernels, and a difference in the last bit may move a value
# to the neighboring one of 256 levels.
#
# Precision -> by how much logits may differ: the largest difference from the PyTorch module's logits in fp32, as a
# share of the largest logit; the root mean square of these differences, as a share of the logits' root mean square; the
# largest difference from the file's own logits at another batch size, as a share of the largest logit. None: only
# accuracy is checked.
TOLERANCES: dict[str, tuple[float | None, float | None, float]] = {
    "fp32": (1e-4, 1e-4, 1e-4),
    "bf16": (2**-2, 2**-4, 1e-4),
    "int8": (None, None, 2**-4),
    "fp32 of pictures": (2**-5, 2**-5, 1e-4),  # without AVX2, PyTorch may round a resized pixel differently
    "bf16 of pictures": (2**-2, 2**-4, 1e-4),
}
SMALLEST_PROBABILITY = 1e-12  # smaller probabilities are raised to this value before taking the logarithm
MOST_LEVELS = 1.01  # number of levels, of 255, by which a preprocessed pixel may differ
PIXELS_AT_A_TIME = 2**23


@dataclass(frozen=True)
class Agreement:
    """Result of comparing an exported file with the PyTorch module."""

    difference: float  # largest absolute difference between a logit of the file and of the PyTorch module
    rms_share: float  # root mean square of the differences, relative to that of the PyTorch module's logits
    batch_difference: float  # largest absolute difference between logits of the file at different batch sizes
    scale: float  # largest absolute logit of the PyTorch module
    equal_top1: float  # share of images, 0 to 1, for which the file and the PyTorch module predict the same class
    model_top1: float  # accuracy of the PyTorch module, 0 to 1
    file_top1: float  # accuracy of the file, 0 to 1
    lost: int  # number of images that only the PyTorch module classifies correctly
    gained: int  # number of images that only the file classifies correctly
    images: int  # number of images compared
    batch_sizes: tuple[int, ...]  # at which the file was run

    @property
    def points_lost(self) -> float:
        """The number of percentage points of top-1 accuracy that the file loses."""
        return 100 * (self.model_top1 - self.file_top1)

    @property
    def points_lost_interval(self) -> Interval:
        """The 95 % confidence interval of `points_lost` over infinitely many images of the same kind."""
        low, high = of_difference(self.lost, self.gained, self.images)
        return 100 * low, 100 * high

    def describe_loss(self, precision: str) -> str:
        """Describe `points_lost` and its confidence interval in words."""
        low, high = self.points_lost_interval
        return (
            f"{precision} loses {self.points_lost:.2f} points of top-1 ({percent(self.model_top1)} -> "
            f"{percent(self.file_top1)} on {plural(self.images, 'image')}; 95 % interval {low:.2f} to {high:.2f})"
        )


def compare(forward: Forward, check: CheckImages, batch_size: int) -> Agreement:
    """Compare a file's logits with the model's, and those of the first few images in small batches with full ones."""
    logits = run_in_batches(forward, check.images, batch_size)
    right, file_right = check.is_right(check.logits), check.is_right(logits)
    batch_difference, first = 0.0, 0
    for size in SMALL_BATCHES:
        few = slice(first, first + size)
        first += size
        if len(check.images[few]):
            difference = run_in_batches(forward, check.images[few], size) - logits[few]
            batch_difference = max(batch_difference, _largest(difference))
    return Agreement(
        _largest(logits - check.logits),
        float((logits - check.logits).square().mean().sqrt() / check.logits.square().mean().sqrt()),
        batch_difference,
        _largest(check.logits),
        float((logits.argmax(1) == check.logits.argmax(1)).double().mean()),
        float(right.double().mean()),
        float(file_right.double().mean()),
        int((right & ~file_right).sum()),
        int((file_right & ~right).sum()),
        len(check.labels),
        (*SMALL_BATCHES, min(batch_size, len(check.labels))),
    )


def compare_pictures(forward: Forward, job: ExportJob) -> Agreement:
    """Compare a file that includes the preprocessing with `predict`, by log-probabilities in place of logits.

    Raise ExportRefused if a preprocessed pixel differs from the one in `predict` by more than rounding explains.
    """
    module, check = job.module, job.check
    assert isinstance(module, FromPictures)
    assert check.picture is not None
    levels, picture = 255 * module.std[:, None, None], check.picture

    def answer(numbers: torch.Tensor) -> torch.Tensor:
        pictures, rows = [picture(number) for number in numbers[:, 0].tolist()], defaultdict(list)
        for place, shape in enumerate(one.shape for one in pictures):
            rows[shape].append(place)
        answers = torch.empty(len(pictures), check.logits.shape[1])
        for shape, places in rows.items():  # pictures of the same size form a batch
            for part in torch.tensor(places).split(max(1, PIXELS_AT_A_TIME // shape.numel())):
                batch = torch.stack([pictures[place] for place in part])
                off = float(((module.prepared(batch) - check.images[numbers[part, 0]]) * levels).abs().max())
                if not off <= MOST_LEVELS:
                    raise ExportRefused(
                        f"not exported: a pixel that the network sees is off by {off:.3g} of 255 levels, more than 1. "
                        "Nothing was written."
                    )
                answers[part] = forward(batch)
        return _logarithms(answers)

    def expect(images: torch.Tensor) -> torch.Tensor:
        return probabilities_of(module.network, images, module.views, module.calibration, module.task)

    expected = _logarithms(run_in_batches(expect, check.images, job.settings.batch_size))
    numbered = dataclasses.replace(check, images=torch.arange(len(check.labels))[:, None], logits=expected)
    return compare(answer, numbered, job.settings.batch_size)


def check_agreement(agreement: Agreement, precision: str, max_accuracy_loss: float) -> None:
    """Raise ExportRefused if a file differs more than its precision explains, or loses more accuracy than allowed."""
    shares = {
        "the largest difference of a logit from PyTorch's": agreement.difference / agreement.scale,
        "the root mean square difference of the logits from PyTorch's": agreement.rms_share,
        "the largest difference of a logit between batch sizes": agreement.batch_difference / agreement.scale,
    }
    for (what, share), bound in zip(shares.items(), TOLERANCES[precision], strict=True):
        if bound is not None and not share <= bound:  # also true for NaN
            raise ExportRefused(
                f"not exported: {what} is {share:.2g} of the logits, more than {bound:.2g} for {precision}. "
                "Nothing was written."
            )
    # With fewer than 100 images, a single image is worth more than a point, and near a tie, the outcome depends on
    # rounding (to 2^-9 of a weight in bf16, or to a level in int8). So losing one image is no reason to refuse.
    is_coarse = max_accuracy_loss > 0 and agreement.images < 100
    allowed = max(max_accuracy_loss, 100 / agreement.images) if is_coarse else max_accuracy_loss
    if not agreement.points_lost <= allowed + ROUNDING:
        raise ExportRefused(
            f"not exported: {agreement.describe_loss(precision)}, more than the {max_accuracy_loss:g} allowed. "
            "Nothing was written: use another --precision, or a larger --max-accuracy-loss."
        )


def milliseconds_per_image(forward: Forward, images: torch.Tensor, batch_size: int) -> float:
    """Return the median time per image; too few images, float32 [N, C, S, S], are repeated to fill a batch."""
    batch = images.repeat(-(-batch_size // len(images)), 1, 1, 1)[:batch_size]
    seconds = timeit.repeat(lambda: forward(batch), number=1, repeat=TIMED_RUNS)
    return 1e3 * statistics.median(seconds) / batch_size


def _logarithms(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.clamp(min=SMALLEST_PROBABILITY).log()


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())
