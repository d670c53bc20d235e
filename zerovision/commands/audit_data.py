"""Look for mistakes in a data set: the same scene in two parts, or under two labels, copies that were changed.

python scripts/audit_data.py ~/photos                                  # writes logs/audits/photos
python scripts/audit_data.py ~/photos --output ~/photos-audit
python scripts/audit_data.py ~/photos --run photos                     # divided as that run divides it
python scripts/audit_data.py ~/photos --fixes logs/audits/photos/fixes.csv   # make those that are left in the file

Writes audit.html, audit.json, fixes.csv and, of files, fixed.csv: the data with the fixes, as a table of its images.
Exit code: 0 done, whatever was found, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import sys

from zerovision.delivery.flags import audit_data_parser
from zerovision.models import TIMM_PREFIX
from zerovision.training.config.command_line import run_script


def audit_data(given: argparse.Namespace) -> int:
    """Audit the data that the command line names."""
    from zerovision.delivery.trained_model import find_model

    if given.run and not given.run.startswith(TIMM_PREFIX):
        find_model(given.run)  # before the slow imports
    from zerovision.extras.audit.audit import audit

    audit(**vars(given))
    return 0


parse = audit_data_parser(__doc__).parse


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("audit_data", parse, audit_data)


if __name__ == "__main__":
    sys.exit(main())
