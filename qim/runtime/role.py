"""A role instance: what a worker process hosts (DESIGN §5)."""

from __future__ import annotations

from typing import Protocol


class Role(Protocol):
    """One of "gateway-<i>", "writer-<i>", "fanout-<i>", "mailbox-<i>", "admin-0"; a process hosts one or more."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Take what it owns (grants, shards, sockets). StartupError when it cannot; returns before it is ready."""
        ...

    async def drain(self) -> None:
        """Accept nothing new, finish what was accepted. Bounded by the caller's timeout."""
        ...

    async def stop(self) -> None:
        """Close everything; also called without `drain` and after a failed `start`."""
        ...

    def ready(self) -> bool:
        """True while it serves."""
        ...
