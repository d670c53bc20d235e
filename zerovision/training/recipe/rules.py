"""The table of update rules: timm's optimizers by name, and whether each needs whole parameters.

This module imports neither torch nor timm, because it is used to check the command line.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from zerovision.training.base.errors import UserError, check_name, either, shown
from zerovision.training.base.units import number_in

# These rules work with every engine and strategy: an element's update depends only on that element's history, so flat
# parts of parameters can be updated like whole parameters.
ELEMENT_WISE = [*("adamw", "adam", "sgd", "momentum", "nesterov", "lion", "adan", "madgrad", "rmsprop", "rmsproptf")]
# These rules add a small number to the learning rate, so weights change even if the rate is 0.
SHIFTED_RATE = ("madgrad",)
# These rules update matrices and convolutions; `--fallback-optimizer` updates all other parameters.
MATRIX_RULES = ("muon",)
# These rules use the norm or the whole matrix of a parameter, so each rank must have whole parameters.
WHOLE_PARAMETER = [*MATRIX_RULES, "lars", "lamb"]
MOST_TIMES = 1000.0  # upper limit of a fallback's factor on the learning rate


_below_1 = functools.partial(number_in, low=0.0, high=math.nextafter(1, 0))
_above_0 = functools.partial(number_in, low=sys.float_info.min, high=sys.float_info.max)
# For each of the OPTIONS of `--optimizer`, a description of its values and the function that parses them. timm's other
# options are left out, because they would turn a rule into a different kind of rule.
OPTION_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("alpha", "momentum"), ("a number that is at least 0 and below 1", _below_1)),
    **dict.fromkeys(("eps", "trust_coeff"), ("a number above 0", _above_0)),
    **dict.fromkeys(("amsgrad", "centered", "nesterov"), ("true or false", {"true": True, "false": False}.__getitem__)),
    "betas": (
        "numbers that are at least 0 and below 1, such as 0.9/0.95",
        lambda text: tuple(map(_below_1, text.split("/"))),
    ),
    "ns_steps": ("a whole number from 1 to 20", functools.partial(number_in, low=1, high=20)),
}


def read_options(flag: str, text: str) -> dict[str, Any]:
    """Parse the options of a rule, written as NAME=VALUE,NAME=VALUE.

    Raises:
        UserError: for an unknown name or an invalid value.
    """
    options = {}
    for word in text.split(",") if text else ():
        name, _, value = word.partition("=")
        if name not in OPTION_READERS:
            raise UserError(
                f"{flag} {shown(word)}: expected NAME=VALUE with a NAME of {either(sorted(OPTION_READERS))}, "
                "such as betas=0.9/0.95,eps=1e-6."
            )
        expected, read = OPTION_READERS[name]
        try:
            options[name] = read(value)
        except (KeyError, ValueError):
            raise UserError(f"{flag} {shown(word)}: expected {expected}.") from None
    return options


class Fallback(NamedTuple):
    """The rule for parameters that a matrix rule does not update, with a learning rate factor and options as text."""

    name: str
    rate_scale: float
    options: str


def read_fallback(text: str) -> Fallback:
    """Parse the value of `--fallback-optimizer`.

    Raises:
        UserError: for an invalid value.
    """
    name, scale, options = (*text.split(":", 2), "", "")[:3]
    check_name("fallback optimizer", name, ELEMENT_WISE)
    try:
        rate_scale = number_in(scale or "1", sys.float_info.min, math.nextafter(MOST_TIMES, 0))
    except ValueError:
        raise UserError(
            f"--fallback-optimizer {shown(text)}: expected NAME:SCALE:OPTIONS with a SCALE above 0 and below "
            f"{MOST_TIMES:g}, such as adamw:0.3:betas=0.85/0.95."
        ) from None
    read_options("--fallback-optimizer", options)
    return Fallback(name, rate_scale, options)


def check_optimizer(flag: str, name: str, strategy: str, engine: str, *, shards_parameters: bool) -> None:
    """Check that an update rule exists and works with the strategy and the engine.

    Args:
        flag: flag that selected the rule.
        name: name of the rule.
        strategy: name of the strategy.
        engine: name of the engine, or 'auto'.
        shards_parameters: whether the strategy shards parameters or their gradients.

    Raises:
        UserError: if the rule does not exist or does not work with them; the message says what to type instead.
    """
    check_name("optimizer", name, [*ELEMENT_WISE, *WHOLE_PARAMETER])
    if name in WHOLE_PARAMETER and shards_parameters:
        raise UserError(
            f"{flag} {name} needs whole parameters, but --strategy {strategy} shards them: use --strategy ddp, "
            "or an optimizer such as adamw or lion."
        )
    if name in WHOLE_PARAMETER and engine not in ("auto", "torch"):
        raise UserError(
            f"{flag} {name} needs whole parameters, but --engine {engine} cuts them into flat parts: "
            "use --engine torch, or auto."
        )
