"""SIGSTOP for a while: a process that lives on with all it had in memory and in flight, and does not know of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def paused(*pids: int) -> Iterator[None]:
    """Stopped for the time of the block; one that was killed meanwhile stays dead."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """True between SIGSTOP and SIGCONT."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
