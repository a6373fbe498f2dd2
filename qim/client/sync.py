"""Login sync and the cursor (§9.3, §9.4, §6.8): a pure machine; the cursor moves by contiguous MAILBOX_BATCH only.

    OFFLINE ─connected→ AUTHENTICATING ─AUTH_OK→ PULLING ─all ranges cover sync_to_seq→ COMPLETING ─ONLINE_READY→ LIVE

LIVE has one side state, `dirty` (§9.4.4): pushes are staged until a pull covers everything below the oldest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from qim.client.actions import (
    Action,
    Apply,
    Cursor,
    Disconnect,
    PreferEndpoint,
    PullFinished,
    Ready,
    Rebuild,
    Refresh,
    RequestIds,
    Transmit,
)
from qim.client.dedup import DedupWindow
from qim.client.heartbeat import NEVER_MS
from qim.client.reconnect import jittered_ms
from qim.client.timeline import KNOWN_EVENT_TYPES, MessageRow, row_from_entry
from qim.core.coverage import CoverageTracker, split_range
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.entry import ORDINAL_CONTROL
from qim.protocol.opcodes import Opcode

_TRY_LATER: Final = frozenset(
    (ErrorCode.RATE_LIMITED, ErrorCode.SHARD_MOVED, ErrorCode.REGION_FAILOVER, ErrorCode.CLOCK_UNSAFE)
)
"""A pull is repeated after them; a renewal has already done its work at the gateway."""
RETRY_DEFAULT_MS: Final = 1000
"""Base of a retry when the server named none."""
PULL_FAILURES_MAX: Final = 5
"""Refusals or silences of one range before the connection is given up."""
REAUTH_MAX: Final = 4
"""AUTH frames on one connection: a cursor is mended at most three times before reconnecting."""
SYNC_RETRIES_MAX: Final = 3
RESYNC_MARGIN_MS: Final = 250
"""Two pulls may arrive closer together than they left; the server measures arrivals."""
STAGED_ENTRIES_MAX: Final = 8000
"""Overflow act: drop the staged entries and pull them instead."""


class Phase(Enum):
    OFFLINE = "offline"
    AUTHENTICATING = "authenticating"
    PULLING = "pulling"
    COMPLETING = "completing"
    LIVE = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """Appendix B values."""

    device_id: str
    client_version: str
    capabilities: int = 0
    pull_window: int = 4
    pull_max_items: int = 500
    pull_max_bytes: int = 512 << 10
    pull_timeout_ms: int = 10_000
    """An unanswered pull is asked again: the server ignores what comes too fast instead of refusing it (§20.4.1)."""
    answer_timeout_ms: int = 10_000
    """Bound of AUTH and SYNC_COMPLETE; the connection is given up after it."""
    resync_min_interval_ms: int = 5_000


class SyncCounters:
    """What must stay zero, and what tests and support want to know."""

    __slots__ = (
        "cursor_moved_by_push", "duplicates_dropped", "entries_applied", "pulls_sent", "staged_dropped",
        "stale_batches", "unknown_event_skipped", "unknown_opcode_dropped",
    )  # fmt: skip

    def __init__(self) -> None:
        self.cursor_moved_by_push = 0
        self.duplicates_dropped = 0
        self.entries_applied = 0
        self.pulls_sent = 0
        self.staged_dropped = 0
        self.stale_batches = 0
        self.unknown_event_skipped = 0
        self.unknown_opcode_dropped = 0


class _Range:
    """A sub-range being pulled, serially: `after_seq` moves with `covered_through_seq`."""

    __slots__ = ("after_seq", "up_to_seq", "due_ms", "failures")

    def __init__(self, after_seq: int, up_to_seq: int, due_ms: int) -> None:
        self.after_seq = after_seq
        self.up_to_seq = up_to_seq
        self.due_ms = due_ms
        self.failures = 0


OwnEntry = Callable[[str, bytes, int, int], None]
"""Called with (client_message_id, message_id, conversation_seq, now_ms) of an own entry, before it is applied."""


class SyncState:
    """One device's mailbox position across connections. Methods append to `out` what the driver must do."""

    __slots__ = (
        "phase", "cursor", "dirty", "sync_to_seq", "counters", "session_epoch", "_options", "_out", "_ids", "_dedup",
        "_random", "_own_entry", "_token", "_auth_id", "_auth_tries", "_answer_due_ms", "_complete_id", "_start_seq",
        "_tracker", "_in_flight", "_waiting", "_staged", "_sync_retries", "_resync_due_ms", "_resynced_ms",
    )  # fmt: skip

    def __init__(
        self,
        options: SyncOptions,
        cursor: Cursor,
        dedup: DedupWindow,
        out: list[Action],
        ids: RequestIds,
        random_unit: Callable[[], float],
        own_entry: OwnEntry,
    ) -> None:
        self._options = options
        self._out = out
        self._ids = ids
        self._dedup = dedup
        self._random = random_unit
        self._own_entry = own_entry
        self.cursor = cursor
        self.counters = SyncCounters()
        self.session_epoch = 0
        self.sync_to_seq = 0
        self._token = ""
        self._resynced_ms = -NEVER_MS
        self._reset()

    def _reset(self) -> None:
        self.phase = Phase.OFFLINE
        self.dirty = False
        self._auth_id = 0
        self._auth_tries = 0
        self._answer_due_ms = NEVER_MS
        self._complete_id = 0
        self._start_seq = self.cursor.last_applied_mailbox_seq
        self._tracker = CoverageTracker(self._start_seq)
        self._in_flight: dict[int, _Range] = {}
        self._waiting: list[_Range] = []
        self._staged: list[pb.Entry] = []
        self._sync_retries = 0
        self._resync_due_ms = NEVER_MS

    @property
    def pulling(self) -> bool:
        """True while a pull is in flight or waits for its retry."""
        return bool(self._in_flight or self._waiting)

    # ------------------------------------------------------------------ connection

    def connected(self, access_token: str, now_ms: int) -> None:
        """The transport is up: authenticate."""
        self._reset()
        self._token = access_token
        self.phase = Phase.AUTHENTICATING
        self._authenticate(now_ms)

    def disconnected(self) -> None:
        """The transport is gone: staged pushes go with it, the next login pulls them."""
        self._reset()

    def renew(self, access_token: str, now_ms: int) -> None:
        """Silent renewal on the live connection (§15.3.1); nothing else changes."""
        if self.phase is Phase.LIVE:
            self._token = access_token
            self._auth_tries = 0
            self._authenticate(now_ms)

    def on_auth_ok(self, ok: pb.AuthOk, request_id: int, now_ms: int) -> None:
        """Login accepted, or a renewal answered."""
        if request_id != self._auth_id:
            return
        self._auth_id = 0
        self._answer_due_ms = NEVER_MS
        if ok.mailbox_cursor.token:
            self.cursor = Cursor(ok.mailbox_cursor.token, self.cursor.last_applied_mailbox_seq, ok.lane_id)
            self._save_cursor()
        if ok.preferred_endpoint:
            self._out.append(PreferEndpoint(endpoint=ok.preferred_endpoint))
        if self.phase is Phase.LIVE:
            if ok.has_offline:
                self._want_pull(now_ms)
            return
        self.session_epoch = ok.session_epoch
        self.sync_to_seq = ok.sync_to_seq
        self._start_seq = self.cursor.last_applied_mailbox_seq
        if ok.has_offline:
            self.phase = Phase.PULLING
            self._pull_session(ok.pending_entry_count_hint, now_ms + ok.sync_delay_hint_ms, now_ms)
        else:
            self._complete(now_ms)

    def on_ready(self, now_ms: int) -> None:
        """ONLINE_READY: pushes apply from here on."""
        if self.phase is not Phase.COMPLETING:
            return
        self.phase = Phase.LIVE
        self._answer_due_ms = NEVER_MS
        self._out.append(Ready())
        if self.dirty:
            self._want_pull(now_ms)
        elif self._staged:
            self._merge_staged(now_ms)

    # ------------------------------------------------------------------ entries

    def on_batch(self, batch: pb.MailboxBatch, request_id: int, now_ms: int) -> None:
        """The only thing that advances the cursor (§9.4.3)."""
        pull = self._in_flight.pop(request_id, None)
        if pull is None:
            self.counters.stale_batches += 1
            return
        covered = batch.covered_through_seq
        stuck = batch.has_more and covered <= pull.after_seq
        if covered < pull.after_seq or stuck or (pull.up_to_seq and covered > pull.up_to_seq):
            self._out.append(Disconnect(reason="protocol_violation"))
            return
        rows, dedup = self._admit(batch.entries, now_ms)
        self._tracker.add(pull.after_seq, covered)
        reached = self._tracker.covered_through()
        moved = reached > self.cursor.last_applied_mailbox_seq
        if moved:
            self.cursor = self.cursor._replace(last_applied_mailbox_seq=reached)
        if rows or moved:
            self._out.append(Apply(rows=rows, dedup=dedup, cursor=self.cursor if moved else None, durable=True))
        if batch.has_more:
            pull.after_seq = covered
            pull.up_to_seq = pull.up_to_seq or batch.lane_watermark
            pull.failures = 0
            self._send_pull(pull, now_ms)
        if self.phase is Phase.LIVE:
            self._after_live_batch(covered, batch.has_more, now_ms)
        elif self.phase is Phase.PULLING and not self.pulling:
            self._complete(now_ms)

    def on_push(self, push: pb.PushEvents, now_ms: int) -> None:
        """Real-time entries: shown at once when live and clean, staged otherwise; the cursor stays (§9.4.3)."""
        before = self.cursor
        if self.phase is not Phase.LIVE or self.dirty:
            self._stage(push.events, now_ms)
        else:
            rows, dedup = self._admit(push.events, now_ms)
            if rows:
                self._out.append(Apply(rows=rows, dedup=dedup))
        if self.cursor is not before:
            self.counters.cursor_moved_by_push += 1
            self.cursor = before

    def _admit(
        self, entries: Iterable[pb.Entry], now_ms: int
    ) -> tuple[list[MessageRow], list[tuple[int, int, int, bytes]]]:
        """Rows of the entries not seen before; own entries settle their pending message first."""
        rows: list[MessageRow] = []
        dedup: list[tuple[int, int, int, bytes]] = []
        refresh: dict[str, list[int]] = {}
        admit = self._dedup.admit
        for entry in entries:
            if entry.client_message_id:
                self._own_entry(entry.client_message_id, entry.message_id, entry.conversation_seq, now_ms)
            key = (entry.mailbox_seq, entry.event_ordinal, entry.event_id, entry.message_id)
            if not admit(*key, now_ms):
                self.counters.duplicates_dropped += 1
                continue
            dedup.append(key)
            if entry.event_type not in KNOWN_EVENT_TYPES:
                self.counters.unknown_event_skipped += 1
            elif entry.event_ordinal == ORDINAL_CONTROL and entry.target_conversation_seq:
                refresh.setdefault(entry.conversation_id, []).append(entry.target_conversation_seq)
            else:
                rows.append(row_from_entry(entry))
                if not entry.body_included:
                    refresh.setdefault(entry.conversation_id, []).append(entry.conversation_seq)
        self.counters.entries_applied += len(rows)
        for conversation_id, seqs in refresh.items():
            self._out.append(Refresh(conversation_id=conversation_id, conversation_seqs=seqs))
        return rows, dedup

    def _stage(self, events: Iterable[pb.Entry], now_ms: int) -> None:
        self._staged.extend(events)
        if len(self._staged) > STAGED_ENTRIES_MAX:
            self.counters.staged_dropped += len(self._staged)
            self._staged.clear()
            self.on_dirty(now_ms)

    def _merge_staged(self, now_ms: int) -> None:
        staged, self._staged = self._staged, []
        rows, dedup = self._admit(staged, now_ms)
        if rows:
            self._out.append(Apply(rows=rows, dedup=dedup))

    # ------------------------------------------------------------------ live pulls

    def on_dirty(self, now_ms: int) -> None:
        """The server dropped pushes of this connection (§9.4.4)."""
        self.dirty = True
        if self.phase is Phase.LIVE:
            self._want_pull(now_ms)

    def on_pong(self, pong: pb.Pong, now_ms: int) -> None:
        """The two server-given reasons to pull (§15.1.1); a watermark is never compared."""
        if pong.mailbox_dirty:
            self.on_dirty(now_ms)
        elif (
            self.phase is Phase.LIVE
            and pong.last_pushed_user_seq > self.cursor.last_applied_mailbox_seq
            and not self.pulling
        ):
            self._want_pull(now_ms)

    def resync(self, now_ms: int) -> None:
        """The user asks for the newest state; at most one such pull in `resync_min_interval_ms`."""
        if self.phase is Phase.LIVE:
            self._want_pull(now_ms)

    def _want_pull(self, now_ms: int) -> None:
        """At most one pull at a time and one start per interval; a wish during a pull is met by one after it."""
        due_ms = max(now_ms, self._resynced_ms + self._options.resync_min_interval_ms + RESYNC_MARGIN_MS)
        self._resync_due_ms = min(self._resync_due_ms, due_ms)
        self._start_resync(now_ms)

    def _start_resync(self, now_ms: int) -> None:
        if self.phase is Phase.LIVE and now_ms >= self._resync_due_ms and not self.pulling:
            self._resync_due_ms = NEVER_MS
            self._resynced_ms = now_ms
            after_seq = self.cursor.last_applied_mailbox_seq
            self._tracker = CoverageTracker(after_seq)
            self._send_pull(_Range(after_seq, 0, now_ms), now_ms)

    def _after_live_batch(self, covered: int, has_more: bool, now_ms: int) -> None:
        if self.dirty:
            lowest = min((entry.mailbox_seq for entry in self._staged), default=0)
            if (lowest and covered >= lowest - 1) or (not lowest and not has_more):
                self.dirty = False
                self._merge_staged(now_ms)
            elif not has_more:
                self._want_pull(now_ms)
        if not has_more:
            self._out.append(PullFinished(covered_through_seq=covered))
            self._start_resync(now_ms)

    # ------------------------------------------------------------------ errors and time

    def on_error(self, error: pb.Error, request_id: int, now_ms: int) -> bool:
        """True when the error answers something of this machine, or concerns the connection."""
        unnamed = request_id == 0 and self.phase is Phase.AUTHENTICATING
        if unnamed or (request_id and request_id == self._auth_id):
            self._auth_id = 0
            self._answer_due_ms = NEVER_MS
            self._auth_refused(error, now_ms)
        elif request_id in self._in_flight:
            self._pull_refused(self._in_flight.pop(request_id), error, now_ms)
        elif request_id and request_id == self._complete_id:
            self._complete_refused(error, now_ms)
        elif request_id == 0:
            self._connection_error(error, now_ms)
        else:
            return False
        return True

    def tick(self, now_ms: int) -> None:
        """Start what is due, ask again what went unanswered."""
        if now_ms >= self._answer_due_ms:
            self._answer_due_ms = NEVER_MS
            self._out.append(Disconnect(reason="no_answer"))
            return
        silent = [request_id for request_id, pull in self._in_flight.items() if now_ms >= pull.due_ms]
        for request_id in silent:
            self._try_later(self._in_flight.pop(request_id), 0, now_ms)
        if self._waiting:
            due = [pull for pull in self._waiting if now_ms >= pull.due_ms]
            self._waiting = [pull for pull in self._waiting if now_ms < pull.due_ms]
            for pull in due:
                self._send_pull(pull, now_ms)
        self._start_resync(now_ms)

    def next_deadline_ms(self) -> int:
        """When `tick` has something to do."""
        deadline_ms = min(self._answer_due_ms, NEVER_MS if self.pulling else self._resync_due_ms)
        for pull in self._in_flight.values():
            deadline_ms = min(deadline_ms, pull.due_ms)
        for pull in self._waiting:
            deadline_ms = min(deadline_ms, pull.due_ms)
        return deadline_ms

    def _authenticate(self, now_ms: int) -> None:
        self._auth_tries += 1
        if self._auth_tries > REAUTH_MAX:
            self._out.append(Disconnect(reason="auth_loop"))
            return
        self._auth_id = self._ids.next()
        self._answer_due_ms = now_ms + self._options.answer_timeout_ms
        auth = pb.Auth(
            access_token=self._token,
            device_id=self._options.device_id,
            client_version=self._options.client_version,
            capabilities=self._options.capabilities,
            mailbox_cursor=pb.MailboxCursorToken(
                token=self.cursor.token, last_applied_mailbox_seq=self.cursor.last_applied_mailbox_seq
            ),
        )
        self._out.append(Transmit(opcode=Opcode.AUTH, message=auth, request_id=self._auth_id))

    def _auth_refused(self, error: pb.Error, now_ms: int) -> None:
        code = int(error.code)
        if code == ErrorCode.CURSOR_REBASED:
            self._rebase(error)
            self._authenticate(now_ms)
        elif code in (ErrorCode.CURSOR_INVALID, ErrorCode.CURSOR_EXPIRED):
            self._forget_cursor(expired=code == ErrorCode.CURSOR_EXPIRED)
            self._authenticate(now_ms)
        elif self.phase is not Phase.LIVE or code not in _TRY_LATER:
            self._connection_error(error, now_ms)

    def _pull_refused(self, pull: _Range, error: pb.Error, now_ms: int) -> None:
        code = int(error.code)
        if code == ErrorCode.CURSOR_REBASED:
            self._rebase(error)
            pull.failures += 1
            self._try_later(pull, 0, now_ms)
        elif code in (ErrorCode.CURSOR_INVALID, ErrorCode.CURSOR_EXPIRED):
            self._forget_cursor(expired=code == ErrorCode.CURSOR_EXPIRED)
            self._out.append(Disconnect(reason="cursor_refused", retry_after_ms=0))
        elif code in _TRY_LATER:
            self._try_later(pull, error.retry_after_ms or RETRY_DEFAULT_MS, now_ms)
        else:
            self._connection_error(error, now_ms)

    def _complete_refused(self, error: pb.Error, now_ms: int) -> None:
        """SYNC_INCOMPLETE: the barrier stays; the whole range of the session is pulled once more (§9.3.4)."""
        self._complete_id = 0
        self._answer_due_ms = NEVER_MS
        self._sync_retries += 1
        if int(error.code) != ErrorCode.SYNC_INCOMPLETE or self._sync_retries > SYNC_RETRIES_MAX:
            self._connection_error(error, now_ms)
            return
        self.phase = Phase.PULLING
        self._pull_session(0, now_ms, now_ms)

    def _connection_error(self, error: pb.Error, now_ms: int) -> None:
        code = int(error.code)
        if code == ErrorCode.MAILBOX_DIRTY:
            self.on_dirty(now_ms)
            return
        name = ErrorCode(code).name if code in ErrorCode.__members__.values() else f"error_{code}"
        retry_after_ms = error.retry_after_ms or None
        final = self.phase is Phase.AUTHENTICATING and code == ErrorCode.PERMISSION_DENIED
        revoked = code == ErrorCode.TOKEN_REVOKED
        self._out.append(
            Disconnect(
                reason=name.lower(),
                retry_after_ms=retry_after_ms,
                final=final or revoked or (code == ErrorCode.UPGRADE_REQUIRED and self.phase is Phase.AUTHENTICATING),
                wipe=revoked,
                refresh_token=code == ErrorCode.TOKEN_EXPIRED,
            )
        )

    def _rebase(self, error: pb.Error) -> None:
        """Another epoch signs the same position; replay starts where the server says, never later (§5.5.3)."""
        position = min(self.cursor.last_applied_mailbox_seq, error.replay_from_seq)
        self.cursor = Cursor(error.new_cursor.token, position, self.cursor.lane_id)
        self._save_cursor()

    def _forget_cursor(self, *, expired: bool) -> None:
        """Start from the empty cursor; messages stay, their keys drop what comes again."""
        self.cursor = Cursor()
        if expired:
            self._out.append(Rebuild())
        self._save_cursor()

    def _save_cursor(self) -> None:
        self._out.append(Apply(rows=[], dedup=[], cursor=self.cursor, durable=True))

    # ------------------------------------------------------------------ pulls

    def _pull_session(self, entry_count_hint: int, due_ms: int, now_ms: int) -> None:
        """Pull (start, sync_to_seq] in at most `pull_window` ranges; a backlog that fits one page needs one."""
        options = self._options
        pages = -(-entry_count_hint // options.pull_max_items) or options.pull_window
        ranges = split_range(self._start_seq, self.sync_to_seq, min(pages, options.pull_window))
        self._tracker = CoverageTracker(self._start_seq)
        self._waiting = [_Range(low, high, due_ms) for low, high in ranges]
        if not self._waiting:
            self._complete(now_ms)
        self.tick(now_ms)

    def _send_pull(self, pull: _Range, now_ms: int) -> None:
        request_id = self._ids.next()
        pull.due_ms = now_ms + self._options.pull_timeout_ms
        self._in_flight[request_id] = pull
        self.counters.pulls_sent += 1
        message = pb.PullMailbox(
            after_seq=pull.after_seq,
            up_to_seq=pull.up_to_seq,
            max_items=self._options.pull_max_items,
            max_bytes=self._options.pull_max_bytes,
            acked_seq=self.cursor.last_applied_mailbox_seq,
        )
        self._out.append(Transmit(opcode=Opcode.PULL_MAILBOX, message=message, request_id=request_id))

    def _try_later(self, pull: _Range, retry_after_ms: int, now_ms: int) -> None:
        pull.failures += 1
        if pull.failures >= PULL_FAILURES_MAX:
            self._out.append(Disconnect(reason="pull_failed", retry_after_ms=retry_after_ms or None))
            return
        pull.due_ms = now_ms + int(jittered_ms(retry_after_ms, self._random))
        self._waiting.append(pull)

    def _complete(self, now_ms: int) -> None:
        self.phase = Phase.COMPLETING
        self._answer_due_ms = now_ms + self._options.answer_timeout_ms
        self._complete_id = self._ids.next()
        message = pb.SyncComplete(sync_to_seq=self.sync_to_seq)
        self._out.append(Transmit(opcode=Opcode.SYNC_COMPLETE, message=message, request_id=self._complete_id))
