"""Days go by: what a mailbox server would hold if its clock were so many days ahead (26.0, store clock).

A server's clock cannot be set, so its contents become older: every day key and every `day_max` record moves into the
past, and a key whose time is over by then is gone, as its own expiry would have made it.
"""

from __future__ import annotations

import struct
import time

import redis

from qim.stores.mailbox_layout import DAYS_KEPT
from qim.stores.redis import keys
from tests.acceptance.harness import Node

DAY_S = 86_400
_DAY_MAX = struct.Struct(">I12s")


def days_pass(node: Node, days: int) -> None:
    """Everything in the mailboxes is `days` older than it was."""
    with redis.Redis.from_url(node.mailbox_address) as server:
        for name in sorted(server.scan_iter(match="mailbox:*", count=1000)):
            _age_day_key(server, name, days)
        for shard in range(node.parameters.mailbox_shard_count):
            marks = {
                field: _aged(value, days)
                for field, value in server.hgetall(keys.shard(shard)).items()
                if len(field) == 1
            }
            if marks:
                server.hset(keys.shard(shard), mapping=marks)
    # This connection remembers day keys that have their expiry: they are other keys now.
    for instance in set(node.outside.mailboxes._instances):
        instance.day_keys.clear()


def entries_stored(node: Node, user: str) -> int:
    """Entries in all day keys of a user."""
    with redis.Redis.from_url(node.mailbox_address) as server:
        names = list(server.scan_iter(match=f"mailbox:*:{user}:*", count=1000))
        return sum(int(server.zcard(name)) for name in names)


def _age_day_key(server: redis.Redis, name: bytes, days: int) -> None:
    prefix, _, day = name.rpartition(b":")
    aged = int(day) - days
    expires_s = (aged + DAYS_KEPT) * DAY_S
    if expires_s <= time.time():
        server.delete(name)
    else:
        server.rename(name, prefix + b":" + str(aged).encode())
        server.expireat(prefix + b":" + str(aged).encode(), expires_s)


def _aged(marks: bytes, days: int) -> bytes:
    return b"".join(_DAY_MAX.pack(max(day - days, 0), rest) for day, rest in _DAY_MAX.iter_unpack(marks))
