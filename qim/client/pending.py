"""Messages on their way out (DESIGN-data §3.5, §9): one FIFO per conversation, at most eight ahead of their ACKs.

A message that leaves while an earlier one is un-ACKed names it. The first retryable answer stops the conversation; when
nothing of it is in flight any more it starts again from the oldest un-ACKed message. Pending messages outlive
connections and processes, and are sent again only after the mailbox has been reconciled (ADR-0008).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from qim.client.actions import Action, LookThrough, RequestIds, SendFailed, Sent, Transmit
from qim.client.heartbeat import NEVER_MS
from qim.client.reconnect import jittered_ms
from qim.errors import RETRYABLE_SEND_CODES, Detail, ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode

_KNOWN_CODES: Final = frozenset(int(code) for code in ErrorCode)
AGED_OUT: Final = "aged_out"
"""Local detail of a message that exceeded `client_pending_max_age`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """Appendix B values and ours."""

    ahead_max: int = 8
    send_ack_timeout_ms: int = 3_000
    unanswered_max_ms: int = 10_000
    """An answer that does not come on a living link counts as a retryable refusal."""
    dedup_ttl_ms: int = 7_200_000
    pending_max_age_ms: int = 86_400_000
    send_retry_budget_ms: int = 60_000
    look_retry_ms: int = 5_000
    retry_default_ms: int = 1_000
    reorder_retry_ms: int = 50
    """First delay after `out_of_order` alone: its cause is already settled, only the link to it was stale."""


class Pending:
    """One unacknowledged message. `request` has neither request_id nor predecessor; both belong to one attempt."""

    __slots__ = ("request", "created_ms", "request_id", "sent_ms", "maybe_committed", "failover_since_ms")

    def __init__(self, request: pb.SendMessage, created_ms: int, *, maybe_committed: bool = False) -> None:
        self.request = request
        self.created_ms = created_ms
        self.request_id = 0
        """Of the attempt in flight, 0 = not in flight."""
        self.sent_ms = 0
        self.maybe_committed = maybe_committed
        self.failover_since_ms = 0


class _Line:
    """The FIFO of one conversation. While not `stopped`, what is in flight is a prefix of `queue`."""

    __slots__ = ("conversation_id", "queue", "in_flight", "stopped", "looking", "due_ms", "reorders")

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.queue: deque[Pending] = deque()
        self.in_flight = 0
        self.stopped = False
        self.looking = False
        self.due_ms = 0
        """Nothing leaves before this time."""
        self.reorders = 0
        """Rounds refused only by `out_of_order`, in a row."""


class SendQueue:
    """All lines of a device. Methods append to `out` what the driver must do."""

    __slots__ = (
        "_options", "_out", "_ids", "_random", "_lines", "_by_id", "_failed", "_in_flight", "_online", "_delayed",
        "_probed_id",
    )  # fmt: skip

    def __init__(
        self, options: SendOptions, out: list[Action], ids: RequestIds, random_unit: Callable[[], float]
    ) -> None:
        self._options = options
        self._out = out
        self._ids = ids
        self._random = random_unit
        self._lines: dict[str, _Line] = {}
        self._by_id: dict[str, Pending] = {}
        self._failed: dict[str, Pending] = {}
        self._in_flight: dict[int, Pending] = {}
        """By request id, oldest first."""
        self._online = False
        self._delayed: dict[str, None] = {}
        """Conversations waiting for their due time."""
        self._probed_id = 0

    # ------------------------------------------------------------------ the application's side

    def add(self, pending: Pending, now_ms: int) -> None:
        """Append to its conversation; the caller has stored it."""
        self._by_id[pending.request.client_message_id] = pending
        line = self._lines.get(pending.request.conversation_id)
        if line is None:
            line = self._lines[pending.request.conversation_id] = _Line(pending.request.conversation_id)
        line.queue.append(pending)
        self._pump(line, now_ms)

    def load(self, pending: Iterable[Pending], failed: Iterable[Pending]) -> None:
        """Take over what an earlier run left, in order; anything may have been committed."""
        for item in pending:
            item.maybe_committed = True
            self.add(item, 0)
        for item in failed:
            self._failed[item.request.client_message_id] = item

    def depth(self, conversation_id: str) -> int:
        """Unacknowledged messages of a conversation."""
        line = self._lines.get(conversation_id)
        return len(line.queue) if line else 0

    def total(self) -> int:
        """Unacknowledged messages of all conversations, failed ones not counted."""
        return len(self._by_id)

    def take_failed(self, client_message_id: str) -> Pending | None:
        """Remove a failed message so that the application can send it again."""
        return self._failed.pop(client_message_id, None)

    # ------------------------------------------------------------------ the connection's side

    def online(self, now_ms: int) -> None:
        """Synchronised: own entries have settled what they could; the rest leaves again (ADR-0008)."""
        self._online = True
        options = self._options
        for line in list(self._lines.values()):
            for pending in [p for p in line.queue if now_ms - p.created_ms > options.pending_max_age_ms]:
                self._fail(line, pending, 0, AGED_OUT, resendable=True)
            line.looking = any(p.maybe_committed and now_ms - p.created_ms > options.dedup_ttl_ms for p in line.queue)
            if line.looking:
                self._out.append(LookThrough(conversation_id=line.conversation_id))
            else:
                self._resume(line, now_ms)

    def offline(self) -> None:
        """The link is gone: what was in flight may or may not be committed."""
        self._online = False
        self._probed_id = 0
        self._delayed.clear()
        for pending in self._in_flight.values():
            pending.request_id = 0
            pending.maybe_committed = True
        self._in_flight.clear()
        for line in self._lines.values():
            line.in_flight = 0
            line.stopped = False
            line.looking = False

    def looked_through(self, conversation_id: str, own: dict[str, tuple[bytes, int]] | None, now_ms: int) -> None:
        """Result of a LookThrough: own client_message_id → coordinates, None when the page could not be read."""
        line = self._lines.get(conversation_id)
        if line is None or not line.looking:
            return
        if own is None:
            line.due_ms = now_ms + self._options.look_retry_ms
            self._delayed[conversation_id] = None
            return
        for pending in list(line.queue):
            found = own.get(pending.request.client_message_id)
            if found is not None:
                self._settle(pending, *found, room_seq=0, now_ms=now_ms)
        line.looking = False
        self._resume(line, now_ms)

    def on_ack(self, ack: pb.SendAck, now_ms: int) -> None:
        """COMMITTED."""
        pending = self._by_id.get(ack.client_message_id) or self._failed.get(ack.client_message_id)
        if pending is not None:
            self._settle(pending, ack.message_id, ack.conversation_seq, ack.room_seq, now_ms)

    def own_entry(self, client_message_id: str, message_id: bytes, conversation_seq: int, now_ms: int) -> None:
        """An own entry arrived: as good as an ACK, for a message shown as failed too."""
        pending = self._by_id.get(client_message_id) or self._failed.get(client_message_id)
        if pending is not None:
            self._settle(pending, message_id, conversation_seq, 0, now_ms)

    def on_error(self, error: pb.Error, request_id: int, now_ms: int) -> bool:
        """True when the error answers an attempt in flight."""
        pending = self._in_flight.get(request_id)
        if pending is None:
            return False
        line = self._landed(pending)
        code = int(error.code)
        retryable = code in RETRYABLE_SEND_CODES or code not in _KNOWN_CODES
        if retryable and not self._budget_spent(pending, error, now_ms):
            self._stop(line, pending, self._delay_ms(line, error), now_ms)
        else:
            self._fail(line, pending, code, error.detail, resendable=retryable)
        self._resume(line, now_ms)
        return True

    def tick(self, now_ms: int) -> bool:
        """Send what became due; True when an answer is overdue and the link should be probed."""
        for conversation_id in [c for c in self._delayed if now_ms >= self._lines[c].due_ms]:
            del self._delayed[conversation_id]
            line = self._lines[conversation_id]
            if line.looking:
                self._out.append(LookThrough(conversation_id=conversation_id))
            else:
                self._resume(line, now_ms)
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None:
            return False
        if now_ms >= oldest.sent_ms + self._options.unanswered_max_ms:
            line = self._landed(oldest)
            self._stop(line, oldest, 0, now_ms)
            self._resume(line, now_ms)
            return False
        if oldest.request_id != self._probed_id and now_ms >= oldest.sent_ms + self._options.send_ack_timeout_ms:
            self._probed_id = oldest.request_id
            return True
        return False

    def next_deadline_ms(self) -> int:
        """When `tick` has something to do."""
        deadline_ms = min((self._lines[c].due_ms for c in self._delayed), default=NEVER_MS)
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is None:
            return deadline_ms
        probed = oldest.request_id == self._probed_id
        wait_ms = self._options.unanswered_max_ms if probed else self._options.send_ack_timeout_ms
        return min(deadline_ms, oldest.sent_ms + wait_ms)

    # ------------------------------------------------------------------ one line

    def _pump(self, line: _Line, now_ms: int) -> None:
        """Send while fewer than `ahead_max` are un-ACKed in flight and nothing holds the line."""
        if not self._online or line.stopped or line.looking or not line.queue:
            return
        if now_ms < line.due_ms:
            self._delayed[line.conversation_id] = None
            return
        queue = line.queue
        last = min(len(queue), self._options.ahead_max)
        for index in range(line.in_flight, last):
            self._send(queue[index], queue[index - 1].request.client_message_id if index else "", now_ms)
        line.in_flight = max(line.in_flight, last)

    def _send(self, pending: Pending, predecessor_id: str, now_ms: int) -> None:
        request = pb.SendMessage()
        request.CopyFrom(pending.request)
        request.after_client_message_id = predecessor_id
        pending.request_id = request.request_id = self._ids.next()
        pending.sent_ms = now_ms
        self._in_flight[pending.request_id] = pending
        self._out.append(Transmit(opcode=Opcode.SEND_MESSAGE, message=request, request_id=pending.request_id))

    def _landed(self, pending: Pending) -> _Line:
        """The attempt of `pending` is over."""
        line = self._lines[pending.request.conversation_id]
        if pending.request_id:
            self._in_flight.pop(pending.request_id, None)
            pending.request_id = 0
            line.in_flight -= 1
        return line

    def _settle(self, pending: Pending, message_id: bytes, conversation_seq: int, room_seq: int, now_ms: int) -> None:
        client_message_id = pending.request.client_message_id
        self._out.append(
            Sent(request=pending.request, message_id=message_id, conversation_seq=conversation_seq, room_seq=room_seq)
        )
        if self._failed.pop(client_message_id, None) is not None:
            return
        line = self._landed(pending)
        self._forget(line, pending)
        line.reorders = 0
        self._resume(line, now_ms)

    def _stop(self, line: _Line, pending: Pending, delay_ms: int, now_ms: int) -> None:
        """First retryable answer: nothing more leaves until what is in flight has been answered."""
        pending.maybe_committed = True
        line.stopped = True
        line.due_ms = max(line.due_ms, now_ms + delay_ms)

    def _resume(self, line: _Line, now_ms: int) -> None:
        if line.stopped and line.in_flight == 0:
            line.stopped = False
        self._pump(line, now_ms)
        if not line.queue:
            self._lines.pop(line.conversation_id, None)
            self._delayed.pop(line.conversation_id, None)

    def _delay_ms(self, line: _Line, error: pb.Error) -> int:
        if error.detail == Detail.OUT_OF_ORDER:
            if line.stopped:
                return 0
            line.reorders += 1
            return int(min(self._options.reorder_retry_ms << min(line.reorders, 10), self._options.look_retry_ms))
        return int(jittered_ms(error.retry_after_ms or self._options.retry_default_ms, self._random))

    def _budget_spent(self, pending: Pending, error: pb.Error, now_ms: int) -> bool:
        """A region that stays away longer than `send_retry_budget` shows the message as failed, resendable."""
        if int(error.code) != ErrorCode.REGION_FAILOVER:
            pending.failover_since_ms = 0
            return False
        pending.failover_since_ms = pending.failover_since_ms or now_ms
        return now_ms - pending.failover_since_ms > self._options.send_retry_budget_ms

    def _fail(self, line: _Line, pending: Pending, code: int, detail: str, *, resendable: bool) -> None:
        self._forget(line, pending)
        client_message_id = pending.request.client_message_id
        self._failed[client_message_id] = pending
        self._out.append(
            SendFailed(client_message_id=client_message_id, code=code, detail=detail, resendable=resendable)
        )

    def _forget(self, line: _Line, pending: Pending) -> None:
        del self._by_id[pending.request.client_message_id]
        if line.queue[0] is pending:
            line.queue.popleft()
        else:
            line.queue.remove(pending)
