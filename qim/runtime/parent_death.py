"""Children that never outlive their parent (DESIGN-data §10)."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
"""Loaded at import: dlopen between fork and exec is not safe."""


def die_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `death_signal` to this process when its parent dies. Call it first in a forked child."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that died before prctl took effect sends nothing.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
