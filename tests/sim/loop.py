"""A deterministic event loop on virtual time, and the processes that live on it.

No callback ever waits for real: when nothing is ready the clock jumps to the next timer. Every callback belongs to the
process whose context it carries; the loop counts the callbacks of a process, holds them back while it is stopped and
drops them once it is dead, so a process ends between any two of its actions like one that was killed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

START_UNIX_MS = 1_800_000_000_000
"""Wall clock at virtual time 0; far from midnight UTC (08:00), so no seed runs over a day."""


class WallClock:
    """The wall clock of a host; it steps, a restart of a process does not mend it."""

    def __init__(self) -> None:
        self.offset_ms = 0


class SimProcess:
    """One operating-system process. `context` marks everything it does."""

    def __init__(self, name: str, loop: SimLoop, wall: WallClock) -> None:
        self.wall = wall
        self.name = name
        self.loop = loop
        self.alive = True
        self.paused = False
        self.held: list[asyncio.Handle] = []
        self.crash_after: int | None = None
        """Callbacks it still runs before it is killed."""
        self.on_crash: Callable[[], None] = lambda: None
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback as this process, unless it is dead by then."""
        self.loop.call_soon(callback, *args, context=self.context)

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, callback, *args, context=self.context)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work, context=self.context)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        self.alive = False
        self.held.clear()

    def stop(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what came in meanwhile is handled in its order."""
        self.paused = False
        held, self.held = self.held, []
        self.loop.take_back(held)

    # the clock port (qim.runtime.clock.Clock)

    def unix_ms(self) -> int:
        return START_UNIX_MS + self.wall.offset_ms + round(self.loop.time() * 1000)

    def monotonic_ms(self) -> float:
        return self.loop.time() * 1000


PROCESS: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("process", default=None)


def this_process() -> SimProcess:
    """The process the running callback belongs to."""
    process = PROCESS.get()
    assert process is not None, "no simulated process runs here"
    return process


class Stalled(Exception):
    """Nothing is left to do before the end of the run."""


class SimLoop(asyncio.BaseEventLoop):
    """BaseEventLoop without a selector."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._queue: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self.outside = contextvars.copy_context()
        """Of what belongs to no process: the network, the servers, the director."""
        self.handles_run = 0
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.unhandled.append(context))

    def time(self) -> float:
        return self._now_s

    def world_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """A timer of the world: it runs whatever happens to the process that caused it."""
        return self.call_at(when_s, callback, *args, context=self.outside)

    def world_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay_s, callback, *args, context=self.outside)

    # ---------------------------------------------------------------------------------------- what asyncio asks for

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + max(delay, 0.0), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        self.tasks[task] = None
        task.add_done_callback(self._forget, context=self.outside)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def take_back(self, handles: list[asyncio.Handle]) -> None:
        self._queue.extend(handles)

    # ------------------------------------------------------------------------------------------------------ running

    def run_until_s(self, end_s: float) -> None:
        """Run everything that happens before the virtual time `end_s`."""
        asyncio._set_running_loop(self)
        try:
            while self._run_ready() or self._next_timer(end_s):
                pass
            self._now_s = max(self._now_s, end_s)
        finally:
            asyncio._set_running_loop(None)

    def _next_timer(self, end_s: float) -> bool:
        """Move the clock to the next timer and make what is due then ready; False when that lies beyond the end."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers or timers[0][0] >= end_s:
            return False
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            self._queue.append(heapq.heappop(timers)[2])
        return True

    def _run_ready(self) -> bool:
        queue = self._queue
        ran = False
        while queue:
            ran = True
            handle = queue.popleft()
            if handle.cancelled():
                continue
            process = cast(contextvars.Context, handle._context).get(PROCESS)  # type: ignore[attr-defined]
            if process is not None:
                if not process.alive:
                    continue
                if process.paused:
                    process.held.append(handle)
                    continue
                if process.crash_after is not None:
                    if process.crash_after <= 0:
                        process.crash_after = None
                        process.on_crash()
                        continue
                    process.crash_after -= 1
            self.handles_run += 1
            handle._run()
        return ran

    def dismantle(self) -> None:
        """End every task that is left, without running any more of the world."""
        warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that were still to begin
        for task in list(self.tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            try:
                task.get_coro().close()
            except (RuntimeError, ValueError):
                pass
        self._queue.clear()
        self._timers.clear()
        self.close()
