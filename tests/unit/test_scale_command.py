"""`plan.py --scale` from its command line to its table."""

from __future__ import annotations

import json

import pytest

from planning.plan_command import parse, run
from training.errors import UserError

WORDS = ["--model-type", "mobilenet", "--gpu", "h100-80gb", "--image-size", "64", "--scale", "8..64"]


def test_the_table_and_the_json_have_the_same_numbers(capsys):
    assert run(parse(WORDS, None)) == 0
    table = capsys.readouterr().out
    assert run(parse([*WORDS, "--json"], None)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in printed["points"]] == [8, 16, 32, 64]
    efficiencies = [point["efficiency"] for point in printed["points"]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert all(f"{share:.1%}" in table for share in efficiencies)
    assert printed["verdict"] in table


def test_more_failures_lose_more(capsys):
    lost = []
    for rate in ("0.001", "0.1"):
        run(parse([*WORDS, "--failures-per-gpu-day", rate, "--json"], None))
        lost.append([point["lost_share"] for point in json.loads(capsys.readouterr().out)["points"]])
    assert all(many > few > 0 for few, many in zip(*lost, strict=True))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--scale", "8-64"], "give FIRST..LAST"),
        (["--scale", ""], "give FIRST..LAST"),
        (["--scale", "8..64", "--gpuu", "x"], "--gpuu"),
    ],
)
def test_a_mistake_is_one_line(words, answer):
    with pytest.raises(UserError, match=answer):
        parse([*WORDS[:-2], *words], None)
