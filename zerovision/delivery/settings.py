"""Settings of the commands that use a trained model or pack a data set, with their flags and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from zerovision.delivery.export import FORMATS, PRECISIONS, check_choice
from zerovision.delivery.trained_model import find_model, find_run
from zerovision.models import LARGEST_IMAGE_SIZE
from zerovision.training.base.settings import LARGEST_BATCH
from zerovision.training.config.command_line import OneLineParser
from zerovision.training.config.command_settings import (
    CommandSettings,
    choice,
    number,
    switch,
    text,
    word,
    words_behind,
)
from zerovision.training.data import BAD_IMAGES_USAGE, DATASETS
from zerovision.training.data.settings import MOST_MEGAPIXELS

LARGEST_TOP_K = 1000
MOST_IMAGES, MOST_THREADS, LARGEST_SHARD_MB = 10**6, 256, 100_000
USAGES = ", ".join(entry.usage for entry in DATASETS.values())
SPLITS = ("auto", "val", "test", "train", "all")
DEVICES = ("cpu", "cuda")
OF_DATASETS = "Folder for torchvision's data sets; default: as in the run."
OF_DEVICE = "Device to use; default: a GPU if there is one."
OF_MEGAPIXELS = "Largest image to read, in millions of pixels; default: as in the run."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(CommandSettings):
    """The setting that names a model."""

    model: str = word("RUN_OR_WEIGHTS", "A run's name or folder, or a safetensors file.")

    def look(self) -> None:
        """See `CommandSettings.look`."""
        find_model(self.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSettings(CommandSettings):
    """The settings that select the images; an empty value means the run's setting."""

    data: str = text(f"Images to use: {USAGES}; default: the run's data.")
    data_root: str = text(OF_DATASETS)
    path_column: str = text("Table column that contains the paths; default: as in the run.")
    label_column: str = text("Table column that contains the classes; default: as in the run.")
    bad_images: str = text(f"Mode for unreadable images: {BAD_IMAGES_USAGE}; default: as in training.", metavar="MODE")
    max_megapixels: int = number(0, 1, MOST_MEGAPIXELS, OF_MEGAPIXELS)
    allow_missing_classes: bool = switch("Accept data that does not contain all of the model's classes.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewSettings(CommandSettings):
    """The views of an image to average; see `zerovision.delivery.views`."""

    flip: bool = switch("Average the probabilities of each image and its mirror image.")
    shift_pixels: int = number(
        0, 0, LARGEST_IMAGE_SIZE, "Also average over two copies, shifted up-left and down-right; 0: no copies."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings(ViewSettings, ImageSettings, ModelSettings):
    """Evaluates a trained model: exact scores, and the images that the model gets wrong.

    python scripts/evaluate.py digits                                   # a run's name, on the images it held out
    python scripts/evaluate.py logs/runs/digits --data ~/more-photos    # other images: one folder per class
    python scripts/evaluate.py model.safetensors --data digits
    torchrun --nproc_per_node=2 scripts/evaluate.py digits              # the same scores, faster

    Writes scores.json, per_class.csv, confusion.csv, confusion.png, worst.csv and worst.png. Averaged views are scored
    in addition to the plain images. Only safetensors files are read.
    """

    split: str = choice(
        "auto", SPLITS, "Data to use; auto: the images held out by the run, or all of a folder not used in training."
    )
    reject: str = text(
        "Calibrate the model on these images: predict.py then prints 'none of these' below the lowest threshold at "
        "which this share of the accepted images, such as 0.95, is correct; below:0.7 sets the threshold itself.",
        metavar="ACCURACY",
    )
    batch_size: int = number(64, 1, LARGEST_BATCH, "Images per rank and forward pass.")
    precision: str = choice("auto", ("auto", "bf16", "fp16", "fp32"), "Number format to compute in, as in training.")
    output: str | None = text("Folder for the results; default: a folder in the run's folder.")

    @classmethod
    def parser(cls) -> OneLineParser:
        """Return the parser, which also accepts the arguments that launchers add."""
        parser = super().parser()
        parser.add_local_rank()
        return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSettings(ViewSettings, ModelSettings):
    """Predicts the classes of images with a trained model.

    python scripts/predict.py digits photo.png other.jpg
    python scripts/predict.py logs/runs/digits ~/photos --output labels.csv
    find ~/photos -newer last | python scripts/predict.py digits - --format json
    python scripts/predict.py digits photo.png --explain why          # why/00001-photo.png: what led to the label
    curl -s https://example.org/cat.jpg | python scripts/predict.py digits -

    Exit code: 0 if all images were labeled, 1 if some could not be read (named on standard error), 2 for wrong
    arguments. Only safetensors files are read.
    """

    images: Iterable[str | Path] = word(
        "IMAGE", "Image files or folders; -: read one image, or a list of paths, from standard input.", nargs="+"
    )
    top_k: int = number(3, 1, LARGEST_TOP_K, "Number of classes to print for each image.")
    format: str = choice(
        "",
        ("table", "csv", "json"),
        "Format; json: one object per line. Default: csv or json if --output has that extension, otherwise table.",
    )
    output: str = text("File to write to, instead of standard output.")
    explain: str | bool = text("Folder for one picture per image that shows what led to its label.", metavar="FOLDER")
    batch_size: int = number(64, 1, LARGEST_BATCH, "Images per forward pass.")
    device: str = choice("", DEVICES, OF_DEVICE)
    decode: str = choice(
        "", ("cpu", "exact"), "cpu: shrink large JPEG files; exact: never shrink them. Default: as in the run, or cpu."
    )
    max_megapixels: int = number(0, 1, MOST_MEGAPIXELS, OF_MEGAPIXELS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings(ImageSettings, ModelSettings):
    """Exports a trained model to a file that other programs can run, and checks that the results stay the same.

    python scripts/export.py digits --format onnx                      # a run's name; for onnxruntime
    python scripts/export.py digits --format onnx --precision int8     # quantized; prints accuracy and speed
    python scripts/export.py digits --format onnx --with-preprocessing  # maps pictures to probabilities
    python scripts/export.py logs/runs/digits --format torch-export    # for PyTorch without zerovision
    python scripts/export.py model.safetensors --format safetensors --precision bf16 --data digits --output ~/models

    Before a file is kept, it is reopened and compared with PyTorch on real images. Exit code: 0 if the model was
    exported, 1 if the file differs too much, 2 for wrong arguments.
    """

    format: str = choice(None, FORMATS, "; ".join(f"{name}: {one.summary}" for name, one in FORMATS.items()) + ".")
    precision: str = choice(
        "fp32", [*PRECISIONS], "; ".join(f"{name}: {meaning}" for name, meaning in PRECISIONS.items()) + " (onnx only)."
    )
    with_preprocessing: bool = switch(
        "onnx, torch-export: the model takes any image size, uint8 [N, H, W, C], and returns probabilities and classes."
    )
    output: str = text("Folder for the files; default: export/ in the run's folder, or next to the weights.")
    check_images: int = number(0, 1, MOST_IMAGES, "Limit on validation images to compare; default: what fits in 2 GB.")
    calibration_images: int = number(256, 1, MOST_IMAGES, "int8: training images used to measure activation ranges.")
    max_accuracy_loss: float = number(
        1.0, 0.0, 100.0, "Percentage points of top-1 accuracy that the file may lose.", kind="percentage points"
    )
    batch_size: int = number(64, 1, LARGEST_BATCH, "Maximum number of images per forward pass.")
    threads: int = number(1, 1, MOST_THREADS, "Number of threads for onnxruntime.")
    split: ClassVar = "val"

    def look(self) -> None:
        """See `CommandSettings.look`."""
        check_choice(self.format, self.precision, with_preprocessing=self.with_preprocessing)
        super().look()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSettings(CommandSettings):
    """Writes the report of a run, or of several runs side by side: a single HTML file that works offline.

    python scripts/report.py digits                                # writes logs/runs/digits/report.html
    python scripts/report.py digits --watch                        # rewrites it whenever the run logs, until it ends
    python scripts/report.py digits digits-again --output both.html

    RUN is a run's name in logs/runs, or its folder.
    """

    runs: Iterable[str] = word("RUN", "A run's name or folder; several runs are compared.", nargs="+")
    output: str = text("File to write; default: report.html in the run's folder, or in this folder for several runs.")
    watch: bool = switch("Update the page while the run trains, until it ends.")

    def look(self) -> None:
        """See `CommandSettings.look`."""
        for run in self.runs:
            find_run(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishSettings(ModelSettings):
    """Uploads a finished run's model to the Hugging Face hub: weights, model card, class names and timm's config.json.

    python scripts/publish.py digits my-team/digits --dry-run   # lists what would be uploaded; needs no network
    python scripts/publish.py digits my-team/digits             # private unless --public is given

    The access token comes from HF_TOKEN or from `hf auth login`.
    """

    repository: str = word("ORG/NAME", "Repository on the hub; created if it does not exist.")
    public: bool = switch("Make a new repository public instead of private.")
    dry_run: bool = switch("List what would be uploaded; needs no network.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackSettings(CommandSettings):
    """Packs a data set into tar files in WebDataset's layout, each with an index, and checks the files.

    python scripts/pack.py ~/photos ~/packed                              # then train with --data ~/packed
    python scripts/pack.py list.csv packed --shard-mb 100 --val-fraction 0.1
    python scripts/pack.py torchvision:CIFAR10 cifar10

    pack also accepts all of the trainer's flags, such as --split-seed. Images keep their bytes, names and parts;
    training images are shuffled. Exit code: 0 if everything was packed, 2 if packing failed.
    """

    data: str = word("DATA", "Data set to pack: any value of the trainer's --data.")
    output: str = word("OUT", "New folder for the tar files.")
    shard_mb: int = number(256, 1, LARGEST_SHARD_MB, "Approximate size of each tar file, in megabytes.")
    training_words: tuple[str, ...] = words_behind(takes_trainers=True)
