"""Server-side scripts: package data `lua/<store>_<operation>.lua`, called by EVALSHA."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from time import perf_counter
from typing import Any, Final

from qim.stores.redis.resp import Argument, RespClient, RespError

_PACKAGE: Final = "qim.stores.redis"


class Script:
    """One script by name, e.g. `Script("message_commit")`. Immutable; share one instance per module."""

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = (resources.files(_PACKAGE) / "lua" / f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    async def __call__(self, client: RespClient, keys: Sequence[Argument], args: Sequence[Argument]) -> Any:
        """Run the script. A server that does not know it (restarted) gets the source once: NOSCRIPT wrote nothing.

        Calls made in one tick reach the server in order unless one meets NOSCRIPT; a caller that needs order keeps one
        call in flight (DESIGN-data §3.3) or loads the script when it connects.
        """
        started = perf_counter()
        try:
            reply = await client.call("EVALSHA", self.sha, len(keys), *keys, *args)
        except RespError as error:
            if error.code != "NOSCRIPT":
                raise
            reply = await client.call("EVAL", self.source, len(keys), *keys, *args)
        client.call_ms.observe((perf_counter() - started) * 1000)
        return reply

    async def load(self, client: RespClient) -> None:
        """Make the script known before the first call."""
        await client.call("SCRIPT", "LOAD", self.source)
