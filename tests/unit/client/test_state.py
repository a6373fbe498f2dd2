"""Frames reach their machine, and what nobody knows does no harm."""

from __future__ import annotations

import pytest

from qim.client.actions import Disconnect, Reply
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.unit.client.scene import DM, Player


def test_an_unknown_opcode_is_skipped_and_counted() -> None:
    player = Player().go_live()
    assert player.play(player.state.receive(0x0F0F, 0, b"\xff", player.now_ms)) == []
    assert player.state.counters.unknown_opcode_dropped == 1


def test_an_undecodable_body_ends_the_connection() -> None:
    player = Player().go_live()
    assert player.play(player.state.receive(Opcode.PUSH_EVENTS, 0, b"\xff\xff", player.now_ms)) == [
        ("DISCONNECT", "undecodable")
    ]


@pytest.mark.parametrize(
    ("reason", "word", "wipe"),
    [
        (pb.REPLACED, "replaced", False),
        (pb.ADMIN_REVOKED, "admin", False),
        (pb.BANNED, "banned", False),
        (pb.KICKED_TOKEN_REVOKED, "token_revoked", True),
        (pb.KICK_REASON_UNSPECIFIED, "kicked", False),
    ],
)
def test_kicked_never_comes_back(reason: pb.KickReason, word: str, wipe: bool) -> None:
    player = Player().go_live()
    player.receive(Opcode.KICKED, pb.Kicked(reason=reason))
    (disconnect,) = player.did
    assert disconnect == Disconnect(reason=word, final=True, wipe=wipe)


def test_redirect_names_the_next_endpoint() -> None:
    player = Player()
    player.receive(Opcode.REDIRECT, pb.Redirect(endpoint_hint="10.0.0.2:443"))
    assert player.did == [Disconnect(reason="redirect", retry_after_ms=0, endpoint="10.0.0.2:443")]


def test_the_answer_of_a_request_comes_back_under_its_id() -> None:
    player = Player().go_live()
    request_id, actions = player.state.request(Opcode.PULL_HISTORY, pb.PullHistory(conversation_id=DM))
    assert player.play(actions) == ["PULL_HISTORY"]
    player.receive(Opcode.HISTORY_BATCH, pb.HistoryBatch(latest_conversation_seq=7), request_id)
    (reply,) = player.did
    assert isinstance(reply, Reply)
    assert reply.request_id == request_id
    assert isinstance(reply.message, pb.HistoryBatch)
    assert reply.message.latest_conversation_seq == 7


def test_a_refused_request_comes_back_as_its_error() -> None:
    player = Player().go_live()
    request_id, _ = player.state.request(Opcode.LEAVE_GROUP, pb.LeaveGroup(group_id="team"))
    player.receive(Opcode.ERROR, pb.Error(code=pb.PERMISSION_DENIED, request_id=request_id))
    (reply,) = player.did
    assert isinstance(reply, Reply)
    assert reply.error is not None
    assert reply.request_id == request_id, "the id in the body serves when the header has none"


def test_pings_start_with_the_login_and_end_with_the_connection() -> None:
    player = Player()
    player.login(next_ping_interval_ms=5_000)
    player.receive(Opcode.ONLINE_READY, pb.OnlineReady())
    assert player.wait(5_000) == ["PING"]
    player.play(player.state.disconnected())
    assert player.wait(60_000) == []


def test_a_late_ready_is_ignored() -> None:
    player = Player().go_live()
    assert player.receive(Opcode.ONLINE_READY, pb.OnlineReady()) == []
