"""Named places where a process can be made to die as by kill -9, for tests of what its crash leaves behind.

Off unless QIM_TEST_CRASH_POINTS names a directory when the process starts; then a pass costs a look at that variable's
value and nothing else. A file of a point's name in it arms the point: the first process that passes takes the file away
and kills itself, so one file is one crash.
"""

from __future__ import annotations

import os
import signal
from typing import Final

DIRECTORY_VARIABLE: Final = "QIM_TEST_CRASH_POINTS"
AFTER_COMMIT: Final = "after_commit"
"""The commit script has answered; no SEND_ACK and no hint has left."""
AFTER_DISPATCH: Final = "after_dispatch"
"""Dispatches are in the log; no hint has left, the checkpoint is not saved."""
AFTER_CHUNK: Final = "after_chunk"
"""Entries and their bits are stored; W of their lane is not moved yet."""
AFTER_WATERMARK: Final = "after_watermark"
"""Entries, bits and W are stored; the worker has not looked at the answer."""
BEFORE_PUSH: Final = "before_push"
"""W covers the entry; its PushBatch has not left."""
CRASH_POINTS: Final = (AFTER_COMMIT, AFTER_DISPATCH, AFTER_CHUNK, AFTER_WATERMARK, BEFORE_PUSH)

_DIRECTORY: Final = os.environ.get(DIRECTORY_VARIABLE, "")


def crash_point(name: str) -> None:
    """Die here if the point is armed."""
    if not _DIRECTORY:
        return
    try:
        os.unlink(os.path.join(_DIRECTORY, name))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
