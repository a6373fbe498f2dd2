"""Leases of processes whose death is proven (DESIGN-data §6): the supervisor reaped them, or starts the node anew.

A supervisor owns no loop and no client, because none survives fork: each call here is one short connection of its own
with a bounded wait. When it fails the leases end by themselves, as they do for a death that nobody has proven.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any, Final, Protocol

import redis

from qim.errors import StoreUnavailable
from qim.registry.api import KIND_OF_POOL, LeaseKind
from qim.stores.redis import keys

TIMEOUT_S: Final = 1.0
"""The supervisor does nothing else meanwhile; a server that is there answers within a millisecond."""


class _Connection(Protocol):
    """What is used of a redis-py client."""

    def execute_command(self, *args: object) -> Any: ...


def release_reaped(address: str, owners: Collection[str], process: str = "") -> int:
    """Give back every lease of these members, at once; how many there were. StoreUnavailable when there is no answer.

    `process`: it is about to host them again, so they stay members until they beat or one ttl is over: their shares
    wait for them instead of moving twice.
    """
    script = (resources.files("qim.stores.redis") / "lua" / "registry_release_owners.lua").read_bytes()
    released = 0
    with _connected(address) as client:
        for pool, kind in KIND_OF_POOL.items():
            dead = [owner for owner in owners if owner.rpartition("-")[0] == pool]
            if dead:
                names = (keys.registry_leases(kind), keys.registry_beats(kind), keys.REGISTRY_VERSION)
                released += int(client.execute_command("EVAL", script, len(names), *names, process, *dead))
    return released


def lease_owners(address: str) -> set[str]:
    """Every member that has a lease. StoreUnavailable when there is no answer."""
    owners: set[str] = set()
    with _connected(address) as client:
        for kind in LeaseKind:
            rows = client.execute_command("HVALS", keys.registry_leases(kind))
            owners.update(row.decode().split(" ")[1] for row in rows)
    return owners - {"-"}


@contextmanager
def _connected(address: str) -> Iterator[_Connection]:
    client = redis.Redis.from_url(address, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    try:
        yield client
    except (redis.RedisError, OSError) as error:
        raise StoreUnavailable(f"{address}: {error}") from None
    finally:
        client.close()
