"""How the ranks meet: nobody without the run's secret takes part, and the store listens where it must alone."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.training.ranks import ROOT, free_port
from zerovision.training.base.errors import UserError
from zerovision.training.base.heartbeat import SECRET_VARIABLE
from zerovision.training.world.secure_store import ANSWER, _listen, authenticate, open_store

PATIENCE = datetime.timedelta(seconds=30)


def connect(port, **options):
    return dist.TCPStore("127.0.0.1", port, None, False, PATIENCE, wait_for_workers=False, **options)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def store(port):
    return open_store("127.0.0.1", port, PATIENCE, is_host=True, is_alone=True)


class Proving(threading.Thread):
    """A rank that proves itself in a thread."""

    def __init__(self, store, secret, rank, size=3, patience=PATIENCE):
        super().__init__(daemon=True)
        self.call = (store, secret, rank, size, patience)
        self.store = self.error = None
        self.start()

    def run(self):
        try:
            self.store = authenticate(*self.call, is_ours=True)
        except (ConnectionError, TimeoutError) as error:
            self.error = error

    def result(self):
        self.join(30)
        return self.error or self.store


def test_the_ranks_of_a_run_find_a_part_of_the_store_for_themselves(store, port, capfd):
    stores = [Proving(one, "secret", rank).result for rank, one in enumerate([store, connect(port), connect(port)])]
    first, second, third = (result() for result in stores)
    first.set("key", "value")
    assert (second.get("key"), third.get("key")) == (b"value", b"value")
    assert not store.check(["key"])
    assert capfd.readouterr().err == ""


def test_the_store_listens_on_the_given_address_alone(store, port):
    """Linux answers on all of 127.0.0.0/8."""
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    with pytest.raises(UserError, match=rf"^port {port} is in use: give a free one with --master_port\.$"):
        open_store("127.0.0.1", port, PATIENCE, is_host=True, is_alone=True)


@pytest.mark.parametrize(("address", "notes"), [("127.0.1.1", 0), ("192.0.2.7", 1)])
def test_an_address_that_leads_nowhere_is_not_listened_on_alone(port, address, notes, capfd):
    """A host's own name may mean 127.0.1.1 to itself; behind a gateway the others know a host by another address."""
    listener = socket.socket(fileno=_listen(address, port, is_alone=False))
    socket.create_connection(("127.0.0.1", port)).close()
    listener.close()
    assert capfd.readouterr().err.count(f"note: {address} is no address of this machine") == notes


def test_an_unknown_name_is_one_line(port):
    with pytest.raises(UserError, match=r"^the address that the ranks meet on, no\.such\.host\.invalid: .*\.$"):
        open_store("no.such.host.invalid", port, PATIENCE, is_host=True, is_alone=False)


def test_who_does_not_know_the_secret_is_not_let_in_and_does_not_keep_others_out(store, port, capfd):
    hostile = connect(port)
    hostile.set(ANSWER.format(1), "\x80" * 128)
    first = Proving(store, "secret", 0, 2)
    stranger = Proving(hostile, "guessed", 1, 2)
    stranger.join(0.5)
    assert (first.store, stranger.store) == (None, None)
    assert Proving(connect(port), "secret", 1, 2).result() is not None
    assert first.result() is not None
    # The welcome is of the true rank's numbers: to the stranger it proves nothing.
    assert isinstance(stranger.result(), ConnectionError)
    assert capfd.readouterr().err.count("note: a process without the run's secret tried to join the ranks") == 1


def test_a_false_rank_0_gets_nobody(store, port):
    false = Proving(store, "guessed", 0, 2, datetime.timedelta(seconds=1))
    rank = Proving(connect(port), "secret", 1, 2)
    rank.join(0.3)
    assert rank.store is None
    store.set("zerovision/welcome/1", "f" * 64)
    assert isinstance(rank.result(), ConnectionError)
    assert isinstance(false.result(), TimeoutError)  # a thread inside the store would abort Python's exit


def test_every_start_has_a_secret_of_its_own_which_no_file_shows(tmp_path):
    """Not in what the ranks may read of each other, either: the variables of a process are its user's alone."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "with open(sys.argv[1], 'a') as file: print(json.dumps(os.environ[sys.argv[2]]), file=file)\n"
        "sys.exit(3)\n"
    )
    code = (
        "import sys; from zerovision.launch.restart_policy import Adaptation;"
        "from zerovision.launch.single_node import supervise;"
        "sys.exit(supervise(lambda _: sys.argv[1:], {}, 5.0, 1, Adaptation([], 1, has_gpus=False)))"
    )
    supervisor = [sys.executable, "-c", code, sys.executable, str(program)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    environment |= {SECRET_VARIABLE: "of the shell", "TMPDIR": str(tmp_path)}
    words = [str(tmp_path / "told"), SECRET_VARIABLE]
    result = subprocess.run([*supervisor, *words], env=environment, capture_output=True, text=True, timeout=60)
    first, second = map(json.loads, (tmp_path / "told").read_text().splitlines())
    assert first != second
    assert {len(bytes.fromhex(secret)) for secret in (first, second)} == {32}
    assert first not in result.stdout + result.stderr


RANK = """
import sys
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import start_world, stop_world
world = start_world()
print("ranks", gather_objects(sys.argv[1], world), flush=True)
stop_world()
"""
# What the one who found the hole did: join as PyTorch does, before the true rank 1.
STRANGER = """
import torch.distributed as dist
dist.init_process_group("gloo")
print("joined", flush=True)
values = [None, None]
dist.all_gather_object(values, "stranger")
print("met", values, flush=True)
"""


def start(code, rank, port, secret):
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= place | ({SECRET_VARIABLE: secret} if secret else {})
    words = [sys.executable, "-c", code, f"rank {rank}"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow  # of threads: test_who_does_not_know_the_secret_...
def test_a_stranger_that_comes_before_rank_1_gets_nothing(port):
    first, stranger = start(RANK, 0, port, "secret"), start(STRANGER, 1, port, "")
    try:
        deadline = time.monotonic() + 60
        while True:  # until rank 0 listens
            assert time.monotonic() < deadline
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        watch = connect(port)
        while watch.num_keys() < 2:  # until the stranger has come: the other key is rank 0's
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = start(RANK, 1, port, "secret")
        for rank in (first, second):
            output, said = rank.communicate(timeout=60)
            assert output == "ranks ['rank 0', 'rank 1']\n", said
            assert said.count("a process without the run's secret tried to join") == (rank is first)
        stranger.kill()
        assert "met" not in stranger.communicate()[0]
    finally:
        for process in (first, stranger):
            process.kill()
            process.communicate()
