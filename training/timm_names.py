"""The flags of timm's train.py that have another name here."""

from __future__ import annotations

from collections.abc import Collection

HERE = {
    "--data-dir": "--data",
    "--dataset": "--data torchvision:NAME",
    "--dataset-download": "--download",
    "--model": "--model-type timm:NAME",
    "--pretrained-path": "--weights",
    "--initial-checkpoint": "--weights",
    "--img-size": "--image-size",
    "--input-size": "--image-size",
    "--crop-pct": "--eval-crop",
    "--train-interpolation": "--interpolation",
    "--in-chans": "--image-channels",
    "-b": "--batch-size",
    "--grad-accum-steps": "--gradient-accumulation-steps",
    "--grad-checkpointing": "--activation-checkpointing",
    "--torchcompile": "--compile on",
    "--amp": "--precision bf16",
    "--amp-dtype": "--precision",
    "--model-dtype": "--precision",
    "--opt": "--optimizer",
    "--opt-kwargs": "--optimizer-options",
    "--opt-eps": "--optimizer-options eps=VALUE",
    "--opt-betas": "--optimizer-options",
    "--clip-grad": "--gradient-clipping",
    "--sched": "--schedule",
    "--lr": "--learning-rate",
    "--lr-base": "--learning-rate with --base-batch-size 256",
    "--lr-base-size": "--base-batch-size",
    "--min-lr": "--final-learning-rate-scale (a share of the rate)",
    "--decay-milestones": "--milestones",
    "--dr": "--decay-rate",
    "--no-aug": "--augmentation none",
    "--scale": "--crop-scale",
    "--ratio": "--crop-ratio",
    "--hflip": "--mirror",
    "--aa": "--augmentation randaugment --randaugment",
    "--aug-repeats": "--repeated-augmentation",
    "--bce-loss": "--loss bce",
    "--bce-target-thresh": "--bce-target-threshold",
    "--reprob": "--random-erasing",
    "--remode": "--random-erasing-mode",
    "--mixup-prob": "--mixup-probability",
    "--mixup-switch-prob": "--mixup-switch-probability",
    "--mixup-off-epoch": "--mixup-off-epochs (the last ones)",
    "--smoothing": "--label-smoothing",
    "--drop": "--dropout",
    "--sync-bn": "--sync-batchnorm",
    "--model-ema": "--ema 0.9999",
    "--model-ema-decay": "--ema",
    "-j": "--workers",
    "--log-interval": "--log-every-steps",
    "--recovery-interval": "--save-every-steps",
    "--checkpoint-hist": "--keep-last",
    "--experiment": "--run-name",
}


def timm_hint(word: str, flags: Collection[str]) -> str:
    """Return a sentence for a flag of timm, with the one of `flags` that does the same; '' if there is none."""
    here = HERE.get(word, "")
    return f" timm's {word} is {here} here." if here.partition(" ")[0] in flags else ""
