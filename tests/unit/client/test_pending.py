"""Order of one sender's messages through refusals, lost links and long absences."""

from __future__ import annotations

from typing import Any

import pytest

from qim.client.actions import SendFailed, Sent
from qim.client.pending import AGED_OUT, Pending
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.unit.client.scene import DM, NOW_MS, Player, entry

HOUR_MS = 3_600_000


def message(name: str, *, age_ms: int = 0, conversation_id: str = DM) -> Pending:
    request = pb.SendMessage(client_message_id=name, conversation_id=conversation_id, payload=name.encode())
    return Pending(request, NOW_MS - age_ms)


def send(player: Player, *names: str, conversation_id: str = DM) -> list[Any]:
    words: list[Any] = []
    for name in names:
        words += player.play(player.state.send(message(name, conversation_id=conversation_id), player.now_ms))
    return words


def ack(player: Player, name: str, seq: int = 1) -> list[Any]:
    return player.receive(
        Opcode.SEND_ACK, pb.SendAck(client_message_id=name, message_id=bytes(16), conversation_seq=seq)
    )


def refuse(player: Player, attempt: int, code: ErrorCode = ErrorCode.RATE_LIMITED, **fields: Any) -> list[Any]:
    return player.error(code, player.ids["SEND_MESSAGE"][attempt], **fields)


def test_each_names_its_unacknowledged_predecessor() -> None:
    player = Player().go_live()
    assert send(player, "a", "b") == [("SEND_MESSAGE", "a", ""), ("SEND_MESSAGE", "b", "a")]
    assert ack(player, "a", 7) == [("SENT", "a", 7)]
    assert ack(player, "b", 8) == [("SENT", "b", 8)]
    assert send(player, "c") == [("SEND_MESSAGE", "c", "")]


def test_at_most_eight_run_ahead() -> None:
    player = Player().go_live()
    assert len(send(player, *"abcdefghij")) == 8
    assert ack(player, "a") == [("SENT", "a", 1), ("SEND_MESSAGE", "i", "h")]
    assert player.state.sends.depth(DM) == 9


def test_conversations_do_not_wait_for_each_other() -> None:
    player = Player().go_live()
    send(player, "a")
    refuse(player, 0, retry_after_ms=1000)
    assert send(player, "x", conversation_id="g:team") == [("SEND_MESSAGE", "x", "")]


def test_a_retryable_refusal_stops_waits_and_starts_again_from_the_oldest() -> None:
    player = Player().go_live()
    send(player, *"abcd")
    ack(player, "a")
    assert refuse(player, 1, retry_after_ms=1000) == []
    assert send(player, "e") == [], "nothing new leaves a stopped line"
    assert refuse(player, 2, detail="out_of_order", retry_after_ms=100) == []
    assert player.wait(1_000) == [], "d is still in flight"
    assert refuse(player, 3, detail="out_of_order", retry_after_ms=100) == [
        ("SEND_MESSAGE", "b", ""), ("SEND_MESSAGE", "c", "b"), ("SEND_MESSAGE", "d", "c"), ("SEND_MESSAGE", "e", "d"),
    ]  # fmt: skip


def test_retry_after_is_obeyed_with_jitter() -> None:
    player = Player(jitter=1.0).go_live()
    send(player, "a")
    refuse(player, 0, retry_after_ms=1000)
    assert player.state.next_deadline_ms() == player.now_ms + 1300
    assert player.wait(1299) == []
    assert player.wait(1) == [("SEND_MESSAGE", "a", "")]


def test_lines_that_are_due_at_once_go_on_in_the_order_they_began_to_wait() -> None:
    player = Player().go_live()
    names = [f"dm:u1:u{n}" for n in range(9, 1, -1)]
    for attempt, conversation_id in enumerate(names):
        send(player, conversation_id, conversation_id=conversation_id)
        refuse(player, attempt, retry_after_ms=1000)
    assert player.wait(1_000) == [("SEND_MESSAGE", name, "") for name in names]


def test_out_of_order_alone_is_tried_again_soon_and_ever_slower() -> None:
    player = Player().go_live()
    send(player, "a")
    waits = []
    for _ in range(8):
        refuse(player, -1, detail="out_of_order", retry_after_ms=1)
        waits.append(player.state.sends.next_deadline_ms() - player.now_ms)
        player.wait(waits[-1])
    assert waits == [100, 200, 400, 800, 1600, 3200, 5000, 5000]


def test_after_a_final_error_the_next_is_linked_to_what_came_before() -> None:
    player = Player().go_live()
    send(player, *"abc")
    assert refuse(player, 1, ErrorCode.PERMISSION_DENIED) == [("FAILED", "b")]
    assert refuse(player, 2, detail="out_of_order", retry_after_ms=100) == []
    assert ack(player, "a") == [("SENT", "a", 1)]
    assert player.wait(100) == [("SEND_MESSAGE", "c", "")]


def test_a_line_stopped_by_its_last_message_in_flight_goes_on() -> None:
    player = Player().go_live()
    send(player, *"ab")
    refuse(player, 1, detail="out_of_order")
    assert refuse(player, 0, ErrorCode.PAYLOAD_TOO_LARGE) == [("FAILED", "a")]
    assert player.wait(100) == [("SEND_MESSAGE", "b", "")]


def test_an_own_entry_is_as_good_as_an_ack() -> None:
    player = Player().go_live()
    send(player, "a")
    assert player.push(entry(130, own="a")) == [("SENT", "a", 130), ("ROWS", [130])]
    assert ack(player, "a") == []


@pytest.mark.parametrize("by_entry", [True, False])
def test_a_message_shown_as_failed_turns_to_sent(by_entry: bool) -> None:
    player = Player().go_live()
    send(player, "a")
    refuse(player, 0, ErrorCode.PERMISSION_DENIED)
    told = player.push(entry(130, own="a")) if by_entry else ack(player, "a", 130)
    assert ("SENT", "a", 130) in told


def test_nothing_leaves_before_the_mailbox_is_reconciled() -> None:
    player = Player()
    player.state.sends.load([message("a"), message("b")], [])
    player.login(sync_to=200, offline=True, hint=1)
    assert player.batch(pb.MailboxBatch(entries=[entry(150, own="a")], covered_through_seq=200)) == [
        ("SENT", "a", 150), ("ROWS", [150], 200), "SYNC_COMPLETE",
    ]  # fmt: skip
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == ["READY", ("SEND_MESSAGE", "b", "")]


def test_what_was_in_flight_leaves_again_after_a_lost_link() -> None:
    player = Player().go_live()
    send(player, "a", "b")
    player.play(player.state.disconnected())
    assert send(player, "c") == []
    player.login()
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == [
        "READY", ("SEND_MESSAGE", "a", ""), ("SEND_MESSAGE", "b", "a"), ("SEND_MESSAGE", "c", "b"),
    ]  # fmt: skip


def test_answers_of_an_earlier_attempt_do_not_disturb_the_next() -> None:
    player = Player().go_live()
    send(player, "a")
    player.play(player.state.disconnected())
    player.go_live()
    assert refuse(player, 0, retry_after_ms=1000) == ["REPLY"], "an error of nobody's request"
    assert ack(player, "a") == [("SENT", "a", 1)]


def test_older_than_the_dedup_window_looks_through_history_first() -> None:
    player = Player()
    player.state.sends.load([message("a", age_ms=3 * HOUR_MS), message("b", age_ms=3 * HOUR_MS), message("c")], [])
    player.login()
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == ["READY", ("LOOK", DM)]
    assert send(player, "d") == []
    own = {"b": (bytes(16), 40), "unrelated": (bytes(16), 41)}
    assert player.play(player.state.looked_through(DM, own, player.now_ms)) == [
        ("SENT", "b", 40), ("SEND_MESSAGE", "a", ""), ("SEND_MESSAGE", "c", "a"), ("SEND_MESSAGE", "d", "c"),
    ]  # fmt: skip


def test_a_look_that_failed_is_repeated() -> None:
    player = Player()
    player.state.sends.load([message("a", age_ms=3 * HOUR_MS)], [])
    player.go_live()
    assert player.play(player.state.looked_through(DM, None, player.now_ms)) == []
    assert player.wait(5_000) == [("LOOK", DM)]
    assert player.play(player.state.looked_through(DM, {}, player.now_ms)) == [("SEND_MESSAGE", "a", "")]


def test_a_day_old_message_is_given_up_and_can_be_sent_by_hand() -> None:
    player = Player()
    player.state.sends.load([message("a", age_ms=25 * HOUR_MS), message("b")], [])
    player.login()
    player.receive(Opcode.ONLINE_READY, pb.OnlineReady())
    failed = player.did[1]
    assert isinstance(failed, SendFailed)
    assert (failed.client_message_id, failed.detail, failed.resendable) == ("a", AGED_OUT, True)
    assert player._word(player.did[2]) == ("SEND_MESSAGE", "b", "")
    taken = player.state.sends.take_failed("a")
    assert taken is not None
    assert player.state.sends.take_failed("a") is None


def test_an_unanswered_send_asks_for_a_probe_once() -> None:
    player = Player().go_live()
    send(player, "a")
    assert player.wait(2_999) == []
    assert player.wait(1) == ["PING"]
    player.pong()
    assert player.wait(1_000) == []


def test_an_answer_that_never_comes_on_a_living_link_counts_as_refused() -> None:
    player = Player().go_live()
    send(player, "a")
    player.wait(3_000)
    player.pong()
    assert player.wait(7_000) == [("SEND_MESSAGE", "a", "")]


def test_a_region_away_for_longer_than_the_budget_shows_failed() -> None:
    player = Player().go_live()
    send(player, "a")
    told: list[Any] = []
    for _ in range(40):
        told = refuse(player, -1, ErrorCode.REGION_FAILOVER, retry_after_ms=2_000)
        if told:
            break
        player.wait(2_000)
    assert told == [("FAILED", "a")]
    failed = player.did[0]
    assert isinstance(failed, SendFailed)
    assert failed.resendable
    assert 60_000 < player.now_ms - NOW_MS <= 63_000


def test_other_refusals_start_the_budget_anew() -> None:
    player = Player().go_live()
    send(player, "a")
    for step in range(60):
        code = ErrorCode.RATE_LIMITED if step % 20 == 19 else ErrorCode.REGION_FAILOVER
        assert refuse(player, -1, code, retry_after_ms=2_000) == []
        assert player.wait(2_000)[0] == ("SEND_MESSAGE", "a", "")


def test_an_expired_token_keeps_the_message_and_ends_the_connection() -> None:
    player = Player().go_live()
    send(player, "a")
    assert refuse(player, 0, ErrorCode.TOKEN_EXPIRED) == [("DISCONNECT", "token_expired")]
    assert player.state.sends.depth(DM) == 1


def test_a_room_message_carries_its_room_seq() -> None:
    player = Player().go_live()
    send(player, "a", conversation_id="r:hall")
    player.receive(Opcode.SEND_ACK, pb.SendAck(client_message_id="a", message_id=bytes(16), room_seq=5))
    sent = player.did[0]
    assert isinstance(sent, Sent)
    assert (sent.room_seq, sent.conversation_seq) == (5, 0)


def test_nothing_is_left_behind() -> None:
    player = Player().go_live()
    send(player, *"abc")
    for name in "abc":
        ack(player, name)
    sends = player.state.sends
    assert (sends.total(), sends.depth(DM), len(sends._lines), len(sends._in_flight)) == (0, 0, 0, 0)
