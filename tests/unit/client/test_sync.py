"""The mailbox position of a device: login ranges, staging, dirty, cursors that the server mends or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from qim.client.actions import Cursor, Disconnect
from qim.client.state import StateOptions
from qim.client.sync import PULL_FAILURES_MAX, STAGED_ENTRIES_MAX, Phase, SyncOptions
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.unit.client.scene import Player, batch, entry

APPLIED = Cursor(b"old", 100, 3)


def test_login_without_backlog_completes_at_once() -> None:
    player = Player(APPLIED)
    assert player.play(player.state.connected("token", player.now_ms)) == ["AUTH"]
    player = Player(APPLIED)
    assert player.login(sync_to=120) == [("ROWS", [], 100), "SYNC_COMPLETE"]
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == ["READY"]
    assert player.state.live
    assert player.stored_cursor == Cursor(b"signed", 100, 0)


def test_login_pulls_in_four_ranges_and_the_cursor_follows_the_unbroken_part() -> None:
    player = Player(APPLIED)
    assert player.login(sync_to=500, offline=True, hint=2000) == [
        ("ROWS", [], 100),
        ("PULL_MAILBOX", 100, 200), ("PULL_MAILBOX", 200, 300), ("PULL_MAILBOX", 300, 400), ("PULL_MAILBOX", 400, 500),
    ]  # fmt: skip
    assert player.batch(batch([entry(250)], 300), 1) == [("ROWS", [250])]
    assert player.batch(batch([entry(450)], 500), 3) == [("ROWS", [450])]
    assert player.batch(batch([entry(150)], 160, more=True), 0) == [
        ("ROWS", [150], 160),
        ("PULL_MAILBOX", 160, 200),
    ]
    assert player.batch(batch([entry(190)], 200)) == [("ROWS", [190], 300)]
    assert player.batch(batch([], 400), 2) == [("ROWS", [], 500), "SYNC_COMPLETE"]


def test_a_backlog_of_one_page_needs_one_pull() -> None:
    player = Player(APPLIED)
    assert player.login(sync_to=500, offline=True, hint=30)[1:] == [("PULL_MAILBOX", 100, 500)]


def test_the_first_pull_waits_as_long_as_the_server_says() -> None:
    player = Player(APPLIED)
    assert player.login(sync_to=500, offline=True, hint=30, sync_delay_hint_ms=700) == [("ROWS", [], 100)]
    assert player.state.sync.next_deadline_ms() == player.now_ms + 700
    assert player.wait(699) == []
    assert player.wait(1) == [("PULL_MAILBOX", 100, 500)]


def test_pushes_before_ready_are_staged_and_not_stored() -> None:
    player = Player(APPLIED)
    player.login(sync_to=120)
    assert player.push(entry(130)) == []
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == ["READY", ("ROWS", [130])]


def test_a_push_never_moves_the_cursor() -> None:
    player = Player(APPLIED).go_live(sync_to=120)
    assert player.push(entry(130), entry(131)) == [("ROWS", [130, 131])]
    assert player.state.sync.cursor.last_applied_mailbox_seq == 100
    assert player.state.counters.cursor_moved_by_push == 0


def test_an_event_is_applied_once_by_either_key() -> None:
    player = Player(APPLIED).go_live()
    player.push(entry(130))
    assert player.push(entry(130)) == []
    assert player.push(entry(900, conversation_seq=130)) == [], "same message, renumbered mailbox"
    assert player.push(entry(131, conversation_seq=130, event_ordinal=1)) == [("ROWS", [130])]
    assert player.state.counters.duplicates_dropped == 2


def test_pong_makes_the_cursor_follow_what_was_pushed() -> None:
    player = Player(APPLIED).go_live(sync_to=100)
    player.push(entry(130))
    assert player.pong(last_pushed_user_seq=100) == []
    assert player.pong(last_pushed_user_seq=130) == [("PULL_MAILBOX", 100, 0)]
    assert player.batch(batch([entry(130)], 140)) == [("ROWS", [], 140), ("PULLED", 140)]


def test_pulls_keep_their_distance() -> None:
    player = Player(APPLIED).go_live()
    assert player.play(player.state.resync(player.now_ms)) == [("PULL_MAILBOX", 100, 0)]
    player.batch(batch([], 110))
    assert player.play(player.state.resync(player.now_ms)) == []
    due_in_ms = player.state.sync.next_deadline_ms() - player.now_ms
    assert 5_000 < due_in_ms < 5_500
    assert player.wait(due_in_ms) == [("PULL_MAILBOX", 110, 0)]


def test_a_wish_during_a_pull_is_met_by_another_pull_after_it() -> None:
    player = Player(APPLIED).go_live()
    player.play(player.state.resync(player.now_ms))
    assert player.play(player.state.resync(player.now_ms)) == []
    assert player.batch(batch([], 110)) == [("ROWS", [], 110), ("PULLED", 110)]
    assert ("PULL_MAILBOX", 110, 0) in player.wait(5_250)


def test_a_continuation_aims_at_the_watermark_of_the_first_batch() -> None:
    player = Player(APPLIED).go_live()
    player.play(player.state.resync(player.now_ms))
    assert player.batch(batch([entry(110)], 110, more=True, watermark=150)) == [
        ("ROWS", [110], 110),
        ("PULL_MAILBOX", 110, 150),
    ]


@pytest.mark.parametrize("by_error", [True, False])
def test_dirty_stages_pushes_until_a_pull_covers_what_lies_below_them(by_error: bool) -> None:
    player = Player(APPLIED).go_live()
    told = player.error(ErrorCode.MAILBOX_DIRTY) if by_error else player.pong(mailbox_dirty=True)
    assert told == [("PULL_MAILBOX", 100, 0)]
    assert player.push(entry(150)) == []
    assert player.batch(batch([entry(120)], 120, more=True, watermark=149)) == [
        ("ROWS", [120], 120),
        ("PULL_MAILBOX", 120, 149),
    ]
    assert player.state.sync.dirty
    assert player.batch(batch([entry(140)], 149)) == [("ROWS", [140], 149), ("ROWS", [150]), ("PULLED", 149)]
    assert not player.state.sync.dirty
    assert player.push(entry(151)) == [("ROWS", [151])]


def test_dirty_pulls_again_when_the_pull_ended_below_the_staged() -> None:
    player = Player(APPLIED).go_live()
    player.error(ErrorCode.MAILBOX_DIRTY)
    player.push(entry(150))
    assert player.batch(batch([], 120)) == [("ROWS", [], 120), ("PULLED", 120)]
    assert player.state.sync.dirty
    assert player.wait(5_250) == [("PULL_MAILBOX", 120, 0)]
    assert player.batch(batch([entry(130), entry(150)], 160)) == [("ROWS", [130, 150], 160), ("PULLED", 160)]
    assert not player.state.sync.dirty


def test_dirty_during_login_is_pulled_after_ready() -> None:
    player = Player(APPLIED)
    player.login(sync_to=120)
    assert player.error(ErrorCode.MAILBOX_DIRTY) == []
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == ["READY", ("PULL_MAILBOX", 100, 0)]


def test_too_many_staged_are_dropped_and_pulled() -> None:
    player = Player(APPLIED).go_live()
    player.error(ErrorCode.MAILBOX_DIRTY)
    player.push(*[entry(1_000 + k) for k in range(STAGED_ENTRIES_MAX + 1)])
    assert player.state.counters.staged_dropped == STAGED_ENTRIES_MAX + 1
    player.batch(batch([], 120))
    assert player.wait(5_250) == [("PULL_MAILBOX", 120, 0)], "what was dropped lies above the pull that ran"


def test_rebased_cursor_is_taken_and_replayed_from_where_the_server_says() -> None:
    player = Player(APPLIED)
    player.play(player.state.connected("token", player.now_ms))
    answer = player.error(
        ErrorCode.CURSOR_REBASED,
        player.last_id("AUTH"),
        new_cursor=pb.MailboxCursorToken(token=b"newer", last_applied_mailbox_seq=100),
        replay_from_seq=90,
    )
    assert answer == [("ROWS", [], 90), "AUTH"]
    assert player.stored_cursor == Cursor(b"newer", 90, 3)


@pytest.mark.parametrize("code", [ErrorCode.CURSOR_INVALID, ErrorCode.CURSOR_EXPIRED])
def test_a_refused_cursor_is_forgotten_and_authenticated_anew(code: ErrorCode) -> None:
    player = Player(APPLIED)
    player.play(player.state.connected("token", player.now_ms))
    rebuild = ["REBUILD"] if code == ErrorCode.CURSOR_EXPIRED else []
    assert player.error(code, player.last_id("AUTH")) == [*rebuild, ("ROWS", [], 0), "AUTH"]
    ok = pb.AuthOk(sync_to_seq=200, has_offline=True, pending_entry_count_hint=3)
    assert player.receive(Opcode.AUTH_OK, ok, player.last_id("AUTH")) == [("PULL_MAILBOX", 0, 200)]
    player.batch(batch([entry(150)], 200))
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == ["READY"]


def test_a_cursor_is_not_mended_for_ever() -> None:
    player = Player(APPLIED)
    player.play(player.state.connected("token", player.now_ms))
    for _ in range(3):
        assert player.error(ErrorCode.CURSOR_INVALID, player.last_id("AUTH"))[-1] == "AUTH"
    assert player.error(ErrorCode.CURSOR_INVALID, player.last_id("AUTH"))[-1] == ("DISCONNECT", "auth_loop")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.SHARD_MOVED, {"retry_after_ms": 400, "final": False}),
        (ErrorCode.RATE_LIMITED, {"retry_after_ms": 400, "final": False}),
        (ErrorCode.REGION_FAILOVER, {"retry_after_ms": 400, "final": False}),
        (ErrorCode.TOKEN_EXPIRED, {"refresh_token": True, "final": False}),
        (ErrorCode.TOKEN_REVOKED, {"final": True, "wipe": True}),
        (ErrorCode.PERMISSION_DENIED, {"final": True, "wipe": False}),
        (ErrorCode.UPGRADE_REQUIRED, {"final": True, "wipe": False}),
    ],
)
def test_refused_logins(code: ErrorCode, expected: dict[str, Any]) -> None:
    player = Player(APPLIED)
    player.play(player.state.connected("token", player.now_ms))
    player.error(code, player.last_id("AUTH"), retry_after_ms=400)
    (disconnect,) = player.did
    assert isinstance(disconnect, Disconnect)
    assert disconnect.reason == code.name.lower()
    assert {name: getattr(disconnect, name) for name in expected} == expected


def test_an_unknown_error_code_backs_off_and_keeps_everything() -> None:
    player = Player(APPLIED)
    player.play(player.state.connected("token", player.now_ms))
    player.receive(Opcode.ERROR, pb.Error(code=99, retry_after_ms=5), player.last_id("AUTH"))  # type: ignore[arg-type]
    (disconnect,) = player.did
    assert isinstance(disconnect, Disconnect)
    assert (disconnect.final, disconnect.wipe, disconnect.retry_after_ms) == (False, False, 5)


def test_sync_incomplete_pulls_the_whole_range_again() -> None:
    player = Player(APPLIED)
    player.login(sync_to=200, offline=True, hint=1)
    player.batch(batch([], 200))
    assert player.error(ErrorCode.SYNC_INCOMPLETE, player.last_id("SYNC_COMPLETE")) == [
        ("PULL_MAILBOX", low, low + 25) for low in (100, 125, 150, 175)
    ]
    assert player.state.sync.phase is Phase.PULLING


def test_a_refused_pull_is_tried_again_after_the_jittered_delay() -> None:
    player = Player(APPLIED, jitter=1.0)
    player.login(sync_to=200, offline=True, hint=1)
    assert player.error(ErrorCode.SHARD_MOVED, player.last_id("PULL_MAILBOX"), retry_after_ms=1000) == []
    assert player.wait(1299) == []
    assert player.wait(1) == [("PULL_MAILBOX", 100, 200)]


def test_a_silent_pull_is_asked_again_and_its_late_answer_ignored() -> None:
    player = Player(APPLIED)
    player.login(sync_to=200, offline=True, hint=1)
    assert player.wait(10_000) == [("PULL_MAILBOX", 100, 200)]
    assert player.batch(batch([entry(150)], 200), 0) == []
    assert player.state.counters.stale_batches == 1
    assert player.batch(batch([entry(150)], 200)) == [("ROWS", [150], 200), "SYNC_COMPLETE"]


def test_a_pull_that_never_works_ends_the_connection() -> None:
    player = Player(APPLIED)
    player.login(sync_to=200, offline=True, hint=1)
    for _ in range(PULL_FAILURES_MAX - 1):
        player.wait(10_000)
    assert ("DISCONNECT", "pull_failed") in player.wait(10_000)


@pytest.mark.parametrize(
    "answer",
    [batch([], 90), batch([], 100, more=True), batch([], 201)],
    ids=["backwards", "no progress", "beyond the request"],
)
def test_an_illegal_batch_ends_the_connection(answer: pb.MailboxBatch) -> None:
    player = Player(APPLIED)
    player.login(sync_to=200, offline=True, hint=1)
    assert player.batch(answer) == [("DISCONNECT", "protocol_violation")]
    assert player.state.sync.cursor.last_applied_mailbox_seq == 100


def test_an_expired_cursor_in_a_pull_starts_over_on_a_new_connection() -> None:
    player = Player(APPLIED).go_live()
    player.play(player.state.resync(player.now_ms))
    refused = player.error(ErrorCode.CURSOR_EXPIRED, player.last_id("PULL_MAILBOX"), rebuild_required=True)
    assert refused == ["REBUILD", ("ROWS", [], 0), ("DISCONNECT", "cursor_refused")]


def test_silence_after_auth_or_sync_complete_ends_the_connection() -> None:
    player = Player(APPLIED)
    player.play(player.state.connected("token", player.now_ms))
    assert player.wait(10_000) == [("DISCONNECT", "no_answer")]
    player = Player(APPLIED)
    player.login()
    assert player.wait(10_000) == [("DISCONNECT", "no_answer")]


def test_renewal_changes_nothing_but_the_token() -> None:
    player = Player(APPLIED).go_live()
    assert player.play(player.state.renew("fresh", player.now_ms)) == ["AUTH"]
    ok = pb.AuthOk(sync_to_seq=900, mailbox_cursor=pb.MailboxCursorToken(token=b"again"))
    assert player.receive(Opcode.AUTH_OK, ok, player.last_id("AUTH")) == [("ROWS", [], 100)]
    assert player.state.live
    assert player.state.sync.sync_to_seq == 0


def test_missing_bodies_and_changed_messages_are_read_from_history() -> None:
    player = Player(APPLIED).go_live()
    assert player.push(entry(130, body_included=False)) == [("REFRESH", [130]), ("ROWS", [130])]
    control = entry(131, event_ordinal=3, event_type=pb.EVENT_CONTROL, target_conversation_seq=130)
    assert player.push(control) == [("REFRESH", [130])]


def test_an_unknown_event_type_is_counted_and_covered_but_not_shown() -> None:
    player = Player(APPLIED)
    player.login(sync_to=200, offline=True, hint=1)
    strange = entry(150)
    strange.event_type = 9  # type: ignore[assignment]
    assert player.batch(batch([strange], 200)) == [("ROWS", [], 200), "SYNC_COMPLETE"]
    assert player.state.counters.unknown_event_skipped == 1


def test_the_preferred_endpoint_is_told() -> None:
    player = Player(APPLIED)
    assert "ENDPOINT" in player.login(preferred_endpoint="b0001.im.local:443")


def test_options_bound_the_pull() -> None:
    options = StateOptions(sync=SyncOptions(device_id="d", client_version="v", pull_window=1, pull_max_items=7))
    player = Player(APPLIED, options=options)
    assert player.login(sync_to=500, offline=True, hint=100)[1:] == [("PULL_MAILBOX", 100, 500)]
