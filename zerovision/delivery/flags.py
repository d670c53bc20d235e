"""The flags of evaluate, predict, export and audit_data.py; they are the arguments of the functions behind them."""

from __future__ import annotations

from zerovision.delivery.export import FORMATS, PRECISIONS
from zerovision.models import LARGEST_IMAGE_SIZE
from zerovision.training.base.settings import LARGEST_BATCH
from zerovision.training.config.command_line import OneLineParser
from zerovision.training.data import BAD_IMAGES_USAGE, DATASETS
from zerovision.training.data.settings import MOST_MEGAPIXELS

LARGEST_TOP_K = 1000
MOST_IMAGES, MOST_THREADS = 10**6, 256


def evaluate_parser(description: str | None) -> OneLineParser:
    """Return the parser of evaluate.py."""
    parser = OneLineParser("evaluate", description)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    _add_image_flags(parser, "evaluate")
    parser.add_choice(
        "--split",
        ("auto", "val", "test", "train", "all"),
        default="auto",
        help="Part of the data; auto: what the run held out, or all of a folder that it was not trained on.",
    )
    _add_view_flags(parser, "Score beside the plain images the mean probabilities of")
    parser.add_argument(
        "--reject",
        default="",
        metavar="ACCURACY",
        help="Calibrate the model on these images, so that predict.py says 'none of these' below the lowest threshold "
        "above which so many are right, such as 0.95; below:0.7 gives the threshold itself.",
    )
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images per rank and forward pass.")
    parser.add_choice("--precision", ("auto", "bf16", "fp16", "fp32"), default="auto", help="As in training.")
    parser.add_argument("--output", default="", help="Folder of the files; default: in the run's folder.")
    parser.add_local_rank()
    return parser


def predict_parser(description: str | None) -> OneLineParser:
    """Return the parser of predict.py."""
    parser = OneLineParser("predict", description)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="Files, folders, or -: one image, or paths, on standard input."
    )
    parser.add_number("--top-k", 1, LARGEST_TOP_K, default=3, help="Classes named for each image.")
    of_ending = "Default: as --output ends, .csv or .json; else table."
    parser.add_choice("--format", ("table", "csv", "json"), help=f"json: one object a line. {of_ending}")
    parser.add_argument("--output", default="", help="File to write in place of standard output.")
    parser.add_argument(
        "--explain", default="", metavar="FOLDER", help="Write what spoke for the first label, a picture of each image."
    )
    _add_view_flags(parser, "Predict the mean probabilities of")
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images of one forward pass.")
    parser.add_choice("--device", ("cpu", "cuda"), help="Default: a GPU if there is one.")
    parser.add_choice(
        "--decode", ("cpu", "exact"), help="JPEG files shrunk, or in full. Default: as the run; cpu if it is not known."
    )
    add_max_megapixels(parser)
    return parser


def export_parser(description: str | None) -> OneLineParser:
    """Return the parser of export.py."""
    parser = OneLineParser("export", description)
    formats = "; ".join(f"{name}: {entry.summary}" for name, entry in FORMATS.items())
    precisions = "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items())
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    parser.add_choice("--format", [*FORMATS], required=True, help=f"{formats}.")
    parser.add_choice("--precision", [*PRECISIONS], default="fp32", help=f"{precisions} (onnx only).")
    parser.add_argument(
        "--with-preprocessing",
        action="store_true",
        help="onnx, torch-export: take pictures of any size, uint8 [N, H, W, C], and give probabilities and classes.",
    )
    parser.add_argument(
        "--output", default="", help="Folder of the files; default: export/ in the run's folder, or beside the weights."
    )
    _add_image_flags(parser, "check")
    images = "Most validation images to check on; default: all that fit 2 GB."
    parser.add_number("--check-images", 1, MOST_IMAGES, default=0, help=images)
    images = "int8: training images that show the activations' ranges."
    parser.add_number("--calibration-images", 1, MOST_IMAGES, default=256, help=images)
    points = "points of top-1"
    parser.add_number(
        "--max-accuracy-loss",
        0.0,
        100.0,
        kind=points,
        default=1.0,
        help=f"{points.capitalize()} that the file may lose.",
    )
    parser.add_number("--batch-size", 1, LARGEST_BATCH, default=64, help="Images of one run, at most.")
    parser.add_number("--threads", 1, MOST_THREADS, default=1, help="Threads of onnxruntime.")
    return parser


def add_max_megapixels(parser: OneLineParser) -> None:
    """Add the flag of the largest image."""
    most = "Largest image that is read; default: the run's."
    parser.add_number("--max-megapixels", 1, MOST_MEGAPIXELS, default=0, help=most)


def audit_data_parser(description: str | None) -> OneLineParser:
    """Return the parser of audit_data.py."""
    parser = OneLineParser("audit_data", description)
    parser.add_argument("data", metavar="DATA", help="As --data of a training.")
    parser.add_argument(
        "--run",
        default="",
        help="A run's name or folder: the data is divided as in its training; or timm:NAME with published weights.",
    )
    parser.add_argument("--data-root", default="", help="Folder of torchvision data sets; default: the run's own.")
    add_max_megapixels(parser)
    parser.add_argument("--fixes", default="", help="A fixes.csv, changed or not: write the table of it, and no more.")
    parser.add_argument("--output", default="", help="Folder of the files; default: logs/audits/DATA.")
    return parser


def _add_view_flags(parser: OneLineParser, verb: str) -> None:
    """Add the flags of test-time augmentation, for `zerovision.delivery.views`."""
    parser.add_argument("--flip", action="store_true", help=f"{verb} each image and its mirror image.")
    parser.add_number(
        "--shift-pixels",
        0,
        LARGEST_IMAGE_SIZE,
        default=0,
        help=f"{verb} each image and it shifted along its diagonal, both ways; 0: none.",
    )


def _add_image_flags(parser: OneLineParser, verb: str) -> None:
    """Add the flags that name the images to look at, for `zerovision.delivery.evaluation_data.EvaluationChoice`.

    Args:
        parser: of a script that takes a finished model.
        verb: what is done with the images, such as "evaluate".
    """
    usages = ", ".join(entry.usage for entry in DATASETS.values())
    parser.add_argument("--data", default="", help=f"Images to {verb} it on: {usages}; default: the run's own.")
    parser.add_argument("--data-root", default="", help="Folder of torchvision data sets; default: the run's own.")
    parser.add_argument("--path-column", default="", help="Column of a table with the paths; default: the run's.")
    parser.add_argument("--label-column", default="", help="Column of a table with the classes; default: the run's.")
    parser.add_argument(
        "--bad-images", default="", metavar="MODE", help=f"{BAD_IMAGES_USAGE}, as in training; default: the run's."
    )
    add_max_megapixels(parser)
    parser.add_argument(
        "--allow-missing-classes",
        action="store_true",
        help=f"{verb.capitalize()} on data that lacks some of the model's classes.",
    )
