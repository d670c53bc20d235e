"""Messages between a node's agent and the launch, in a stream that ranks may print to as well.

A message is JSON on one line after a byte that no program prints. A pipe takes up to 4096 bytes in one piece, so
what ranks print at the same moment may stand before a message or after it, never inside.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

BEGIN = b"\x1e"  # ASCII's record separator
READ_BYTES = 1 << 16

Message = dict[str, Any]


class Channel:
    """One end of a connection, over a pair of file descriptors."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()

    def send(self, message: Message) -> bool:
        """Send a message; return whether the other end could still be written to."""
        rest = BEGIN + json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._writing, rest) :]
            except OSError:
                return False
        return True

    def messages(self, pass_by: Callable[[bytes], None]) -> Iterator[Message]:
        """Yield the messages until the other end closes; every other byte goes to `pass_by` at once, in order."""
        waiting = b""
        while True:
            try:
                read = os.read(self._reading, READ_BYTES)
            except OSError:
                read = b""
            if not read:
                pass_by(waiting)
                return
            waiting += read
            while waiting:
                printed, begin, rest = waiting.partition(BEGIN)
                if printed:
                    pass_by(printed)
                line, end, after = rest.partition(b"\n")
                if not end:
                    waiting = begin + rest
                    break
                waiting = after
                message = _message_of(line)
                if message is None:
                    pass_by(begin + line + end)
                else:
                    yield message


def _message_of(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
