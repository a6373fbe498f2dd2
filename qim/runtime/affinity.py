"""Where and how worker processes run: cores and scheduling class."""

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


def run_in_batches() -> bool:
    """SCHED_BATCH for this process and what it starts: whoever is woken waits for the core instead of taking it.

    A message wakes five processes one after another. Under load each would interrupt the one that woke it, for one
    message; behind it, it finds all that came meanwhile. False when an operator chose another class, or the kernel
    refuses: it then runs as it is.
    """
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True
