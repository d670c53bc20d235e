"""The model card: README.md in a run's folder, with the front matter that the Hugging Face hub reads.

Format: https://huggingface.co/docs/hub/model-cards; the front matter is written by huggingface_hub itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from delivery.report.run_files import count_global_batch
from delivery.reproduce_command import reproduce_command, show_value
from delivery.trained_model import read_run_config
from training.checkpoint.atomic_write import replacing
from training.checkpoint.weights import read_metadata
from training.config import TrainConfig
from training.observe.evaluation import read_scores
from training.observe.run_folder import CARD, ENVIRONMENT, EVALUATION, METRICS, WEIGHTS

MARK = (
    "<!-- Written by zerovision at the end of the run; delete this line, and no later run overwrites your changes. -->"
)
TO_FILL = "to-be-filled-in"
CLASSES_SHOWN = 50
RECIPE = (
    *("epochs", "batch_size", "gradient_accumulation_steps", "optimizer", "learning_rate", "base_batch_size"),
    *("warmup_epochs", "final_learning_rate_scale", "weight_decay", "gradient_clipping", "label_smoothing"),
    *("augmentation", "pretrained", "weights", "seed"),
)


def write_model_card(run: Path) -> Path | None:
    """Write README.md into the folder of a finished run, unless the one there is the user's own.

    Args:
        run: the folder, with config.json, environment.json, metrics.jsonl, model.safetensors and its evaluation.

    Returns:
        The card's path, None where it was left alone.
    """
    card = run / CARD
    if card.exists() and MARK not in card.read_text(encoding="utf-8"):
        return None
    config, metadata = read_run_config(run), read_metadata(run / WEIGHTS)
    environment = json.loads((run / ENVIRONMENT).read_text(encoding="utf-8"))
    scores = read_scores(run / EVALUATION) or {}
    lines = [
        *("---", _front_matter(run.name, config, metadata, scores), "---", MARK, ""),
        *_introduction(run.name, config, metadata),
        *_divergence(_last_line(run, "epoch")),
        *_usage(metadata),
        *_data(config, metadata, environment, scores),
        *_metrics(scores, metadata),
        *_recipe(config, environment),
        *_hardware(environment, _last_line(run, "end")),
        "## Limits and licence",
        "",
        "To be filled in: what the model is meant for and what it must not be used for; the licence of the data, and "
        "of these weights (`license`, `license_name` and `license_link` in the head of this file).",
        "",
    ]
    with replacing(card) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    return card


def _front_matter(name: str, config: TrainConfig, metadata: Mapping[str, Any], scores: Mapping[str, Any]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    def result(metric_type: str, metric_name: str, value: float) -> EvalResult:
        return EvalResult(
            task_type="image-classification",
            dataset_type=Path(config.data).name,
            dataset_name=Path(config.data).name,
            dataset_split=scores["split"],
            metric_type=metric_type,
            metric_name=metric_name,
            metric_value=value,
        )

    results = []
    if scores:
        results = [result("accuracy", "top-1", scores["top1"]), result("accuracy", "top-5", scores["top5"])]
        results.append(result("f1", "macro F1", scores["macro"]["f1"]))
    data = ModelCardData(
        license="other",
        license_name=TO_FILL,
        license_link=TO_FILL,
        library_name="timm" if metadata["description"]["timm_name"] else "pytorch",
        pipeline_tag="image-classification",
        tags=["image-classification", "zerovision", metadata["description"]["model_type"]],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()


def _introduction(name: str, config: TrainConfig, metadata: Mapping[str, Any]) -> list[str]:
    description = metadata["description"]
    network = (
        f"timm's `{description['timm_name']}`" if description["timm_name"] else f"zerovision's `{config.model_type}`"
    )
    members = f" of {', '.join(f'`{member}`' for member in description['members'])}" if description["members"] else ""
    return [
        f"# {_plain(name)}",
        "",
        f"An image classifier: {network}{members}, for {len(metadata['class_names'])} classes and images of "
        f"{description['image_size']} pixels, trained with zerovision on {_code(config.data)}.",
        "",
    ]


def _divergence(last_epoch: Mapping[str, Any]) -> list[str]:
    if not last_epoch.get("diverged"):
        return []
    return [
        f"**The training diverged**: after its last epoch ({last_epoch['epoch']}) "
        f"{_plain(str(last_epoch['diverged']))}. These weights are of an epoch before.",
        "",
    ]


def _usage(metadata: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Use",
        "",
        "In zerovision's repository:",
        "",
        "```bash",
        "python scripts/predict.py PATH/OF/THIS/FOLDER photo.jpg",
        "```",
        "",
    ]
    description = metadata["description"]
    if description["timm_name"]:
        strides = description["stem_stride_changed"].items()
        lines += [
            "With timm alone:",
            "",
            "```python",
            "import timm",
            "",
            "model = timm.create_model(",
            f"    {description['timm_name']!r}, num_classes={description['num_classes']}, checkpoint_path={WEIGHTS!r}",
            ").eval()",
            *(f"model.get_submodule({name!r}).stride = ({new}, {new})" for name, (_, new) in strides),
            "```",
            "",
        ]
    preprocessing = json.dumps(metadata["preprocessing"])
    return [*lines, f"Preprocessing (pixels in 0..1, RGB): `{preprocessing}`.", ""]


def _data(
    config: TrainConfig, metadata: Mapping[str, Any], environment: Mapping[str, Any], scores: Mapping[str, Any]
) -> list[str]:
    names = metadata["class_names"]
    shown = ", ".join(_code(name) for name in names[:CLASSES_SHOWN])
    more = f" and {len(names) - CLASSES_SHOWN} more" if len(names) > CLASSES_SHOWN else ""
    held_out = f", {scores['samples']} images held out" if scores else ""
    images = environment.get("training_images")
    trained_on = f", {images} images to train on" if images else ""
    return [
        "## Data",
        "",
        f"{_code(config.data)}{trained_on}{held_out}; fingerprint `{environment['data_fingerprint']}`. "
        f"Classes: {shown}{more}.",
        "",
    ]


def _metrics(scores: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[str]:
    if not scores:
        return []
    values = [("top-1", scores["top1"]), ("top-5", scores["top5"]), ("macro F1", scores["macro"]["f1"])]
    values += [("loss (nats)", scores["loss"]), ("expected calibration error", scores["ece"])]
    return [
        "## Metrics",
        "",
        f"On the {scores['samples']} held-out images, each counted once; epoch {metadata['extra'].get('epoch')}, which "
        "was chosen for its top-1 on these same images, so fresh images will do a little worse.",
        "",
        *_table(("metric", "value"), ((name, f"{value:.4f}") for name, value in values)),
        "",
    ]


def _recipe(config: TrainConfig, environment: Mapping[str, Any]) -> list[str]:
    settings, ranks = dataclasses.asdict(config), environment["ranks"]
    given = [name for name in RECIPE if settings[name] != ""]
    commit = environment.get("git_commit")
    state = " with changes that were not committed" if environment.get("git_has_changes") else ""
    origin = f", at commit `{commit}`{state}" if commit else ""
    return [
        "## Recipe",
        "",
        f"Global batch {count_global_batch(settings, environment)}; {environment['precision']}; "
        f"strategy `{config.strategy}`.",
        "",
        *_table(("setting", "value"), ((name, _plain(show_value(settings[name]))) for name in given)),
        "",
        f"To repeat it{origin}:",
        "",
        "```bash",
        reproduce_command(config, ranks, environment.get("ranks_per_machine", ranks)),
        "```",
        "",
    ]


def _hardware(environment: Mapping[str, Any], end: Mapping[str, Any]) -> list[str]:
    speed = f"; {end['images_per_second']:.0f} images/s" if end else ""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    cuda = f", CUDA {environment['cuda']}" if environment.get("cuda") else ""
    return [
        "## Hardware and versions",
        "",
        f"{environment['device']}{speed}. Python {environment['python']}{cuda}, {packages}.",
        "",
    ]


def _last_line(run: Path, kind: str) -> dict[str, Any]:
    """Return the last line of a kind in metrics.jsonl, {} if there is none."""
    path = run / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [line for line in lines if line.startswith(f'{{"kind": "{kind}"')]
    return json.loads(found[-1]) if found else {}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    for sign in "\\`|<>*_[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _code(text: str) -> str:
    """Return text as code on one line; Markdown has no way to write a backtick there."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
