"""CPU time of other processes from the scheduler's own account, by pool.

/proc/<pid>/schedstat speaks of the main thread only, so every thread is read: a Redis-compatible server syncs its file
in a thread of its own. Kernel time that a process causes, its share of the loopback included, is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def cpu_ns(pid: int) -> int:
    """Nanoseconds all threads of a process have run; 0 when it is gone."""
    total = 0
    for account in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(account.read_text().split(maxsplit=1)[0])
        except (OSError, IndexError, ValueError):
            continue  # the thread ended between the listing and the read
    return total


class CpuMeter:
    """Reads the pools of a node and of its load generator."""

    __slots__ = ("_pools",)

    def __init__(self, pools: Mapping[str, Sequence[int]]) -> None:
        self._pools = {pool: tuple(pids) for pool, pids in pools.items()}

    def read(self) -> dict[str, int]:
        """Pool -> nanoseconds so far."""
        return {pool: sum(map(cpu_ns, pids)) for pool, pids in self._pools.items()}


def per_item_us(before: Mapping[str, int], after: Mapping[str, int], items: int) -> dict[str, float]:
    """Pool -> microseconds of CPU per item between two readings; all 0 without items."""
    return {pool: (after[pool] - used) / 1000 / items if items else 0.0 for pool, used in before.items()}
