from __future__ import annotations

from dataclasses import replace

import pytest

from qim.core.cursor import CursorScope
from qim.protocol.qim_pb2 import (
    CURSOR_EXPIRED,
    CURSOR_INVALID,
    CURSOR_REBASED,
    SHARD_MOVED,
    Error,
    MailboxCursorToken,
)
from qim.shard_workers.mailbox.session import Position, issue_cursor, judge_cursor
from tests.unit.shard_workers.mailbox.making import boundary

KEY = b"k" * 32
SCOPE = CursorScope(
    tenant_id="t", user_id="u", device_id="d", mailbox_shard_id=3, lane_id=5, shard_epoch=4, issued_at_ms=1
)
W, TRIM = 4 << 48 | 100, 2 << 48 | 50
POSITION = Position(scope=SCOPE, lane_watermark=W, effective_trim=TRIM)
BOUNDARIES = [boundary(1, 0), boundary(2, 10), boundary(4, 90)]


def judge(cursor: MailboxCursorToken) -> Error | None:
    return judge_cursor(cursor, POSITION, BOUNDARIES, KEY)


def cursor(last_applied: int, **changes: object) -> MailboxCursorToken:
    return issue_cursor(replace(SCOPE, **changes), last_applied, KEY)  # type: ignore[arg-type]


def code(found: Error | None) -> int:
    assert found is not None
    return found.code


def test_a_good_cursor_and_a_new_device_pass() -> None:
    assert judge(cursor(W)) is None
    assert judge(cursor(0)) is None
    assert judge(MailboxCursorToken()) is None


@pytest.mark.parametrize(
    "changes", [{"tenant_id": "x"}, {"user_id": "x"}, {"device_id": "x"}, {"mailbox_shard_id": 9}, {"lane_id": 9}]
)
def test_a_cursor_of_another_place_is_invalid(changes: dict[str, object]) -> None:
    assert code(judge(cursor(W, **changes))) == CURSOR_INVALID


def test_forged_and_impossible_cursors_are_invalid() -> None:
    assert code(judge(MailboxCursorToken(token=b"x" * 60, last_applied_mailbox_seq=1))) == CURSOR_INVALID
    assert code(judge(issue_cursor(SCOPE, W, b"other key"))) == CURSOR_INVALID
    assert code(judge(cursor(W + 1))) == CURSOR_INVALID
    assert code(judge(MailboxCursorToken(last_applied_mailbox_seq=1))) == CURSOR_INVALID


def test_a_cursor_below_the_trim_is_expired_but_never_a_zero_one() -> None:
    found = judge(cursor(TRIM - 1))
    assert code(found) == CURSOR_EXPIRED
    assert found is not None
    assert (found.trim_watermark, found.rebuild_required) == (TRIM, True)
    assert judge(cursor(TRIM)) is None


def test_a_cursor_of_an_earlier_epoch_is_rebased_in_place() -> None:
    found = judge(cursor(TRIM + 5, shard_epoch=2))
    assert code(found) == CURSOR_REBASED
    assert found is not None
    assert found.replay_from_seq == found.new_cursor.last_applied_mailbox_seq == TRIM + 5
    assert judge(found.new_cursor) is None


def test_an_epoch_that_owned_nothing_we_know_is_expired() -> None:
    assert code(judge(cursor(TRIM + 5, shard_epoch=3))) == CURSOR_EXPIRED


def test_a_cursor_of_a_later_epoch_proves_another_owner() -> None:
    assert code(judge(cursor(W, shard_epoch=5))) == SHARD_MOVED
