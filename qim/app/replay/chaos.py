"""kill -9 of workers while something is in flight, and how long the node takes to get over it.

"In flight" is observed, not assumed: the victim is stopped first, then the senders' un-ACKed SENDs are counted and
every shard's W is compared with its dispatch log; only if both say that something is on its way the victim is killed,
else it goes on running and is tried again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import redis

from qim.app.commit_logs import broker_ends
from qim.app.replay.report import Kill
from qim.core.seq import log_offset_of
from qim.runtime.clock import Clock
from qim.stores.redis import keys

TRY_EVERY_S: Final = 0.002
"""How often a victim is looked at; stopped for well under a millisecond each time."""
RECOVERY_TIMEOUT_S: Final = 60.0
"""Far above the 5 s that a worker and its replay need; a node that takes longer has failed."""
_POLL_S: Final = 0.01


class Traffic(Protocol):
    """The senders of the run."""

    def unacknowledged(self) -> frozenset[str]:
        """client_message_ids that were sent and have no SEND_ACK yet."""
        ...


class Backlog(NamedTuple):
    """Dispatch log and W of all shards at one moment."""

    high: tuple[int, ...]
    """Offset the next dispatch of each shard gets."""
    materialized: tuple[int, ...]
    """Offset up to which every lane of the shard is done, -1 = nothing."""

    @property
    def above_w(self) -> int:
        return sum(max(high - 1 - done, 0) for high, done in zip(self.high, self.materialized, strict=True))


class BacklogProbe:
    """Reads logs and watermarks straight from the node's servers; `commit_log` "" is the embedded log."""

    def __init__(self, core_address: str, mailbox_address: str, shard_count: int, *, commit_log: str = "") -> None:
        self._core = redis.Redis.from_url(core_address)
        self._mailbox = redis.Redis.from_url(mailbox_address)
        self._shards = range(shard_count)
        self._broker = broker_ends(commit_log, shard_count) if commit_log else None

    def read(self) -> Backlog:
        # The log first: a dispatch that is done between the two reads then counts as done, never as in flight.
        high = self._log_ends()
        reads = self._mailbox.pipeline(transaction=False)
        for shard in self._shards:
            reads.hget(keys.shard(shard), keys.WATERMARKS_FIELD)
        packed = reads.execute()
        return Backlog(tuple(high), tuple(_materialized(value) for value in packed))

    def _log_ends(self) -> list[int]:
        if self._broker is not None:
            return self._broker()
        return [int(value or 0) for value in self._core.mget([keys.dispatch_next(shard) for shard in self._shards])]

    def close(self) -> None:
        self._core.close()
        self._mailbox.close()


def _materialized(packed: bytes | None) -> int:
    """Lowest offset of all lanes; a later epoch is a greater seq, never a lower offset of the same lane."""
    if not packed:
        return -1
    lanes = struct.unpack(f">{len(packed) // 8}Q", packed)
    return min(log_offset_of(seq) if seq else -1 for seq in lanes)


class Chaos:
    """Kills one process after another."""

    def __init__(
        self,
        probe: BacklogProbe,
        traffic: Traffic,
        clock: Clock,
        pid_of: Callable[[str], int],
        *,
        started_ms: float,
    ) -> None:
        self._started_ms = started_ms
        self.looking = False
        """A victim is chosen and not yet killed: it waits for traffic."""
        self._probe = probe
        self._traffic = traffic
        self._clock = clock
        self._pid_of = pid_of
        """Process name -> pid; StartupError while it does not run."""

    async def kill(self, role: str, process: str, *, timeout_s: float) -> Kill:
        """Kill `process` at a moment when something is in flight and wait until all of that has arrived.

        Without such a moment in `timeout_s` the kill happens anyway and its report shows what was missing.
        """
        deadline_ms = self._clock.monotonic_ms() + timeout_s * 1000
        self.looking = True
        while True:
            last_try = self._clock.monotonic_ms() >= deadline_ms
            if self._traffic.unacknowledged() or last_try:
                pid = self._pid_of(process)
                os.kill(pid, signal.SIGSTOP)
                # One loop turn: ACKs that already lie in our sockets are no longer in flight.
                await asyncio.sleep(0)
                waiting = self._traffic.unacknowledged()
                backlog = self._probe.read()
                if (waiting and backlog.above_w) or last_try:
                    os.kill(pid, signal.SIGKILL)
                    break
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(TRY_EVERY_S)
        self.looking = False
        killed_at_ms = self._clock.monotonic_ms()
        recovered = await self._recovered(waiting, backlog)
        return Kill(
            role=role,
            process=process,
            unacknowledged_sends=len(waiting),
            dispatches_above_w=backlog.above_w,
            at_s=(killed_at_ms - self._started_ms) / 1000,
            recovery_ms=self._clock.monotonic_ms() - killed_at_ms if recovered else -1,
        )

    async def _recovered(self, waiting: frozenset[str], backlog: Backlog) -> bool:
        deadline_ms = self._clock.monotonic_ms() + RECOVERY_TIMEOUT_S * 1000
        while self._clock.monotonic_ms() < deadline_ms:
            done = self._probe.read().materialized
            arrived = all(now >= high - 1 for now, high in zip(done, backlog.high, strict=True))
            if arrived and not waiting & self._traffic.unacknowledged():
                return True
            await asyncio.sleep(_POLL_S)
        return False
