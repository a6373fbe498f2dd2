"""A child dies with its parent, also when the parent was gone before the child asked."""

from __future__ import annotations

import os
import signal
import time

from qim.runtime.parent_death import die_with_parent
from tests.support.supervised import wait_until_gone


def _sleeping_grandchild(*, parent_pid: int | None, parent_leaves_first: bool) -> tuple[int, int]:
    """(parent, child) where the child called `die_with_parent` and sleeps."""
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        me = os.getpid()
        if os.fork() == 0:
            if parent_leaves_first:
                while os.getppid() == me:
                    time.sleep(0.001)
            os.write(write_end, os.getpid().to_bytes(4, "big"))
            die_with_parent(parent_pid or me, signal.SIGKILL)
            os.write(write_end, b"up")
            time.sleep(30)
            os._exit(0)
        if not parent_leaves_first:
            time.sleep(30)
        os._exit(0)
    os.close(write_end)
    child = int.from_bytes(os.read(read_end, 4), "big")
    if not parent_leaves_first:
        assert os.read(read_end, 2) == b"up"
    os.close(read_end)
    return parent, child


def test_a_child_dies_with_its_parent() -> None:
    parent, child = _sleeping_grandchild(parent_pid=None, parent_leaves_first=False)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until_gone([child])


def test_a_child_whose_parent_is_gone_already_ends_itself() -> None:
    parent, child = _sleeping_grandchild(parent_pid=None, parent_leaves_first=True)
    os.waitpid(parent, 0)
    wait_until_gone([child])
