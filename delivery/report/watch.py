"""Keeps the page up to date while a run trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from delivery.report.page import write_report
from training.observe.run_folder import EVALUATION, METRICS, SCORES, WORST

POLL_SECONDS = 2.0
LARGEST_SHARE_OF_TIME = 0.1  # that writing may take: the training needs the processor too
# A run writes its evaluation after its last line, so a page is written once more after a while of silence.
POLLS_AFTER_THE_END = 3
POLLS_BETWEEN_LOOKS = 30  # in silence: whether the run has broken off


def watch(
    folders: Sequence[Path],
    output: Path,
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page now and whenever the runs' files grow, until all runs have ended or Ctrl-C is pressed.

    Args:
        folders: of the runs.
        output: the HTML file.
        say: takes a line for people.
        sleep: waits so many seconds between two looks at the files.

    Raises:
        UserError: as `write_report`.
    """
    seen, silent_polls, start = _signature(folders), 0, time.perf_counter()
    is_going_on = write_report(folders, output, is_watched=True)
    if not is_going_on:
        return
    writing_seconds = time.perf_counter() - start
    say(f"watching, Ctrl-C ends it: open {output}")
    try:
        while is_going_on or silent_polls < POLLS_AFTER_THE_END:
            sleep(max(POLL_SECONDS, writing_seconds / LARGEST_SHARE_OF_TIME))
            now = _signature(folders)
            silent_polls = silent_polls + 1 if now == seen else 0
            seen = now
            if silent_polls % POLLS_BETWEEN_LOOKS == 0:
                start = time.perf_counter()
                is_going_on = write_report(folders, output, is_watched=True)
                writing_seconds = time.perf_counter() - start
    except KeyboardInterrupt:
        pass
    # Without a watcher the page must no longer wait for news.
    write_report(folders, output)


def _signature(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Return what changes when a run writes: size and time of its files."""
    found = []
    for folder in folders:
        for path in (folder / METRICS, folder / EVALUATION / SCORES, folder / EVALUATION / f"{WORST}.csv"):
            try:
                status = path.stat()
                found.append((status.st_size, status.st_mtime_ns))
            except OSError:
                found.append((0, 0))
    return found
