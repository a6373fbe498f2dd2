"""Pinning of worker processes to cores."""

from __future__ import annotations

import os


def usable_cpus() -> list[int]:
    """Cores this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


def pin_to_cpu(cpu: int) -> bool:
    """Bind this process to one core; False when the kernel refuses (container limits): it then runs unpinned."""
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError:
        return False
    return True
