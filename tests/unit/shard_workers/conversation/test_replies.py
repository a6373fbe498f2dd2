"""Answer bodies."""

from __future__ import annotations

from qim.errors import Detail, ErrorCode
from qim.protocol.qim_pb2 import MEMBER, OWNER, GroupReply, SendMessage, SubmitSendReply
from qim.shard_workers.conversation import replies
from qim.shard_workers.conversation.admission import DENIED, Refusal
from qim.shard_workers.conversation.submission import Change, Create, Send

SEND = Send(
    "t", "ann", "phone", SendMessage(request_id=9, client_message_id="m1", conversation_id="dm:ann:bob"), b"",
    expires_at_ms=1,
)  # fmt: skip
LEAVE = Change("t", "g:choir", "ann", "c", b"", joining=False, user_ids=("ann",), by_subject=True, expires_at_ms=1)


def test_an_ack_names_the_request_and_the_coordinates() -> None:
    ack = SubmitSendReply.FromString(replies.send_ack(SEND, b"\x01" * 16, 5)).ack
    assert (ack.request_id, ack.client_message_id, ack.conversation_seq) == (9, "m1", 5)
    assert ack.message_id == ack.last_activity_id == b"\x01" * 16


def test_a_wait_has_its_jitter_and_a_final_refusal_has_no_wait() -> None:
    limited = Refusal(ErrorCode.RATE_LIMITED, Detail.OUT_OF_ORDER, 200)
    waits = [
        SubmitSendReply.FromString(replies.refusal(SEND, limited, lambda unit=unit: unit)).error.retry_after_ms  # type: ignore[misc]
        for unit in (0.0, 0.5, 1.0)
    ]
    assert waits == [140, 200, 260]
    error = SubmitSendReply.FromString(replies.refusal(SEND, DENIED, lambda: 0.5)).error
    assert (error.code, error.retry_after_ms, error.request_id, error.client_message_id) == (15, 0, 9, "m1")


def test_a_group_operation_is_refused_in_its_own_envelope() -> None:
    error = GroupReply.FromString(replies.refusal(LEAVE, DENIED, lambda: 0.5)).error
    assert int(error.code) == ErrorCode.PERMISSION_DENIED
    assert GroupReply.FromString(replies.unchanged(3, 7)).membership_version == 7


def test_a_creation_is_answered_with_the_first_page_of_members() -> None:
    create = Create("t", "g:choir", "bob", ["ann", "bob", "cid"], expires_at_ms=1)
    members = GroupReply.FromString(replies.created(create, 2)).members
    assert [(member.user_id, member.role) for member in members.members] == [("ann", MEMBER), ("bob", OWNER)]
    assert (members.total_hint, members.next_offset, members.has_more) == (3, 2, True)
    whole = GroupReply.FromString(replies.created(create, 3)).members
    assert (len(whole.members), whole.next_offset, whole.has_more) == (3, 0, False)
