"""The load generator: a process of its own with many people, told what to do by `node.py`."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from qim.app.bench.arrivals import Arrivals
from qim.app.bench.child import ChildFailed, Pipe, serve
from qim.app.bench.people import Person, Samples
from qim.app.tls import client_context

LOGINS_AT_ONCE: Final = 32
PING_EVERY_S: Final = 25.0
TICK_S: Final = 0.001
"""The loop's timers have no finer grain; what this costs in latency is counted."""
QUIET_S: Final = 1.0
"""After the last send: so long without any frame means that nothing more is coming."""
DRAIN_MAX_S: Final = 20.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIn:
    """Connect everybody: (user, token) pairs; `first_number` numbers them across generators."""

    host: str
    port: int
    ca_path: Path
    tenant_id: str
    users: Sequence[tuple[str, str]]
    first_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeGroup:
    """The first person creates the group."""

    group_id: str
    member_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOne:
    """The first person sends one message; the answer is when it left (monotonic seconds)."""

    conversation_id: str
    payload_bytes: int
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Send for `warmup_s + seconds` from `start_s` (monotonic), person after person in turn, at `rate_per_s` in all.

    `targets`: conversation of each person. Only messages due after the warm-up are counted.
    """

    rate_per_s: float
    start_s: float
    warmup_s: float
    seconds: float
    targets: Sequence[str]
    payload_bytes: int
    run_id: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    samples: Samples
    unanswered: int
    """Messages that neither got a SEND_ACK nor an ERROR."""
    closed: int
    """Connections that ended."""


async def generate(pipe: Pipe) -> None:
    """Main of the process."""
    generator = Generator()
    try:
        await serve(pipe, generator.handle)
    finally:
        generator.close()


class Generator:
    def __init__(self) -> None:
        self._people: list[Person] = []
        self._idle = Samples()
        self._pinging: asyncio.TimerHandle | None = None

    async def handle(self, command: Any) -> Any:
        if isinstance(command, LogIn):
            return await self._log_in(command)
        if isinstance(command, MakeGroup):
            return await self._people[0].create_group(command.group_id, list(command.member_ids))
        if isinstance(command, SendOne):
            return await self._send_one(command)
        if isinstance(command, Run):
            return await self._run(command)
        raise ChildFailed(f"unknown command {type(command).__name__}")

    def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        for person in self._people:
            person.close()

    async def _log_in(self, command: LogIn) -> int:
        limit = asyncio.Semaphore(LOGINS_AT_ONCE)
        tls = client_context(command.ca_path)

        async def arrive(number: int, user_id: str, token: str) -> Person:
            person = Person(number, user_id, self._idle)
            async with limit:
                await person.log_in(command.host, command.port, command.tenant_id, token, tls)
            return person

        self._people += await asyncio.gather(
            *(arrive(command.first_number + i, user, token) for i, (user, token) in enumerate(command.users))
        )
        self._keep_alive()
        gc.collect()
        gc.freeze()
        return len(self._people)

    def _keep_alive(self) -> None:
        for person in self._people:
            person.ping()
        self._pinging = asyncio.get_running_loop().call_later(PING_EVERY_S, self._keep_alive)

    async def _send_one(self, command: SendOne) -> float:
        person = self._people[0]
        person.conversation_id = command.conversation_id
        samples = Samples()
        person.begin(samples, command.run_id, command.payload_bytes)
        sent_s = time.monotonic()
        person.send(sent_s)
        while person.waiting and time.monotonic() - sent_s < DRAIN_MAX_S:
            await asyncio.sleep(TICK_S)
        if not samples.ack_ms:
            raise ChildFailed(f"the message to {command.conversation_id} was refused: {dict(samples.refused)}")
        return sent_s

    async def _run(self, run: Run) -> RunResult:
        samples = Samples(run.start_s + run.warmup_s)
        for person, target in zip(self._people, run.targets, strict=True):
            person.conversation_id = target
            person.begin(samples, run.run_id, run.payload_bytes)
        end_s = run.start_s + run.warmup_s + run.seconds
        arrivals = Arrivals(run.rate_per_s, start_s=run.start_s, seed=run.seed)
        turn = cycle(self._people)
        now_s = time.monotonic()
        while now_s < end_s:
            for due_s in arrivals.due(now_s):
                next(turn).send(due_s)
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
        await self._drain(samples)
        result = RunResult(
            samples=samples,
            unanswered=sum(len(person.waiting) for person in self._people),
            closed=sum(1 for person in self._people if person.closed),
        )
        for person in self._people:
            person.waiting.clear()
        return result

    async def _drain(self, samples: Samples) -> None:
        """Until everything is answered and nothing has come for a while."""
        deadline_s = time.monotonic() + DRAIN_MAX_S
        seen, quiet_from_s = -1, time.monotonic()
        while (now_s := time.monotonic()) < deadline_s:
            heard = len(samples.ack_ms) + len(samples.delivery_ms) + samples.refused.total() + samples.dirty
            if heard != seen:
                seen, quiet_from_s = heard, now_s
            elif now_s - quiet_from_s > QUIET_S and not any(person.waiting for person in self._people):
                return
            await asyncio.sleep(_POLL_S)
