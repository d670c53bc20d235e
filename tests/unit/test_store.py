"""How the ranks meet: each start under an id of its own, in a store that listens where it must alone."""

from __future__ import annotations

import datetime
import socket

import pytest

from tests.training.ranks import free_port
from zerovision.training.base.errors import UserError
from zerovision.training.world.store import _listen, open_store

PATIENCE = datetime.timedelta(seconds=30)


def connect(port, run_id="run"):
    return open_store("127.0.0.1", port, PATIENCE, run_id, is_host=False, is_alone=True)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def store(port):
    return open_store("127.0.0.1", port, PATIENCE, "run", is_host=True, is_alone=True)


def test_every_start_has_a_part_of_the_store_for_itself(store, port):
    same, other = connect(port), connect(port, "other")
    store.set("key", "value")
    assert same.get("key") == b"value"
    assert not other.check(["key"])


def test_the_store_listens_on_the_given_address_alone(store, port):
    """Linux answers on all of 127.0.0.0/8."""
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    with pytest.raises(UserError, match=rf"^port {port} is in use: give a free one with --master_port\.$"):
        open_store("127.0.0.1", port, PATIENCE, "run", is_host=True, is_alone=True)


@pytest.mark.parametrize(("address", "notes"), [("127.0.1.1", 0), ("192.0.2.7", 1)])
def test_an_address_that_leads_nowhere_is_not_listened_on_alone(port, address, notes, capfd):
    """A host's own name may mean 127.0.1.1 to itself; behind a gateway the others know a host by another address."""
    listener = socket.socket(fileno=_listen(address, port, is_alone=False))
    socket.create_connection(("127.0.0.1", port)).close()
    listener.close()
    assert capfd.readouterr().err.count(f"note: {address} is no address of this machine") == notes


def test_an_unknown_name_is_one_line(port):
    with pytest.raises(UserError, match=r"^the address that the ranks meet on, no\.such\.host\.invalid: .*\.$"):
        open_store("no.such.host.invalid", port, PATIENCE, "run", is_host=True, is_alone=False)
