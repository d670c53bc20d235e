"""The settings that all code may read, and the base class of training modes.

A mode is either a task that a run learns (`tasks.settings.TASKS`) or a way in which ranks share the work
(`engines.settings.WAYS`). Outside a mode's folder, only these tables name the mode. The module that defines a mode
does not import torch, because launchers also check the flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from zerovision.models import MODELS, MOST_MEMBERS, USUAL_RATE
from zerovision.training.base.plugins import USAGE as PLUGIN_USAGE
from zerovision.training.base.run_folder import PRESET_FOLDER

PRESETS = tuple(sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml")))
MOST_NODES, MOST_GPUS_PER_NODE, MOST_RANKS = 1024, 1024, 65_536  # the most that any command accepts
LARGEST_BATCH = 65_536  # images in one forward pass
TUNE_USAGE = "full, head, layers:N or lora:R"
RATES = ", ".join(f"{name} {spec.learning_rate:g}" for name, spec in MODELS.items() if spec.learning_rate != USUAL_RATE)
FEWEST_IMAGES = 8  # in a micro-batch chosen for the user: BatchNorm's statistics over fewer images are poor


Bound = float | None


def option(
    default: Any, help: str, *, low: Bound = None, high: Bound = 10**9, above: Bound = None, part_of: str = ""
) -> Any:
    """Declare a field with its help text and its range.

    Args:
        default: the value if neither a file nor the command line sets one.
        help: help text, a sentence that names the unit.
        low: smallest allowed value, inclusive.
        high: largest allowed value, inclusive.
        above: lower bound, exclusive.
        part_of: an earlier field whose flag also sets this field, after a colon: part_of="cache" allows
            `--cache ram:8`, and part_of="loss:bce" allows only `--loss bce:...`. Only the last part of a word may
            contain a colon.
    """
    metadata = {"help": help, "low": low, "high": high, "above": above, "part_of": part_of.partition(":")[::2]}
    return dataclasses.field(default=default, metadata=metadata)


def path_option(default: str, help: str) -> Any:
    """Declare a field whose value may be a path on this machine."""
    return dataclasses.field(default=default, metadata=option(default, help).metadata | {"is_path": True})


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings for what is trained, and those that all parts of the code need."""

    preset: str = option("", f"Preset to start from, overridden by config files and flags: {', '.join(PRESETS)}.")

    plugin: str = option("", PLUGIN_USAGE)
    model_type: str = option("mobilenet", f"Model: one of {', '.join(MODELS)}, or timm:<name> for any timm model.")
    epochs: int = option(30, "Number of passes over the training data.", low=1, high=100_000)
    minutes: float = option(
        0.0,
        "Time limit for a new run: lowers --epochs (minimum 1) to fit the measured speed of a few steps; 0: no limit.",
        low=0,
        high=100_000,
    )
    batch_size: int | Literal["auto"] = option(
        16,
        "Images per micro-batch on a GPU or CPU rank; auto: the largest that fits, with the same --global-batch.",
        low=1,
        high=LARGEST_BATCH,
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches per optimizer step; BatchNorm uses each micro-batch's own statistics.", low=1, high=4096
    )
    global_batch: int = option(
        0,
        "Images per update over all ranks; sets --gradient-accumulation-steps. 0: batch size x ranks x "
        "accumulation steps, or about 256 with --batch-size auto.",
        low=0,
        high=10**7,
    )
    learning_rate: float | Literal["auto"] = option(
        USUAL_RATE,
        "Peak learning rate; auto: the best rate in several short training "
        f"runs. With --optimizer adamw and random weights, some networks have a different default: {RATES}.",
        above=0,
        high=100,
    )

    # Model.
    pretrained: bool = option(False, "Start from the model's published weights (needs internet or the hub's cache).")
    weights: str = path_option("", "Local weights to start from: safetensors, or a pickle that contains only tensors.")
    tune: str = option(
        "full",
        f"Which part of a pretrained model to train: {TUNE_USAGE} (the last N layers, or adapters of rank R). The "
        "head is always trained; weights that you do not select stay unchanged.",
    )
    features: Literal["computed", "cached"] = option(
        "computed",
        "With --tune head: compute features in every epoch, or once, before the first epoch (cached). "
        "Caching gives the same weights sooner, but requires --augmentation none.",
    )
    solver: Literal["steps", "lbfgs"] = option(
        "steps", "lbfgs: find the minimum of cross-entropy plus L2 decay, without epochs.", part_of="features:cached"
    )
    ensemble_members: str = option(
        "mobilenet,efficientnet,vgg", f"Up to {MOST_MEMBERS} models, comma-separated.", part_of="model_type:ensemble"
    )
    head_epochs: int = option(
        2, "mobilenet_finetuned: epochs to train only the new head before training all layers.", low=0, high=100_000
    )
    backbone_learning_rate_scale: float = option(
        0.1, "Learning rate of the backbone as a fraction of the head's.", above=0, high=1, part_of="head_epochs"
    )
    stem: Literal["auto", "keep"] = option(
        "auto", "First layer's stride; auto: 1 instead of 2 for images below 64 pixels; keep: the network's stride."
    )
    dropout: float | Literal["auto"] = option(
        "auto",
        "Dropout before the classifier, and between the layers of cnn_lstm's LSTM; auto: 0.2 in basic_cnn and "
        "cnn_lstm, timm's default in timm models.",
        low=0,
        high=0.99,
    )
    drop_path: float | Literal["auto"] = option(
        "auto",
        "Probability of skipping the last residual block of a timm model; lower in earlier blocks; auto: timm's "
        "default, which is above 0 in some transformers.",
        low=0,
        high=0.99,
    )
    activation_checkpointing: bool = option(False, "Recompute activations during backward: less memory, more time.")
    sync_batchnorm: bool = option(False, "Compute BatchNorm statistics over all GPUs instead of per rank.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "Number format to compute in; auto: bf16 on GPUs that support it, fp16 on older GPUs, fp32 on CPUs."
    )
    seed: int = option(0, "Seed for initial weights, sample order, augmentation and dropout.", low=0, high=2**31 - 1)

    @property
    def embedding(self) -> int:
        """Number of outputs per image of a network that computes embeddings; 0 for a classifier."""
        return 0

    @property
    def micro_batch(self) -> int:
        """`batch_size` as a number.

        `auto` is treated as the smallest size until it is resolved, before the run is built.
        """
        return FEWEST_IMAGES if isinstance(self.batch_size, str) else self.batch_size


Values = Mapping[str, Sequence[object]]


class Mode:
    """A training mode that settings can turn on; methods that it does not override act as in a run without the mode.

    Attributes:
        flag: the setting that turns the mode on.
        goes_with: for each other setting that the mode restricts, the allowed values, the usual one first.
        own: settings that have no effect without the mode.
        resumable: settings of the mode that a resumed run may change.
        config: the settings of a run.
    """

    flag: ClassVar[str]
    goes_with: ClassVar[Values] = {}
    own: ClassVar[tuple[str, ...]] = ()
    resumable: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    def is_asked(self) -> bool:
        """Return whether the settings turn the mode on."""
        return getattr(self.config, self.flag) > 1

    def uses_own(self) -> bool:
        """Return whether the settings in `own` have an effect."""
        return self.is_asked()

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        """Yield the mistakes in the mode's settings, or raise the UserError of their parser."""
        yield from ()
