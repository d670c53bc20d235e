"""One GPU in one call of nine minutes: is its path right, how fast is it, and what do whole trainings reach?

    python benchmarks/gpu/run.py
    python benchmarks/gpu/run.py --parts checks,steps --models mobilenet
    python benchmarks/gpu/run.py --device cpu --quick

Three parts, in order of worth, each a process group with a limit of its own, which is killed at its end: nothing goes
on using the card beside the next one. What a part leaves of its time goes to those after it. Every number is a line of
`lines.jsonl` as soon as it is measured; at the end `gpu_<hardware>_<date>.md` has them as tables. Both, a
log of each part and `gpu_tests.log` are written to $OUT, or to `benchmarks/results`. `benchmarks/gpu/README.md` says
what is compared, and how to carry it to a machine without a network.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.lines import LINES, emit
from benchmarks.gpu.options import ROOT, parser
from benchmarks.gpu.summary import write_report
from benchmarks.report import results_folder

PARTS = {"checks": 150.0, "steps": 290.0, "files": 100.0}  # seconds
GRACE_SECONDS = 4.0  # after its deadline, in which a part may end what it has begun
LONGEST_TAIL = 3000  # characters of a part's output that are printed; its log has all


def command_of(part: str, seconds: float, flags: list[str]) -> list[str]:
    """Return the command of a part."""
    return [sys.executable, "-u", "-m", f"benchmarks.gpu.{part}", "--seconds", f"{seconds:.0f}", *flags]


def run_part(part: str, seconds: float, flags: list[str]) -> None:
    """Run a part for at most so long, with all of its processes, and keep what it prints."""
    log = results_folder() / f"{part}.log"
    with log.open("w") as output:
        command = command_of(part, seconds, flags)
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(log.read_text(errors="replace")[-LONGEST_TAIL:])
    emit("part", part=part, exit_code=code, seconds=seconds)


def main() -> None:
    """Run the parts that are asked for, and write the report."""
    made = parser(__doc__)
    made.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of %(default)s")
    made.add_argument("--minutes", type=float, default=sum(PARTS.values()) / 60, help="for all (default %(default).1f)")
    given = made.parse_args()
    parts = given.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        made.error(f"--parts {unknown[0]}: expected some of {', '.join(PARTS)}")
    flags = ["--device", given.device, "--models", given.models, *(["--quick"] if given.quick else [])]
    (results_folder() / LINES).unlink(missing_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
    start, scale = time.monotonic(), 60 * given.minutes / sum(PARTS[part] for part in parts)
    end = start
    for part in parts:
        end += scale * PARTS[part]
        run_part(part, max(end - time.monotonic() - GRACE_SECONDS, 1.0), flags)
    write_report(results_folder(), shlex.join(["python", *sys.argv]))
    print(f"done after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
