"""More than a thousand random command lines for the launchers, none of which may run what it is given.

Side by side: `pytest -m cluster tests/cluster/test_launcher_fuzz.py -n 2`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings

from tests.unit.launcher_fuzz import cases, check_dry_run, check_with_fake_programs, fuzz_settings
from tests.unit.launching import WORDS

# 300 launches take minutes, beside another suite many.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("script", WORDS)
def test_launchers_run_nothing_of_what_they_are_given(script: str, number: int) -> None:
    @settings(fuzz_settings, derandomize=False, max_examples=300)
    @seed(number)
    @given(cases(script))
    def check(case):
        check_dry_run(script, case)

    check()


@pytest.mark.parametrize("script", ["launch_multi_node.sh", "slurm_distributed.sh"])
def test_no_word_of_the_users_reaches_a_remote_shell(script: str) -> None:
    @settings(fuzz_settings, max_examples=100)
    @given(cases(script))
    def check(case):
        check_with_fake_programs(script, case)

    check()
