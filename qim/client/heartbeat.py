"""Adaptive heartbeat and link probes of one connection (§15.1.2, §15.1.4); pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qim.client.actions import Action, Disconnect, RequestIds, Transmit
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode

NEVER_MS: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOptions:
    """Appendix B values, ms; the server's `next_ping_interval_ms` is always an upper bound."""

    interval_initial_ms: int = 60_000
    interval_max_ms: int = 120_000
    step_ms: int = 30_000
    step_after_successes: int = 3
    backoff_factor: float = 0.8
    backoff_lock_ms: int = 1_800_000
    probe_timeout_ms: int = 3_000


class Heartbeat:
    """Pings when due; one probe after a missing PONG or an unanswered send; silence after a probe is a dead link.

    The learned interval outlives a connection, everything else is per connection.
    """

    __slots__ = (
        "_options", "_out", "_ids", "_interval_ms", "_good_interval_ms", "_server_interval_ms", "_successes",
        "_locked_until_ms", "_due_ms", "_waiting_ping_id", "_probe_sent_ms",
    )  # fmt: skip

    def __init__(self, options: HeartbeatOptions, out: list[Action], ids: RequestIds) -> None:
        self._options = options
        self._out = out
        self._ids = ids
        self._interval_ms = options.interval_initial_ms
        self._good_interval_ms = options.interval_initial_ms
        self._successes = 0
        self._locked_until_ms = 0
        self.stop()

    def start(self, server_interval_ms: int, now_ms: int) -> None:
        """The connection is authenticated; `server_interval_ms` 0 = no order."""
        self._server_interval_ms = server_interval_ms
        self._due_ms = now_ms + self.interval_ms()
        self._waiting_ping_id = 0
        self._probe_sent_ms = 0

    def stop(self) -> None:
        """No connection: no deadline."""
        self._server_interval_ms = 0
        self._due_ms = NEVER_MS
        self._waiting_ping_id = 0
        self._probe_sent_ms = 0

    def interval_ms(self) -> int:
        """The interval in force."""
        return min(self._interval_ms, self._server_interval_ms or self._interval_ms)

    def probe(self, now_ms: int, last_applied_mailbox_seq: int) -> None:
        """Ask whether the link still lives; at most one probe at a time."""
        if self._due_ms != NEVER_MS and not self._probe_sent_ms:
            self._probe_sent_ms = now_ms
            self._ping(now_ms, last_applied_mailbox_seq, probe=True)

    def on_pong(self, pong: pb.Pong, now_ms: int) -> None:
        """Any PONG proves the link; the one that was waited for makes the interval grow."""
        self._probe_sent_ms = 0
        if pong.next_ping_interval_ms:
            self._server_interval_ms = pong.next_ping_interval_ms
            self._due_ms = min(self._due_ms, now_ms + self.interval_ms())
        if pong.ping_id != self._waiting_ping_id:
            return
        self._waiting_ping_id = 0
        self._good_interval_ms = self._interval_ms
        self._successes += 1
        options = self._options
        if self._successes >= options.step_after_successes and now_ms >= self._locked_until_ms:
            self._successes = 0
            self._interval_ms = min(self._interval_ms + options.step_ms, options.interval_max_ms)

    def tick(self, now_ms: int, last_received_ms: int, last_applied_mailbox_seq: int) -> None:
        """Send what is due; `last_received_ms` is when the newest downstream frame came."""
        if self._probe_sent_ms:
            if last_received_ms > self._probe_sent_ms:
                self._probe_sent_ms = 0
            elif now_ms >= self._probe_sent_ms + self._options.probe_timeout_ms:
                self._out.append(Disconnect(reason="link_dead"))
                self.stop()
                return
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self.interval_ms()
        if self._waiting_ping_id:
            self._missed(now_ms)
            self.probe(now_ms, last_applied_mailbox_seq)
        else:
            self._waiting_ping_id = self._ping(now_ms, last_applied_mailbox_seq, probe=False)

    def next_deadline_ms(self) -> int:
        """When `tick` has something to do."""
        if self._probe_sent_ms:
            return min(self._due_ms, self._probe_sent_ms + self._options.probe_timeout_ms)
        return self._due_ms

    def _missed(self, now_ms: int) -> None:
        self._waiting_ping_id = 0
        self._successes = 0
        self._interval_ms = max(int(self._good_interval_ms * self._options.backoff_factor), 1)
        self._locked_until_ms = now_ms + self._options.backoff_lock_ms

    def _ping(self, now_ms: int, last_applied_mailbox_seq: int, *, probe: bool) -> int:
        ping_id = self._ids.next()
        ping = pb.Ping(
            ping_id=ping_id, client_time=now_ms, last_applied_mailbox_seq=last_applied_mailbox_seq, probe=probe
        )
        self._out.append(Transmit(opcode=Opcode.PING, message=ping, request_id=ping_id))
        return ping_id
