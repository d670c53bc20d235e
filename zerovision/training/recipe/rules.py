"""The table of update rules: timm's optimizers by name, and how much of a parameter each must see.

This module imports neither torch nor timm: the command line is checked with it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from zerovision.training.base.errors import UserError, shown, unknown_name

# An element's update depends on that element's history alone, so that flat parts of parameters can be updated as well
# as whole ones: these work under every engine and strategy.
ELEMENT_WISE = (
    *("adamw", "sgd", "momentum", "nesterov", "lion", "adan", "adanw", "nadamw", "radam", "radamw", "adabelief"),
    *("adam", "adamax", "madgrad", "madgradw", "radabelief", "rmsprop", "rmsproptf", "rmsproptfw"),
    *("adadelta", "adagrad", "adamwlegacy", "radamlegacy", "sgdw", "nesterovw"),
    *("adamc", "lionc", "nadamc", "rmsproptfc", "sgdc"),
)
# DeepSpeed puts an optimizer of its own in the place of these.
NOT_DEEPSPEED = ("adagrad",)
# The decay is the square of the learning rate by the one that the optimizer was built with.
SQUARED_DECAY = (
    *("adamc", "cadamc", "clionc", "cnadamc", "csgdc", "lambcd", "lionc", "nadamc", "rmsproptfc"),
    "sgdc",
)
# A small number is added to the learning rate: weights move at a rate of 0 too.
SHIFTED_RATE = ("madgrad", "madgradw")
# Matrices and convolutions are updated by this rule, all else by `--fallback-optimizer`.
MATRIX_RULES = ("muon", "nmuon", "adamuon", "nadamuon")
# A parameter's norm, a mean over it or its matrix is part of the update: each rank must have whole parameters.
WHOLE_PARAMETER = (
    *MATRIX_RULES,
    *("lars", "larc", "nlars", "nlarc", "lamb", "lambc", "lambw", "lambcw", "lambcd", "adamp", "sgdp", "mars"),
    # 'Cautious' rules divide by the share of a parameter's elements whose update agrees with the gradient.
    *("cadamw", "cadamc", "cadamp", "cadan", "cadanw", "clamb", "clambw", "clion"),
    *("clionc", "cmars", "cnadamc", "cnadamw", "crmsproptf", "csgdc", "csgdp", "csgdw"),
)
ALLOWED = (*ELEMENT_WISE, *WHOLE_PARAMETER)

_FACTORED = "its factored state has not the parameters' shape, and no checkpoint holds it: use adamw or adamp"
_HISTORY = "it remembers earlier learning rates, which no checkpoint holds: use nadamw or adamw"
_FIRST_STEP = "it knows its first step by a state that is empty, as none is after a checkpoint: use adamw"
_PACKAGE = "it needs a package that is not installed here: use the rule without the prefix"
REFUSED = {
    **dict.fromkeys(("adafactor", "adafactorbv", "adafactorbvc"), _FACTORED),
    **dict.fromkeys(("cadafactor", "cadafactorbv", "cadafactorbvc"), _FACTORED),
    **dict.fromkeys(("kron", "kronc", "kronw"), "its state is factored and random: use muon"),
    **dict.fromkeys(("novograd", "novogradc", "novogradw"), "its state is one number per layer: use lamb"),
    **dict.fromkeys(("nadam", "nadamlegacy", "laprop", "lapropc", "claprop"), _HISTORY),
    **dict.fromkeys(("adopt", "adoptc", "adoptw", "cadopt", "cadoptc", "cadoptw"), _FIRST_STEP),
    "adahessian": "it needs second derivatives: use adamw",
    **dict.fromkeys(("fusedadam", "fusedadamw", "fusedlamb", "fusednovograd", "fusedsgd"), _PACKAGE),
    **dict.fromkeys(("bnbadam", "bnbadam8bit", "bnbadamw", "bnbadamw8bit", "bnbademamix"), _PACKAGE),
    **dict.fromkeys(("bnbademamix8bit", "bnblion", "bnblion8bit", "bnbsgd", "bnbsgd8bit"), _PACKAGE),
}


def _number(low: float, high: float) -> Callable[[str], float]:
    """Return a reader of numbers from `low` to below `high`, whole ones if `low` is one."""

    def read(word: str) -> float:
        value = type(low)(word)
        if not low <= value < high:  # nan is in no range
            raise ValueError
        return value

    return read


# What `--optimizer-options` may give, in words, and how it is read. Others would make a rule another kind of rule.
OPTION_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("alpha", "momentum"), ("a number from 0 to below 1", _number(0.0, 1))),
    **dict.fromkeys(("eps", "trust_coeff"), ("a number above 0", _number(sys.float_info.min, math.inf))),
    **dict.fromkeys(("amsgrad", "centered", "nesterov"), ("true or false", {"true": True, "false": False}.__getitem__)),
    "betas": (
        "numbers from 0 to below 1, such as 0.9/0.95",
        lambda text: tuple(map(_number(0.0, 1), text.split("/"))),
    ),
    "ns_steps": ("a whole number from 1 to 20", _number(1, 21)),
}


def read_options(flag: str, text: str) -> dict[str, Any]:
    """Return the options of a rule, given as NAME=VALUE,NAME=VALUE.

    Raises:
        UserError: for what cannot be read.
    """
    options = {}
    for word in text.split(",") if text else ():
        name, _, value = word.partition("=")
        if name not in OPTION_READERS:
            raise UserError(
                f"{flag} {shown(word)}: expected NAME=VALUE with a NAME of {', '.join(sorted(OPTION_READERS))}, "
                "such as betas=0.9/0.95,eps=1e-6."
            )
        expected, read = OPTION_READERS[name]
        try:
            options[name] = read(value)
        except (KeyError, ValueError):
            raise UserError(f"{flag} {shown(word)}: expected {expected}.") from None
    return options


def check_optimizer(flag: str, name: str, strategy: str, engine: str, *, shards_parameters: bool) -> None:
    """Refuse a rule that does not exist, or that is not sound as the training state is distributed.

    Args:
        flag: that gave the name.
        name: of the rule.
        strategy: its name.
        engine: 'auto' or an engine.
        shards_parameters: whether the strategy does, or their gradients.

    Raises:
        UserError: with what to type instead.
    """
    if name in REFUSED:
        raise UserError(f"{flag} {name}: {REFUSED[name]}.")
    if name not in ALLOWED:
        raise unknown_name("optimizer", name, ALLOWED)
    if name in WHOLE_PARAMETER and shards_parameters:
        raise UserError(
            f"{flag} {name} computes with whole parameters, which --strategy {strategy} shards: use --strategy ddp, "
            "or a rule such as adamw or lion."
        )
    if name in NOT_DEEPSPEED and engine == "deepspeed":
        raise UserError(f"{flag} {name}: --engine deepspeed has no such rule: use --engine torch, or auto.")
    if name in WHOLE_PARAMETER and engine == "deepspeed":
        raise UserError(
            f"{flag} {name} computes with whole parameters, which --engine {engine} cuts into flat parts: "
            "use --engine torch, or auto."
        )
