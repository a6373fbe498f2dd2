"""What the servers of a node hold, read beside the stores' own code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import redis

from qim.protocol.qim_pb2 import OutboxRecord
from qim.stores.api import StoredRow
from qim.stores.mailbox_layout import split_member
from qim.stores.redis import keys
from tests.acceptance.harness import TENANT

_KEYS_AT_ONCE = 2000


class Servers(Protocol):
    """A node, in this process or in its own."""

    @property
    def core_address(self) -> str: ...

    @property
    def mailbox_address(self) -> str: ...


def connected(address: str) -> redis.Redis:
    """A blocking client of a private server of the node."""
    return redis.Redis(unix_socket_path=address.removeprefix("unix://"))


def all_entries(node: Servers) -> Iterator[tuple[str, StoredRow]]:
    """(user, entry) of every entry in every mailbox of the store."""
    with connected(node.mailbox_address) as store:
        names = set(store.scan_iter(match=f"{keys.mailbox_prefix('*', '*')}*", count=10_000))
        waiting = sorted(names)
        for first in range(0, len(waiting), _KEYS_AT_ONCE):
            part = waiting[first : first + _KEYS_AT_ONCE]
            with store.pipeline(transaction=False) as reads:
                for name in part:
                    reads.zrange(name, 0, -1)
                for name, members in zip(part, reads.execute(), strict=True):
                    _, tenant, user, _ = name.decode().split(":")
                    assert tenant == TENANT
                    for member in members:
                        yield user, split_member(member)


def all_records(node: Servers, conversation_id: str) -> list[tuple[int, bytes]]:
    """(conversation_seq, record) of every row the MessageStore holds for a conversation."""
    found: list[tuple[int, bytes]] = []
    with connected(node.core_address) as store:
        for name in store.scan_iter(match="rec:*", count=10_000):
            if f":{TENANT}:{conversation_id}:" in name.decode():
                found += [(int(seq), record) for seq, record in store.hgetall(name).items()]
    return found


def snapshot(address: str) -> dict[bytes, tuple[bytes, int]]:
    """Everything a server holds: key -> (value, expiry in unix ms, 0 = none)."""
    with connected(address) as store:
        found = {}
        for name in store.scan_iter(count=10_000):
            value, expires_ms = store.dump(name), int(store.execute_command("PEXPIRETIME", name))
            assert value is not None
            found[name] = (value, max(0, expires_ms))
        return found


def go_back_to(address: str, before: dict[bytes, tuple[bytes, int]]) -> None:
    """The server loses all that came after a snapshot, as one with fsync every second may."""
    with connected(address) as store:
        store.flushdb()
        for name, (value, expires_ms) in before.items():
            store.restore(name, expires_ms, value, absttl=True)


def outbox_of(core: redis.Redis, bucket: int) -> list[OutboxRecord]:
    """All records of a bucket that were not trimmed, in order."""
    stream: Any = core.xrange(keys.outbox(bucket))
    return [OutboxRecord.FromString(fields[keys.STREAM_FIELD]) for _, fields in stream]
