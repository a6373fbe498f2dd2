"""PULL_HISTORY: records of a conversation by `conversation_seq`, limited to what the requester may see (§9.5.3, §7.5).

The anchor itself belongs to a page of older messages; `newer` starts behind it, so that a page always moves on.
Messages come in ascending order. A conversation that is not the requester's is refused exactly like one that does not
exist (26.7.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final

from qim.core.ids import conversation_kind, direct_members, group_id_of
from qim.core.rate_limit import RateLimiter
from qim.core.visibility import FULL, Interval, visible_upper_bound
from qim.errors import ErrorCode, WireError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.qim_pb2 import NEWER, HistoryBatch, HistoryMessage, MediaMetadata, MessageRecord, PullHistory
from qim.runtime.clock import Clock
from qim.shard_workers.mailbox.bodies import SEQ_BUCKET_WIDTH, BodyReader
from qim.stores.api import ConversationHead, GroupMembership, MessageStore

log = get_logger(__name__)

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 200
BYTES_MAX: Final = 512 << 10
"""Soft: the first message of a page is always returned (ADR-0001)."""
EMPTY_BUCKET_SCAN_MAX: Final = 8
"""`history_max_empty_bucket_scan` (B.3)."""
RATE_PER_SECOND: Final = 5
"""`per_user_history_pull_rate` (B.5)."""


class HistoryReader:
    """Answers PULL_HISTORY from MessageStore and GroupMembership."""

    def __init__(
        self, store: MessageStore, membership: GroupMembership, bodies: BodyReader, clock: Clock, rate: RateLimiter
    ) -> None:
        self._store = store
        self._membership = membership
        self._bodies = bodies
        self._clock = clock
        self._rate = rate

    async def pull(self, tenant_id: str, user_id: str, pull: PullHistory) -> HistoryBatch:
        """One page. WireError: RATE_LIMITED, PERMISSION_DENIED. StoreError when something cannot be read."""
        now_ms = self._clock.monotonic_ms()
        wait_ms = self._rate.wait_ms((tenant_id, user_id), now_ms)
        if wait_ms:
            metrics.RATE_LIMIT_HIT_TOTAL.labels(tenant=tenant_id, dimension="history_pull").inc()
            raise WireError("history pulls too fast", code=ErrorCode.RATE_LIMITED, retry_after_ms=ceil(wait_ms))
        self._rate.take((tenant_id, user_id), now_ms)
        intervals = await self._intervals(tenant_id, user_id, pull.conversation_id)
        if not intervals:
            raise WireError("not a conversation of this user", code=ErrorCode.PERMISSION_DENIED)
        head = await self._store.head(tenant_id, pull.conversation_id)
        newer = pull.direction == NEWER
        seqs = visible_seqs(intervals, head, pull.anchor_conversation_seq, newer=newer)
        limit = min(pull.limit or LIMIT_DEFAULT, LIMIT_MAX)
        records, more = await self._collect(tenant_id, pull.conversation_id, seqs, limit)
        messages = await self._messages(tenant_id, user_id, pull.conversation_id, records)
        kept = _within_bytes(messages, min(pull.max_bytes or BYTES_MAX, BYTES_MAX))
        return HistoryBatch(
            conversation_id=pull.conversation_id,
            messages=kept if newer else reversed(kept),
            latest_conversation_seq=visible_upper_bound(intervals, head.latest_conversation_seq),
            earliest_available_conversation_seq=_lower_bound(intervals, head),
            has_more=more or len(kept) < len(messages),
        )

    async def _intervals(self, tenant_id: str, user_id: str, conversation_id: str) -> tuple[Interval, ...]:
        kind = conversation_kind(conversation_id)
        if kind == "direct":
            return FULL if user_id in direct_members(conversation_id) else ()
        if kind == "group":
            return await self._membership.intervals(tenant_id, group_id_of(conversation_id), user_id)
        return ()

    async def _collect(
        self, tenant_id: str, conversation_id: str, seqs: Iterator[int], limit: int
    ) -> tuple[list[tuple[int, MessageRecord]], bool]:
        """Up to `limit` records in the order of `seqs`, and whether `seqs` goes on behind them."""
        found: list[tuple[int, MessageRecord]] = []
        empty_buckets: set[int] = set()
        following = next(seqs, None)
        while following is not None and len(found) < limit:
            wanted: list[int] = []
            while following is not None and len(wanted) < limit - len(found):
                wanted.append(following)
                following = next(seqs, None)
            records = await self._bodies.records(tenant_id, conversation_id, wanted)
            present = [(seq, record) for seq in wanted if (record := records[seq]) is not None]
            found += present
            if present:
                empty_buckets.clear()
                continue
            empty_buckets.update(seq // SEQ_BUCKET_WIDTH for seq in wanted)
            if len(empty_buckets) > EMPTY_BUCKET_SCAN_MAX:
                metrics.HISTORY_EMPTY_SCAN_EXCEEDED_TOTAL.inc()
                log.error("history_scan_exceeded", tenant_id=tenant_id, conversation_id=conversation_id)
                return found, False
        return found, following is not None

    async def _messages(
        self, tenant_id: str, user_id: str, conversation_id: str, records: Sequence[tuple[int, MessageRecord]]
    ) -> list[HistoryMessage]:
        opened = await self._bodies.open_records(tenant_id, conversation_id, [record for _, record in records])
        return [_message(seq, record, opened[record.message_id], user_id) for seq, record in records]


def visible_seqs(intervals: Sequence[Interval], head: ConversationHead, anchor: int, *, newer: bool) -> Iterator[int]:
    """Sequences the member may read, from the anchor on; anchor 0 with `older` means the newest page."""
    low, high = head.earliest_available_conversation_seq, head.latest_conversation_seq
    if newer:
        low = max(low, anchor + 1)
    elif anchor:
        high = min(high, anchor)
    spans = [range(max(low, interval.joined_at + 1), min(high, interval.left_at - 1) + 1) for interval in intervals]
    if newer:
        for span in spans:
            yield from span
    else:
        for span in reversed(spans):
            yield from reversed(span)


def _lower_bound(intervals: Sequence[Interval], head: ConversationHead) -> int:
    return max(head.earliest_available_conversation_seq, intervals[0].joined_at + 1)


def _within_bytes(messages: list[HistoryMessage], max_bytes: int) -> list[HistoryMessage]:
    total = 0
    for at, message in enumerate(messages):
        total += message.ByteSize()
        if total > max_bytes and at:
            return messages[:at]
    return messages


def _message(
    seq: int, record: MessageRecord, body: tuple[bytes, MediaMetadata | None] | None, user_id: str
) -> HistoryMessage:
    """The record as its reader may see it: `client_message_id` in the sender's own history only (§8.4)."""
    message = HistoryMessage(
        conversation_seq=seq,
        message_id=record.message_id,
        last_activity_id=record.message_id,
        sender_id=record.sender_id,
        client_message_id=record.client_message_id if record.sender_id == user_id else "",
        message_type=record.message_type,
        custom_type=record.custom_type,
        schema_version=record.schema_version,
        reply_to_conversation_seq=record.reply_to_conversation_seq,
        mention_targets=record.mention_targets if record.HasField("mention_targets") else None,
        state=record.state,
        recall_event_conversation_seq=record.recall_event_conversation_seq,
        edited_at_activity_id=record.edited_at_activity_id,
        created_at=record.created_at,
        retention_class=record.retention_class,
        event_type=record.event_type,
    )
    if body is not None:
        message.body_included = True
        message.payload_or_ciphertext = body[0]
        if body[1] is not None:
            message.media_metadata.CopyFrom(body[1])
    return message
