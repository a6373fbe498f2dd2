"""Child processes that answer commands."""

from __future__ import annotations

import os
import signal

import pytest

from qim.app.bench.child import Child, ChildFailed
from qim.app.bench.load import generate

TIMEOUT_S = 30.0


def test_an_error_in_the_child_is_the_parents_to_judge() -> None:
    with Child("generator", generate) as child:
        for _ in range(2):
            with pytest.raises(ChildFailed, match=r"generator: ChildFailed: unknown command str"):
                child.call("nonsense", TIMEOUT_S)


def test_a_child_that_dies_is_named() -> None:
    with Child("generator", generate) as child:
        with pytest.raises(ChildFailed):
            child.call("nonsense", TIMEOUT_S)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildFailed, match=r"generator has died, exit code -9"):
            child.call("nonsense", TIMEOUT_S)


def test_a_silent_child_is_not_waited_for_longer_than_told() -> None:
    with Child("generator", generate) as child, pytest.raises(ChildFailed, match="gave no answer"):
        child.take(0.01)


def test_a_child_ends_with_its_pipe_and_ignores_ctrl_c() -> None:
    child = Child("generator", generate)
    with pytest.raises(ChildFailed):
        child.call("nonsense", TIMEOUT_S)
    os.kill(child.pid, signal.SIGINT)
    with pytest.raises(ChildFailed, match="unknown command"):
        child.call("nonsense", TIMEOUT_S)
    pid = child.pid
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
