"""A loaded data set: the samples, and what a run records about them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from zerovision.models import ImageSize, sides, size_of
from zerovision.models.preparation import Preparation, differences
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError, either, shown
from zerovision.training.base.units import plural
from zerovision.training.data import DataOptions, bad_image_share
from zerovision.training.data.augment import (
    CROP_DRAWS,
    BoxChooser,
    build_policy,
    evaluation_geometry,
    random_box,
    resize,
)
from zerovision.training.data.augmentations import AUGMENTATIONS, Augmentation, SizeRamp, augmentation_of, size_ramp
from zerovision.training.data.bad_images import bad_image_budget
from zerovision.training.data.batch_transforms import BatchTransforms, Mixing
from zerovision.training.data.class_names import LabelTargets, first_names, notes_on_names, targets_of
from zerovision.training.data.division import fingerprint
from zerovision.training.data.images import Images
from zerovision.training.data.randomness import COPY, FIRST_CROP_DRAW, seed_global_generators, uniform_draws
from zerovision.training.data.reading.files import ImageError
from zerovision.training.data.reading.image_numbers import BYTES, note_unused_range, statistics
from zerovision.training.data.reading.sources import ArraySource, FileSource, Source, open_files
from zerovision.training.data.settings import IMBALANCE, NUMBERS
from zerovision.training.world.preserved_process import preserved_generators

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES_OF_STATISTICS, SIDE_OF_STATISTICS, VALUES_OF_STATISTICS = 64, 128, 2**26  # for files read as numbers


@dataclass(eq=False)
class ImageDataset(Dataset):
    """Maps (epoch, draw key) to a sample: `(normalized image float32 [C, S, S], label)`.

    Attributes:
        source: The raw images.
        preprocessing: See `DatasetPair.preprocessing`.
        augmentation: The augmentation; none by default.
        seed: Seed of the augmentation.
        most_bad: Largest allowed number of unreadable images, which get weight 0; if 0, any such image is an error.
        ramp: Image size by epoch; None if every epoch uses the size in `preprocessing`.
        batch_transforms: Applied to whole batches on the device, after `read`.
        mixing: Applied to whole batches after `batch_transforms`; None to disable mixing.
        sets: Which classes each label stands for; None if each label is one class.
    """

    source: Source
    preprocessing: Preprocessing
    augmentation: Augmentation = AUGMENTATIONS["none"]
    seed: int = 0
    most_bad: int = 0
    mixing: Mixing | None = None
    ramp: SizeRamp | None = None
    sets: LabelTargets | None = None

    def __post_init__(self) -> None:
        self._smaller: ImageDataset | None = None
        self.batch_transforms = BatchTransforms(self.preprocessing, self.augmentation, self.seed)
        self._geometry = evaluation_geometry(self.preprocessing)
        self._policy = build_policy(self.augmentation, self.preprocessing)

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        """Return the sample for an epoch and one of its `BatchKey.draw_keys`, before mixing.

        Training calls `read` instead, and transforms whole batches; see `reader.read_batch`. The state of the
        global random generators is preserved.

        Raises:
            ImageError: If the image cannot be read.
        """
        epoch, draw_key = key
        if (sized := self.for_epoch(epoch)) is not self:
            return sized[key]
        index, draw_keys = draw_key % COPY, np.array([draw_key])
        with preserved_generators():
            image = self.read(epoch, index, self.draws(epoch, draw_keys)[0], draw_key - index)
        return self.batch_transforms(image[None], epoch, draw_keys)[0], int(self.source.labels[index])

    def for_epoch(self, epoch: int) -> ImageDataset:
        """Return this set with images of the epoch's size, or the set itself if that is the full size."""
        full = self.preprocessing.image_size
        size = full if self.ramp is None else self.ramp.size(epoch, int(full))
        if size == full:
            return self
        if self._smaller is None or self._smaller.preprocessing.image_size != size:
            self._smaller = replace(self, preprocessing=self.preprocessing.at_size(size), ramp=None)
        return self._smaller

    @property
    def is_constant(self) -> bool:
        """Whether a sample is the same image in every epoch."""
        return self.augmentation.is_none and self.mixing is None and self.ramp is None

    @property
    def sizes(self) -> list[ImageSize]:
        """All image sizes, in pixels, that occur in any epoch."""
        full = self.preprocessing.image_size
        return [full] if self.ramp is None else [*self.ramp.sizes(int(full))]

    def draws(self, epoch: int, draw_keys: np.ndarray) -> list[list[float]]:
        """Return the random draws that `read` needs; for `draw_keys`, int64 [B], see `BatchKey`."""
        return uniform_draws(self.seed, epoch, draw_keys, CROP_DRAWS, first=FIRST_CROP_DRAW).tolist()

    def read(self, epoch: int, index: int, draws: list[float], offset: int = 0) -> torch.Tensor:
        """Return the image, uint8 or float32 [C, S, S], before `batch_transforms`; may seed the global generators.

        Args:
            epoch: Epoch, which determines the augmentation.
            index: Position in the data set.
            draws: This sample's row in the result of `draws`.
            offset: The sample's key in `BatchKey.draw_keys`, minus `index`.

        Raises:
            ImageError: If the image cannot be read.
        """
        if self.augmentation.crop:
            image = resize(self.source.read(index, self._crop(draws)), self.preprocessing)
        else:
            image = self._geometry(self.source.read(index))
        if not self.augmentation.draws_globally:
            return image
        seed = seed_global_generators(self.seed, epoch, index + offset)
        image = image if self._policy is None else self._policy(image)
        own = self.augmentation.function
        return image if own is None else _checked(own(image, np.random.default_rng(seed)), image, own)

    def _crop(self, draws: list[float]) -> BoxChooser:
        height, width = self.batch_transforms.sides
        low, high = (bound * (width / height) for bound in self.augmentation.crop_ratio)  # 1: output's shape
        return partial(random_box, draws=draws, scale=self.augmentation.crop_scale, ratio=(low, high))


def _checked(result: object, image: torch.Tensor, function: object) -> torch.Tensor:
    """Return a user function's result; raise UserError if it is not an image of the same shape and dtype."""
    if isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (image.shape, image.dtype):
        return result
    made = f"{result.dtype} {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
    name = getattr(function, "__name__", type(function).__name__)
    raise UserError(f"the augmentation {name} made {made} of {image.dtype} {list(image.shape)}: keep type and shape.")


@dataclass(frozen=True)
class DatasetPair:
    """The training and validation sets from `load_data`, the same on every rank.

    Attributes:
        train: Training samples, whose augmentation depends on (seed, epoch, index).
        val: Validation samples, which are never augmented; the epoch in a key is ignored.
        class_names: Name of each label, or of each target column of `sets`.
        preprocessing: The evaluation preprocessing; `train.preprocessing` has the training images' size, which may
            differ.
        augmentation: Name of the augmentation in use, never "auto".
        train_counts: Number of training images in each class.
        val_counts: Number of validation images in each class.
        fingerprint: SHA-256 of the classes, and of the files (path, size, label) or of the pixels in memory.
        notes: One-line messages for the user.
        test: Samples to evaluate once, after training, or None; not included in `fingerprint`.
        sets: Which classes each label stands for; None if each label is one class.
    """

    train: ImageDataset
    val: ImageDataset
    class_names: list[str]
    preprocessing: Preprocessing
    augmentation: str
    train_counts: list[int]
    val_counts: list[int]
    fingerprint: str
    notes: list[str] = field(default_factory=list)
    test: ImageDataset | None = None
    sets: LabelTargets | None = None

    @property
    def label_names(self) -> list[str]:
        """Name of each label."""
        return self.class_names if self.sets is None else self.sets.names

    def label_targets(self, device: torch.device) -> torch.Tensor | None:
        """Return the targets of `sets` on a device, float32 [S, K]; None if `sets` is None."""
        return None if self.sets is None else self.sets.targets.to(device)

    def noted(self, notes: Sequence[str]) -> DatasetPair:
        """Return a copy of the pair with `notes` before its existing notes."""
        return replace(self, notes=[*notes, *self.notes])

    @property
    def parts(self) -> dict[str, ImageDataset]:
        """The sets by name: "train", "val" and, unless it is None, "test"."""
        return {"train": self.train, "val": self.val} | ({"test": self.test} if self.test else {})


@dataclass(frozen=True)
class DatasetDefaults:
    """Default settings of a data set."""

    image_size: ImageSize  # in pixels
    augmentation: str  # what "auto" selects
    centre_crop: bool  # whether evaluation crops the center (photographs) or resizes the whole image
    mean: Sequence[float]  # per channel, of values in 0..1
    std: Sequence[float]  # standard deviation per channel, of values in 0..1


PHOTOGRAPHS = DatasetDefaults(224, "crop_flip", centre_crop=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)
RGBA_PHOTOGRAPHS = replace(PHOTOGRAPHS, mean=(*IMAGENET_MEAN, 0.5), std=(*IMAGENET_STD, 0.5))  # alpha: -1..1


def _preprocessing(size: ImageSize, source: Source, options: DataOptions, defaults: DatasetDefaults) -> Preprocessing:
    """Return the evaluation preprocessing for images of one size."""
    is_cropped = defaults.centre_crop if options.fit == "auto" else options.fit == "crop"
    resize_size = size_of(*(int(side / options.eval_crop) for side in sides(size)))  # as in timm
    return Preprocessing(
        size,
        resize_size if is_cropped else None,
        mean=_for_channels(options.mean, source.channels) or _for_channels(defaults.mean, source.channels),
        std=_for_channels(options.std, source.channels) or _for_channels(defaults.std, source.channels),
        interpolation=options.interpolation,
        fit="pad" if options.fit == "pad" else "",
        values=source.values,
        decode="" if source.in_memory or options.decode == "cpu" else options.decode,
    )


def make_dataset_pair(
    sources: Sequence[Source],
    class_names: list[str],
    defaults: DatasetDefaults,
    options: DataOptions,
    fingerprint: str,
    sets: LabelTargets | None = None,
) -> DatasetPair:
    """Wrap the training, validation and (with three sources) test images in their transforms, or raise a UserError."""
    _check_names(class_names, options, sets)
    train = sources[0]
    if options.fit in ("pad", "squash") and AUGMENTATIONS[defaults.augmentation].crop:
        defaults = replace(defaults, augmentation="shift_flip")
    augmentation, ramp = augmentation_of(options, defaults.augmentation), size_ramp(options.progressive_size)
    _check_colours(train, augmentation, options)
    size = options.image_size or defaults.image_size
    eval_size = options.eval_image_size or size
    _check_sizes(size, eval_size, augmentation, ramp, options.progressive_size)
    mixing = Mixing(options, len(class_names)) if options.mixup or options.cutmix else None
    preprocessing, evaluation = (_preprocessing(one, train, options, defaults) for one in (size, eval_size))
    share, counts = bad_image_share(options.bad_images), []
    notes = [
        *notes_on_names(class_names),
        *_preparation_notes(options, preprocessing, of_arrays=train.in_memory),
        *_size_notes(size, eval_size, ramp),
    ]
    for source, what in zip(sources, ("training", "validation"), strict=False):
        counts.append(count_labels(source.labels, class_names, what, sets))
        if names := [name for name, count in zip(class_names, counts[-1], strict=True) if not count]:
            notes.append(f"no {what} image for {first_names(names)}")
    if len(class_names) < options.fewest_classes:
        raise UserError(f"the training set has only one class ({''.join(class_names)!r}): at least two are needed.")
    notes += _balance_notes(counts[0], class_names, options) if sets is None else ()

    def dataset(source: Source, seen_as: Preprocessing, **more: Any) -> ImageDataset:
        return ImageDataset(source, seen_as, most_bad=bad_image_budget(share, len(source.labels)), sets=sets, **more)

    val, *test = (dataset(source, evaluation) for source in sources[1:])
    return DatasetPair(
        train=dataset(train, preprocessing, augmentation=augmentation, seed=options.seed, mixing=mixing, ramp=ramp),
        val=val,
        class_names=class_names,
        preprocessing=evaluation,
        augmentation=defaults.augmentation if options.augmentation == "auto" else options.augmentation,
        train_counts=counts[0],
        val_counts=counts[1],
        fingerprint=fingerprint,
        notes=notes,
        test=test[0] if test else None,
        sets=sets,
    )


def _check_names(class_names: list[str], options: DataOptions, sets: LabelTargets | None) -> None:
    if options.reads_lists and sets is None:
        raise UserError(
            f"--task {options.task} needs a table of paths, not --data {options.data}: use LIST.csv, .tsv or .parquet "
            "with --label-column NAME for lists such as cat;dog, or --label-column A,B,... for columns of 1s and 0s."
        )
    if repeated := [name for name, count in Counter(class_names).items() if count > 1]:
        raise UserError(f"--data {options.data}: {len(repeated)} repeated class names, such as {shown(repeated[0])}.")


def _check_colours(source: Source, augmentation: Augmentation, options: DataOptions) -> None:
    if (source.channels, source.values) != (3, BYTES) and augmentation.uses_pillow:
        flag = "--color-jitter" if augmentation.color_jitter else f"--augmentation {options.augmentation}"
        plain = either(name for name, line in AUGMENTATIONS.items() if not line.uses_pillow)
        raise UserError(
            f"{flag} needs 8-bit RGB images, but these have {plural(source.channels, 'channel')} of {source.values}: "
            f"{'leave it out' if augmentation.color_jitter else f'use --augmentation {plain}'}."
        )


def _check_sizes(
    size: ImageSize, eval_size: ImageSize, augmentation: Augmentation, ramp: SizeRamp | None, ramp_given: str
) -> None:
    """Raise UserError if the sizes of training and validation images, in pixels, are inconsistent."""
    smallest = ramp.low if ramp else min(sides(size))
    if ramp and isinstance(size, str):
        raise UserError(f"--progressive-size {ramp_given} is only for square images, not {size}: leave it out.")
    if smallest > min(sides(size)):
        raise UserError(f"--progressive-size {ramp_given}: images must grow to {size} pixels: use a LOW below {size}.")
    if any(there < here for there, here in zip(sides(eval_size), sides(size), strict=True)):
        raise UserError(f"--image-size {size}:{eval_size}: validation needs at least {size} pixels, as in training.")
    if (augmentation.shift_pixels or 0) >= smallest:
        raise UserError(
            f"--shift-pixels {augmentation.shift_pixels}: images of {smallest} pixels can be shifted by at most "
            f"{smallest - 1}."
        )


def make_array_datasets(
    train: ArraySource,
    val: ArraySource,
    class_names: list[str],
    options: DataOptions,
    image_size: ImageSize,
    augmentation: str = "shift",
) -> DatasetPair:
    """Call `make_dataset_pair` with the training images' mean and standard deviation as defaults."""
    train, val = (source.in_channels(options.image_channels) for source in (train, val))
    count_labels(train.labels, class_names, "training", None)  # an empty set has no statistics
    mean, std = statistics(train.images)
    if train.values != BYTES:  # the mean and deviation of starting weights are meant for 8-bit images
        options = replace(options, mean=None, std=None)
    defaults = DatasetDefaults(image_size, augmentation, centre_crop=False, mean=mean, std=std)
    digest = hashlib.sha256("\0".join(class_names).encode())
    for tensor in (train.images, train.labels, val.images, val.labels):
        digest.update(tensor.contiguous().numpy().data)
    return make_dataset_pair((train, val), class_names, defaults, options, digest.hexdigest())


def make_file_datasets(parts: Sequence[Images], options: DataOptions) -> DatasetPair:
    """Call `make_dataset_pair` for the parts of a data set; a single part is used for training and for validation."""
    given = [part for part in parts if len(part)] or [parts[0]]
    first, trained, archive = given[0], given[:2], given[0].archive
    class_names, sets = [*first.words["label"]], None
    if first.classes is not None:
        sets, class_names = targets_of(class_names, first.classes), [*first.classes]
    for part, what in zip(given[1:] or given, ("validation", "test"), strict=False):
        if archive is not None:
            archive.check_room(what, np.unique(part["file"]).tolist())
    sizes = options.image_size or PHOTOGRAPHS.image_size, options.eval_image_size
    longest = max(side for size in sizes for side in sides(size))
    sources, cache_notes = open_files(given, longest, options)
    train = sources[0]
    notes, defaults = [*first.notes, *cache_notes], RGBA_PHOTOGRAPHS if train.channels == 4 else PHOTOGRAPHS
    # Remote images are not fetched just for this note.
    if options.decode != NUMBERS and (options.cache != "off" or not (archive and archive.is_remote)):
        notes += note_unused_range(train.images, options.max_megapixels * 10**6)
    if options.decode == NUMBERS and len(first):
        mean, std = _statistics_of_some(train)
        defaults = replace(PHOTOGRAPHS, mean=mean, std=std)
        options = options if train.values == BYTES else replace(options, mean=None, std=None)
    known = fingerprint(trained, [*class_names, *(sets.names if sets else ())])
    sources = sources if len(sources) > 1 else [train, train]
    return make_dataset_pair(sources, class_names, defaults, options, known, sets).noted(notes)


def _statistics_of_some(source: FileSource) -> tuple[list[float], list[float]]:
    """Return the mean and standard deviation per channel of evenly spaced images in a set; all weigh the same."""
    most = min(IMAGES_OF_STATISTICS, VALUES_OF_STATISTICS // (source.channels * SIDE_OF_STATISTICS**2))
    shrunk = []
    for index in source.images.spaced_rows(most):
        with suppress(ImageError):  # the loader reports this error
            shrunk.append(v2.functional.resize(source.read(index), [SIDE_OF_STATISTICS] * 2, antialias=True))
    return statistics(torch.stack(shrunk)) if shrunk else ([0.5], [0.5])


def _balance_notes(counts: Sequence[int], class_names: Sequence[str], options: DataOptions) -> Iterator[str]:
    low, high = min(counts), max(counts)
    if 0 < low * IMBALANCE <= high and (options.sampling, options.class_weights) == ("uniform", "none"):
        rarest, most = (shown(class_names[counts.index(count)]) for count in (low, high))
        yield (
            f"the classes are not balanced: {most} has {high} training images, {rarest} has {low}; --sampling balanced "
            "or --class-weights balanced gives rare classes equal weight"
        )


def _preparation_notes(options: DataOptions, preprocessing: Preprocessing, *, of_arrays: bool) -> Iterator[str]:
    """Yield notes on how preprocessing differs from that of the starting weights, except for the user's choices."""
    here = Preparation.of_run(preprocessing)
    for made in map(Preparation._make, options.made_for):
        if text := differences(made, here, of_arrays=of_arrays):
            yield f"the starting weights were trained on images {text}"


def _size_notes(size: ImageSize, eval_size: ImageSize, ramp: SizeRamp | None) -> Iterator[str]:
    if ramp:
        last = max(ramp.last, ramp.first + 1)
        yield f"training images have {ramp.low} pixels up to epoch {ramp.first + 1}, {size} from epoch {last + 1}"
    if eval_size != size:
        yield f"training images have {size} pixels, validation images {eval_size}, the size that the model is made for"


def _for_channels(values: Sequence[float] | None, channels: int) -> tuple[float, ...]:
    """Return means or deviations for this number of channels, or () if they do not fit; a single value is repeated.

    Gray images use the mean of the values, because a model's 3-channel first layer is summed into one channel for them.
    """
    if values is None or (len(values) not in (1, channels) and channels != 1):
        return ()
    return (sum(values) / len(values),) if channels == 1 else tuple(values) * (channels // len(values))


def count_labels(labels: torch.Tensor, class_names: list[str], what: str, sets: LabelTargets | None) -> list[int]:
    """Return the number of images in each class; raise UserError if there is no image, or a label is out of range.

    Args:
        labels: int64 [N].
        class_names: Name of each class.
        what: Which images these are, for messages.
        sets: See `DatasetPair`.
    """
    if len(labels) == 0:
        raise UserError(f"the {what} set is empty: at least one image is needed.")
    if sets is not None:
        return (torch.bincount(labels, minlength=len(sets.names)).double() @ sets.targets.double()).long().tolist()
    # a label out of range would fail an assertion on the GPU, long after the start
    low, high, last = int(labels.min()), int(labels.max()), len(class_names) - 1
    if low < 0 or high > last:
        raise UserError(f"the {what} labels range from {low} to {high}: {last + 1} classes need 0 to {last}.")
    return torch.bincount(labels, minlength=len(class_names)).tolist()
