"""PULL_MAILBOX: one range of one user's mailbox, cut at event groups, joined with its bodies (§9.3, 4.2 of the frames).

The answer is made by concatenation: an entry on the wire is the stored one without its body at rest, followed by the
body. What is covered depends on the references alone, never on bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qim.core.coverage import cut_page
from qim.obs import metrics
from qim.protocol.entry import varint
from qim.protocol.header import MAX_FRAME_BYTES
from qim.protocol.qim_pb2 import CURSOR_INVALID, Error, MailboxPullReply, PullMailbox
from qim.shard_workers.mailbox.bodies import NOT_INCLUDED, Body, BodyReader
from qim.shard_workers.mailbox.session import expired
from qim.stores.api import MailboxStore, RangePage, RangeRequest

PULL_ITEMS_MAX: Final = 500
"""`pull_mailbox_max_items` (B.3), soft: an event group is never cut."""
PULL_BYTES_MAX: Final = 512 << 10
"""`pull_mailbox_max_bytes` (B.3), soft, counted in stored bytes."""
GROUP_BYTES_MAX: Final = 8 << 10
"""`mailbox_event_group_max_bytes` (B.2): so much more is scanned that a whole group always fits."""
BATCH_BYTES_MAX: Final = MAX_FRAME_BYTES - 1024
"""Room for entries in a frame; bodies beyond it are left out (cause 3 of `body_included=false`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Whose mailbox is read, where it lies, and the W of its lane that clients may see."""

    tenant_id: str
    user_id: str
    shard: int
    shard_epoch: int
    lane: int
    watermark: int


class MailboxPuller:
    """Answers PULL_MAILBOX from the store; holds nothing."""

    def __init__(self, store: MailboxStore, bodies: BodyReader) -> None:
        self._store = store
        self._bodies = bodies

    async def pull(self, reader: Reader, pull: PullMailbox, *, zero_cursor: bool) -> MailboxPullReply:
        """The batch, or CURSOR_INVALID / CURSOR_EXPIRED. StoreError when the store or a body cannot be read.

        `up_to_seq` 0 means the current W (26.1.4). One above W is answered as far as W, with more to come;
        CURSOR_INVALID when nothing of it lies below W (26.1.3). A session that started with a zero cursor is never
        expired.
        """
        asked_up_to_seq = pull.up_to_seq or reader.watermark
        up_to_seq = min(asked_up_to_seq, reader.watermark)
        is_beyond = asked_up_to_seq > up_to_seq and pull.after_seq >= up_to_seq
        if is_beyond or pull.after_seq > up_to_seq or pull.acked_seq > reader.watermark:
            return MailboxPullReply(error=Error(code=CURSOR_INVALID))
        max_items = min(pull.max_items or PULL_ITEMS_MAX, PULL_ITEMS_MAX)
        max_bytes = min(pull.max_bytes or PULL_BYTES_MAX, PULL_BYTES_MAX)
        page = await self._store.range_scan(
            RangeRequest(
                tenant_id=reader.tenant_id,
                user_id=reader.user_id,
                shard=reader.shard,
                shard_epoch=reader.shard_epoch,
                lane=reader.lane,
                after_seq=pull.after_seq,
                up_to_seq=up_to_seq,
                max_items=max_items,
                max_bytes=max_bytes + GROUP_BYTES_MAX,
            )
        )
        _observe(page)
        if not zero_cursor and pull.after_seq and pull.after_seq < page.effective_trim:
            return MailboxPullReply(error=expired(page.effective_trim))
        cut = cut_page(
            [row.mailbox_seq for row in page.rows],
            [len(row.entry) for row in page.rows],
            up_to_seq=up_to_seq,
            max_items=max_items,
            max_bytes=max_bytes,
            exhausted=page.exhausted,
        )
        entries = [row.entry for row in page.rows[: cut.count]]
        bodies = await self._bodies.of_entries(reader.tenant_id, entries)
        covered = cut.covered_through_seq
        return MailboxPullReply(
            covered_through_seq=covered,
            up_to_seq=asked_up_to_seq,
            batch=encode_batch(entries, bodies, covered, reader.watermark, has_more=covered != asked_up_to_seq),
        )


def encode_batch(
    entries: list[bytes], bodies: list[Body], covered_through_seq: int, lane_watermark: int, *, has_more: bool
) -> bytes:
    """MailboxBatch: field 1 per entry, then the scalars."""
    parts: list[bytes] = []
    room_bytes = BATCH_BYTES_MAX - sum(len(entry) + 8 for entry in entries)
    left_out = 0
    for entry, body in zip(entries, bodies, strict=True):
        fragment = body.fragment
        if len(fragment) - body.at_rest_bytes > room_bytes:
            fragment = NOT_INCLUDED.fragment
        else:
            room_bytes -= len(fragment) - body.at_rest_bytes
        if not fragment:
            left_out += 1
        reference = entry[: len(entry) - body.at_rest_bytes]
        parts += (b"\x0a", varint(len(reference) + len(fragment)), reference, fragment)
    if left_out:
        metrics.BODY_INCLUDED_FALSE_COUNT.inc(left_out)
    if covered_through_seq:
        parts += (b"\x10", varint(covered_through_seq))
    if lane_watermark:
        parts += (b"\x18", varint(lane_watermark))
    if has_more:
        parts.append(b"\x20\x01")
    return b"".join(parts)


def _observe(page: RangePage) -> None:
    metrics.STORAGE_KEYS_EXAMINED.inc(page.storage_keys_examined)
    metrics.STORAGE_ROWS_RETURNED.inc(page.storage_rows_returned)
    metrics.TOMBSTONES_SCANNED.inc(page.tombstones_scanned)
