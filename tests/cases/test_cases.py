"""Cases from public reports, each a script that makes its own input and says what is right: `make test-cases`.

By hand: `bash tests/cases/NN-name.sh . EMPTY_FOLDER`. The second line of a file names the reports that it is from.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted(Path(__file__).parent.glob("[0-9]*.sh"))
SECONDS = 1200

pytestmark = [pytest.mark.cases, pytest.mark.timeout(SECONDS + 60)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_case(case, tmp_path):
    ended = subprocess.run(
        ["bash", str(case), str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    assert ended.stdout.strip().splitlines()[-1].startswith("ok: ")
