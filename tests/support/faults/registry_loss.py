"""One process loses the server of the registry, everybody else keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from qim.app.own_node import OwnNode
from tests.support.faults.link_cut import cut_now, unreachable


@contextmanager
def registry_lost(node: OwnNode, process: str) -> Iterator[int]:
    """All connections of `process` to the core server are cut and none is made for the time of the block; how many."""
    path = Path(urlsplit(node.address().core_address).path)
    with unreachable(path):
        yield cut_now(node.pid(process), path)
