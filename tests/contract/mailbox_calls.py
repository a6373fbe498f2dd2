"""Append calls and ranges for the MailboxStore suites."""

from __future__ import annotations

from collections.abc import Sequence

from qim.core.seq import LaneVector, mailbox_seq
from qim.runtime.clock import SystemClock
from qim.stores.api import AppendCall, ChunkAppend, MailboxStore, RangePage, RangeRequest, Watermarks

TENANT = "t1"
SHARD = 3
EPOCH = 5
GRANT = "grant-a"
LANES = 64
LANE = 7
CHUNK = 100
DAY_MS = 86_400_000
DM = "dm:ann:bob"
REF = b"r" * 46
EVERYTHING = (1 << 63) - 1


def unix_ms() -> int:
    return SystemClock().unix_ms()


def chunk(
    offset: int,
    users: Sequence[str],
    *,
    epoch: int = EPOCH,
    lane: int = LANE,
    index: int = 0,
    count: int = 1,
    size: int = CHUNK,
    lanes: Sequence[tuple[int, int]] = (),
    created_at_ms: int | None = None,
    conversation_id: str = DM,
    common: bytes | Sequence[bytes] = b"common",
    ordinals: Sequence[int] = (0,),
    event: bytes = b"",
) -> ChunkAppend:
    """Chunk `index` of the dispatch at `offset`: one entry per user and ordinal. `lanes` = (lane, users of it) when
    they are on several."""
    return ChunkAppend(
        log_offset=offset,
        lanes=[(number, users * len(ordinals)) for number, users in lanes] or [(lane, len(users) * len(ordinals))],
        chunk_index=index,
        chunk_count=count,
        chunk_size=size,
        mailbox_seq=mailbox_seq(epoch, offset),
        tenant_id=TENANT,
        conversation_id=conversation_id,
        created_at_ms=unix_ms() if created_at_ms is None else created_at_ms,
        common=common,
        recipients=[
            (user, ordinal, event or offset.to_bytes(7, "big") + bytes((ordinal,)), REF)
            for user in users
            for ordinal in ordinals
        ],
    )


def zero() -> LaneVector:
    return LaneVector.zero(LANES)


def moved(previous: LaneVector, offset: int, *, lanes: Sequence[int] = (LANE,), epoch: int = EPOCH) -> LaneVector:
    return previous.advanced({lane: mailbox_seq(epoch, offset) for lane in lanes})


def append(
    *items: ChunkAppend,
    previous: LaneVector | None = None,
    new: LaneVector | None = None,
    required: Sequence[tuple[int, int, int]] = (),
    epoch: int = EPOCH,
    fold: bytes | None = None,
    fold_offset: int = -1,
) -> AppendCall:
    """A call; W moves only if `new` is given. `required` = (offset, lane, chunk_count)."""
    watermarks = None
    if new is not None:
        watermarks = Watermarks(
            previous=previous or zero(),
            new=new,
            required=[(offset, 1 << lane, count) for offset, lane, count in required],
        )
    return AppendCall(
        shard=SHARD,
        shard_epoch=epoch,
        tenant_items=list(items),
        watermarks=watermarks,
        fold=fold,
        fold_offset=fold_offset,
    )


def span(
    user: str,
    after_seq: int = 0,
    up_to_seq: int = EVERYTHING,
    *,
    epoch: int = EPOCH,
    lane: int = LANE,
    max_items: int = 500,
    max_bytes: int = 1 << 19,
) -> RangeRequest:
    return RangeRequest(
        tenant_id=TENANT,
        user_id=user,
        shard=SHARD,
        shard_epoch=epoch,
        lane=lane,
        after_seq=after_seq,
        up_to_seq=up_to_seq,
        max_items=max_items,
        max_bytes=max_bytes,
    )


async def seqs(store: MailboxStore, user: str, **bounds: int) -> list[int]:
    """mailbox_seq of everything a user has in a range."""
    return [row.mailbox_seq for row in (await store.range_scan(span(user, **bounds))).rows]


async def offsets(store: MailboxStore, user: str, **bounds: int) -> list[int]:
    return [seq & (1 << 48) - 1 for seq in await seqs(store, user, **bounds)]


def identities(page: RangePage) -> list[tuple[int, int, bytes]]:
    return [(row.mailbox_seq, row.event_ordinal, row.event_id) for row in page.rows]
