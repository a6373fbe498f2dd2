"""The connections of one worker, by id and by user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qim.gateway.connection import ClientConnection

GATEWAY_INDEX_MAX: Final = 1023
_STEP: Final = GATEWAY_INDEX_MAX + 1


class ConnectionIds:
    """Ids that no earlier process of any gateway of the cluster has used: time of start, count, gateway index.

    A restart after t ms would have to follow on more than 1024 · t connections to repeat one.
    """

    __slots__ = ("_next",)

    def __init__(self, *, gateway_index: int, now_unix_ms: int) -> None:
        if not 0 <= gateway_index <= GATEWAY_INDEX_MAX:
            raise ValueError(f"gateway index {gateway_index} outside 0..{GATEWAY_INDEX_MAX}")
        self._next = now_unix_ms * _STEP * _STEP + gateway_index

    def take(self) -> int:
        taken = self._next
        self._next += _STEP
        return taken


class ConnectionTable:
    """Every open connection; those with a session are also found by user key."""

    __slots__ = ("by_id", "_by_user")

    def __init__(self) -> None:
        self.by_id: dict[int, ClientConnection] = {}
        """Read directly by the push path."""
        self._by_user: dict[bytes, list[ClientConnection]] = {}

    def add(self, connection: ClientConnection) -> None:
        """A socket was accepted."""
        self.by_id[connection.id] = connection

    def discard(self, connection: ClientConnection) -> None:
        """The socket is gone, or its session has ended for good."""
        self.by_id.pop(connection.id, None)

    def bind(self, connection: ClientConnection, user_key: bytes) -> None:
        """The connection belongs to this user from now on."""
        self._by_user.setdefault(user_key, []).append(connection)

    def unbind(self, connection: ClientConnection, user_key: bytes) -> None:
        """Undo `bind`."""
        bound = self._by_user[user_key]
        bound.remove(connection)
        if not bound:
            del self._by_user[user_key]

    def of_user(self, user_key: bytes) -> list[ClientConnection]:
        """A copy: callers close what they find."""
        return list(self._by_user.get(user_key, ()))

    def sessions(self) -> Iterator[ClientConnection]:
        """Every connection that has a session."""
        for bound in list(self._by_user.values()):
            yield from list(bound)

    def __len__(self) -> int:
        return len(self.by_id)
