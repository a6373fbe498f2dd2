"""A child process that answers commands over a pipe: load generators and the parts that are measured alone.

Started afresh instead of forked, so that no loop, thread or counter of the parent is in it. It ignores Ctrl-C and ends
with its pipe, however the parent ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import uvloop

from qim.errors import QimError
from qim.obs.logs import configure_logs

STOP_TIMEOUT_S: Final = 10.0

Pipe = Connection
Handler = Callable[[Any], Awaitable[Any]]
Server = Callable[[Pipe], Coroutine[Any, Any, None]]


class ChildFailed(QimError):
    """The child could not do what it was told; the text is its error."""


class _Failure(NamedTuple):
    text: str


class Child:
    """`main` runs in the child: a coroutine function of one pipe that calls `serve`."""

    def __init__(self, name: str, main: Server) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(main, theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def post(self, command: Any) -> None:
        """Send a command whose answer `take` waits for; ChildFailed when the child has died."""
        try:
            self._pipe.send(command)
        except OSError as error:
            raise self._died(error) from None

    def take(self, timeout_s: float) -> Any:
        """The answer to the oldest command; ChildFailed when it failed, died or was silent for `timeout_s`."""
        try:
            if not self._pipe.poll(timeout_s):
                raise ChildFailed(f"{self._process.name} gave no answer for {timeout_s:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(error) from None
        if isinstance(answer, _Failure):
            raise ChildFailed(f"{self._process.name}: {answer.text}")
        return answer

    def _died(self, error: Exception) -> ChildFailed:
        self._process.join(STOP_TIMEOUT_S)
        return ChildFailed(f"{self._process.name} has died, exit code {self._process.exitcode}: {error!r}")

    def call(self, command: Any, timeout_s: float) -> Any:
        """`post`, then `take`."""
        self.post(command)
        return self.take(timeout_s)

    def close(self) -> None:
        """End it; killed when it does not follow."""
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def serve(pipe: Pipe, handle: Handler) -> None:
    """Answer commands one after another until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    while True:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pipe.fileno(), _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(pipe.fileno())
            os.set_blocking(pipe.fileno(), True)  # libuv's poll handles make it non-blocking
        try:
            command = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = await handle(command)
        except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
            answer = _Failure(f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return


def _resolve(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _run(main: Server, pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logs(level="warning", process=current_process().name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(pipe))
