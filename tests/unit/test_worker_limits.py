"""Data workers: in little shared memory and few open files they fit or one line says what to do; no script in them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import namedtuple

import pytest

from tests.kit import ROOT
from zerovision.training.base.errors import UserError, known_failure
from zerovision.training.base.helper_processes import current_folder_kept_out
from zerovision.training.data import reader

fit = reader.fit_workers_into_memory
Usage = namedtuple("Usage", "free")


@pytest.mark.parametrize(
    ("free", "may_write", "ranks", "expected"),
    [(36864 * 4, True, 1, 4), (36864 * 4, True, 2, 2), (36863, True, 1, 0), (10**12, False, 1, 0)],
)
def test_workers_are_as_many_as_shared_memory_has_room_for(monkeypatch, free, may_write, ranks, expected):
    """4 images of 32 pixels are 12,288 bytes, three batches of them 36,864."""
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    monkeypatch.setattr(reader.shutil, "disk_usage", lambda _: Usage(free))
    assert fit(8, True, 12288, ranks, is_main=True) == expected
    assert fit(expected, False, 12288, ranks, is_main=True) == expected
    with pytest.raises(UserError, match=rf"^--workers 8: /dev/shm has room .* Use --workers {expected}, or"):
        fit(8, False, 12288, ranks, is_main=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", [["script.py"], ["-m", "script"]])
def test_a_script_without_a_main_guard_runs_in_no_worker(tmp_path, start):
    """And its soft limit of open files is raised to the hard one."""
    (tmp_path / "script.py").write_text(
        "import resource\n"
        "from zerovision.training.data import reader\n"
        "print('script', flush=True)\n"
        "reader._PRELOADED_MODULES.clear()\n"
        "worker = reader.worker_context().Process(target=print, args=('worker',))\n"
        "worker.start(); worker.join(); print(worker.exitcode, *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))  # noqa: E731
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *start]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["script", "worker", "0", "128", "128"], done.stderr


def test_a_worker_that_is_left_does_not_keep_the_program_from_ending():
    """Which has an error whose frames hold the loader, as a notebook has: Python itself ends what is left."""
    code = (
        "import time\n"
        "from zerovision.training.data import reader\n"
        "reader._PRELOADED_MODULES.clear()\n"
        "left = reader.worker_context().Process(target=time.sleep, args=(600,), daemon=True)\n"
        "left.start(); time.sleep(1.0); print('the end', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_too_many_open_files_is_one_line():
    assert known_failure(OSError(24, "Too many open files"), 1) == (
        "rank 1 cannot open enough files: raise 'ulimit -n', or use fewer --workers"
    )


def test_only_the_processes_of_workers_keep_the_current_folder_out(monkeypatch):
    """Those that the caller starts afterwards, and the caller itself, stay as they are."""
    for before in (None, "0"):
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", before)
        with current_folder_kept_out():
            assert (
                subprocess.run([sys.executable, "-c", "import sys; exit(sys.flags.safe_path)"], check=False).returncode
                == 1
            )
        reader.worker_context()
        assert os.environ.get("PYTHONSAFEPATH") == before
