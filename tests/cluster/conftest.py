"""Hosts for the tests: made once for a session, repaired before each test, taken down at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import SHARED, SLURM_TOOLS, Hosts, missing

NODES = 4


@pytest.fixture(scope="session")
def _hosts() -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(NODES) as hosts:
        yield hosts


@pytest.fixture
def hosts(_hosts: Hosts) -> Hosts:
    """Four nodes and a login host, all well, without processes of an earlier test."""
    _hosts.recover()
    return _hosts


@pytest.fixture(scope="session")
def _slurm(_hosts: Hosts) -> Hosts:
    if reason := missing(SLURM_TOOLS):
        pytest.skip(reason)
    _hosts.recover()
    _hosts.start_slurm()
    return _hosts


@pytest.fixture
def slurm(_slurm: Hosts) -> Hosts:
    """The same hosts with Slurm on them, no job in its queue."""
    _slurm.run("login", ["scancel", "--full", "--user=root"])
    _slurm.recover()
    return _slurm


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Path:
    """An empty folder that every host sees at the same path."""
    folder = SHARED / request.node.name.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
