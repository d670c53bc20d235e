"""Runs a command without a checkout: `python -m zerovision.commands NAME ...`."""

from __future__ import annotations

import sys

from zerovision.commands import COMMANDS, main
from zerovision.training.base.errors import USER_ERROR_EXIT_CODE
from zerovision.training.base.run_folder import as_typed

if (name := "".join(sys.argv[1:2])) not in COMMANDS:
    print(f"expected a command: {', '.join(COMMANDS)}", file=sys.stderr)
    sys.exit(USER_ERROR_EXIT_CODE)
sys.argv[:2] = [as_typed(f"scripts/{name}.py")]
sys.exit(main(name))
