"""The settings of the optimizer and the schedule."""

from __future__ import annotations

import dataclasses
from typing import Literal

from zerovision.models import USUAL_RATE, model_spec
from zerovision.training.base.settings import RunSettings, option
from zerovision.training.recipe.rules import ELEMENT_WISE, MATRIX_RULES, OPTION_READERS, WHOLE_PARAMETER
from zerovision.training.recipe.schedule import SCHEDULES


@dataclasses.dataclass(frozen=True)
class RecipeSettings(RunSettings):
    """Settings for the optimizer and the schedule."""

    optimizer: str = option(
        "adamw",
        "Optimizer, by its name in timm; sgd uses Nesterov momentum. With every strategy: "
        f"{', '.join(ELEMENT_WISE)}. With ddp only: {', '.join(WHOLE_PARAMETER)}.",
    )
    momentum: float = option(0.9, "Momentum, for optimizers such as sgd.", low=0, high=0.9999, part_of="optimizer")
    fallback_optimizer: str = option(
        "adamw",
        f"With {', '.join(MATRIX_RULES)}: optimizer for the head and everything except matrices and convolutions. "
        "NAME:SCALE:OPTIONS, such as adamw:0.3:betas=0.85/0.95, scales --learning-rate for it and sets its arguments.",
    )
    optimizer_options: str = option(
        "", f"Arguments: {', '.join(sorted(OPTION_READERS))}; such as betas=0.9/0.95,eps=1e-6.", part_of="optimizer"
    )
    weight_decay: float = option(0.05, "Weight decay (decoupled in adamw); see also --no-weight-decay.", low=0, high=10)
    no_weight_decay: Literal["vectors", "model"] = option(
        "vectors", "No weight decay for vectors (biases, norms), or also for parameters that a timm model excludes."
    )
    layer_decay: float = option(
        1.0, "Learning rate of each layer, as a fraction of the next layer's learning rate.", above=0, high=1
    )
    gradient_clipping: float = option(1.0, "Largest global gradient norm (L2); 0: no clipping.", low=0)
    ema: float = option(
        0.0,
        "Evaluate and export an exponential moving average of the weights with this decay (lower early in"
        " training); 0: the weights themselves.",
        low=0,
        high=0.999999,
    )
    lookahead: int = option(
        0, "Steps after which the weights move halfway back to slow weights (timm's default is 6); 0: off.", low=0
    )
    warmup_epochs: float | Literal["auto"] = option(
        "auto",
        "Epochs of linear warm-up from 0 to the peak learning rate; auto: 1 or a tenth of the run, whichever "
        "is less, but at least 50 steps if the network has its own, higher default rate.",
        low=0,
    )
    schedule: str = option(
        "cosine",
        f"How the learning rate falls after the warm-up: {'; '.join(form.usage for form in SCHEDULES.values())}. wsd: "
        "warm-up, stable, decay. EPOCHS may be auto or omitted: a third of the run for step, a fifth for wsd.",
    )
    final_learning_rate_scale: float = option(
        0.01,
        "Learning rate at the end of the schedule, as a fraction of the peak; not used by step and constant.",
        low=0,
        high=1,
    )
    cooldown_epochs: float = option(
        0.0, "Number of epochs at this rate at the end of the run.", low=0, part_of="final_learning_rate_scale"
    )
    base_batch_size: int = option(
        0, "Multiply the rate by global batch / this number; 0: no scaling.", low=0, part_of="learning_rate"
    )
    early_stopping_patience: int = option(
        0, "Stop after this many epochs without a better score (--best-by); 0: never.", low=0
    )

    @property
    def default_rate(self) -> float:
        """The default of `--learning-rate`: the network's own rate for AdamW from random weights, or the usual rate."""
        spec = model_spec(self.model_type)
        is_trained = self.pretrained or bool(self.weights) or spec.always_pretrained
        return USUAL_RATE if is_trained or self.optimizer != "adamw" else spec.learning_rate
