"""The floor of a large group: the same bytes by bare pipelined ZADD on the same server."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import hiredis

from qim.errors import QimError

COMMANDS_PER_WRITE: Final = 1000
WRITES_IN_FLIGHT: Final = 2
_READ_BYTES: Final = 1 << 18


class BareZadd:
    """One entry of `entry_bytes` into each of `count` sorted sets, named like mailboxes; `close` removes them."""

    def __init__(self, address: str, *, count: int, entry_bytes: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(urlsplit(address).path)
        self._reader = hiredis.Reader()
        self._keys = [f"mailbox:bench-floor:m{number:06d}:0" for number in range(count)]
        self._entry_bytes = entry_bytes
        self._round = 0

    def run(self) -> float:
        """Seconds from the first byte to the last reply; commands are packed before."""
        self._round += 1
        member = self._round.to_bytes(8, "big").ljust(self._entry_bytes, b"\x7f")
        blocks = list(self._packed(lambda key: ("ZADD", key, "0", member)))
        started_s = time.monotonic()
        self._send(blocks)
        return time.monotonic() - started_s

    def close(self) -> None:
        self._send(list(self._packed(lambda key: ("UNLINK", key))))
        self._socket.close()

    def _packed(self, command: Any) -> Iterator[bytes]:
        for first in range(0, len(self._keys), COMMANDS_PER_WRITE):
            names = self._keys[first : first + COMMANDS_PER_WRITE]
            yield b"".join(hiredis.pack_command(command(name)) for name in names)

    def _send(self, blocks: Sequence[bytes]) -> None:
        """Blocks go out while at most `WRITES_IN_FLIGHT` are unanswered."""
        for sent, block in enumerate(blocks):
            if sent >= WRITES_IN_FLIGHT:
                self._await_replies(COMMANDS_PER_WRITE)
            self._socket.sendall(block)
        behind = min(len(blocks), WRITES_IN_FLIGHT)
        self._await_replies(len(self._keys) - (len(blocks) - behind) * COMMANDS_PER_WRITE)

    def _await_replies(self, count: int) -> None:
        while count:
            reply = self._reader.gets()
            if reply is False:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise QimError("the mailbox server closed the connection")
                self._reader.feed(data)
                continue
            if isinstance(reply, hiredis.ReplyError):
                raise QimError(f"the mailbox server refused a ZADD: {reply}")
            count -= 1
