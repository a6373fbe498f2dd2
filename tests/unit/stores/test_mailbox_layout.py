"""mailbox_layout: members taken apart, calls that break a rule."""

from __future__ import annotations

import pytest

from qim.core.seq import LaneVector, mailbox_seq
from qim.stores.api import AppendCall, ChunkAppend, StoredRow, Watermarks
from qim.stores.mailbox_layout import DAY_PROBES, PREFIX_BYTES, check_append, split_member

ZERO = LaneVector.zero(2)


def item(*, index: int = 0, count: int = 1, recipients: int = 1) -> ChunkAppend:
    return ChunkAppend(
        log_offset=0,
        lanes=[(0, recipients)],
        chunk_index=index,
        chunk_count=count,
        chunk_size=100,
        mailbox_seq=mailbox_seq(1, 0),
        tenant_id="t",
        conversation_id="g:x",
        created_at_ms=0,
        common=b"",
        recipients=[("ann", 0, bytes(8), b"")] * recipients,
    )


def call(
    *items: ChunkAppend, moves: tuple[LaneVector, LaneVector] | None = None, fold: bytes | None = None, c: int = -1
) -> AppendCall:
    watermarks = Watermarks(previous=moves[0], new=moves[1], required=[]) if moves else None
    return AppendCall(shard=0, shard_epoch=1, tenant_items=list(items), watermarks=watermarks, fold=fold, fold_offset=c)


def test_a_member_is_sequence_ordinal_event_id_and_entry() -> None:
    member = (0x7FFF_0000_0000_0001).to_bytes(8, "big") + b"\x03" + b"event id" + b"entry"
    assert split_member(member) == StoredRow(0x7FFF_0000_0000_0001, 3, b"event id", b"entry")
    assert PREFIX_BYTES == 17


def test_eight_days_back_and_one_ahead_are_probed() -> None:
    assert len(range(-8, 2)) == DAY_PROBES


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (call(item(index=1)), "chunk 1 of 1"),
        (call(item(recipients=16_385)), "1 items with 16385 entries"),
        (call(*[item(recipients=0)] * 1025), "1025 items with 0 entries"),
        (call(fold=b"f", c=0), "moves W"),
        (call(moves=(LaneVector((5, 5)), LaneVector((6, 4)))), "go back"),
        (call(moves=(ZERO, LaneVector((0, mailbox_seq(1, 9)))), fold=b"f", c=0), "least W"),
        (call(moves=(ZERO, LaneVector((mailbox_seq(1, 3), mailbox_seq(1, 9)))), fold=b"f", c=4), "least W"),
    ],
)
def test_calls_that_break_a_rule_are_refused(bad: AppendCall, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_append(bad)


@pytest.mark.parametrize(
    "good",
    [
        call(),
        call(item(index=1, count=2)),
        call(item(), moves=(ZERO, ZERO), fold=b"", c=-1),
        call(moves=(ZERO, LaneVector((mailbox_seq(1, 3), mailbox_seq(1, 9)))), fold=b"f", c=3),
    ],
)
def test_calls_that_keep_the_rules_pass(good: AppendCall) -> None:
    check_append(good)
