"""Named, referenced and supervised asyncio tasks: none is collected while it runs, none fails in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from qim.obs import metrics
from qim.obs.logs import get_logger

log = get_logger(__name__)

FailureHandler = Callable[[str, BaseException], None]
"""(task name, exception)."""


class TaskSet:
    """The tasks of one owner. A crash is logged and handed to `on_failure`; `close` cancels what still runs.

    The default `on_failure` of a worker process ends the process with exit code 1, so that its supervisor starts a
    fresh one: a role with a dead task must not look alive.
    """

    __slots__ = ("_closed", "_on_failure", "_tasks")

    def __init__(self, on_failure: FailureHandler) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure
        self._closed = False

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Run `work` as a task called `name`; after `close` it is not started and comes back cancelled."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        if self._closed:
            task.cancel()
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel every task and wait until all have ended. May be called from inside one of them."""
        self._closed = True
        current = asyncio.current_task()
        others = [task for task in self._tasks if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            metrics.TASK_FAILED_TOTAL.inc()
            log.error("task_failed", task=task.get_name(), error=error)
            self._on_failure(task.get_name(), error)
