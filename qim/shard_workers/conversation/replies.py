"""Answer bodies of a writer; `retry_after_ms` gets its mandatory jitter here (§20.4.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qim.protocol.qim_pb2 import MEMBER, OWNER, Error, GroupReply, Member, MemberListBatch, SendAck, SubmitSendReply
from qim.shard_workers.conversation.admission import Refusal
from qim.shard_workers.conversation.submission import Change, Create, Send, Submission

RETRY_JITTER_RATIO: Final = 0.3


def send_ack(send: Send, message_id: bytes, conversation_seq: int) -> bytes:
    """SEND_ACK: body and outbox record are committed, nothing more (§8.4)."""
    ack = SendAck(
        request_id=send.message.request_id,
        client_message_id=send.client_message_id,
        message_id=message_id,
        conversation_seq=conversation_seq,
        last_activity_id=message_id,
    )
    return SubmitSendReply(ack=ack).SerializeToString()


def refusal(submission: Submission, refused: Refusal, random_unit: Callable[[], float]) -> bytes:
    """The ERROR of a refused request, in the envelope its operation expects."""
    error = error_of(refused, random_unit)
    if isinstance(submission, Send):
        error.request_id = submission.message.request_id
        error.client_message_id = submission.client_message_id
        return SubmitSendReply(error=error).SerializeToString()
    return GroupReply(error=error).SerializeToString()


def error_of(refused: Refusal, random_unit: Callable[[], float]) -> Error:
    """Without request coordinates."""
    jitter = 1 + RETRY_JITTER_RATIO * (2 * random_unit() - 1)
    return Error(
        code=refused.code.value,  # type: ignore[arg-type]  # equal to the enum of qim.proto by a test
        detail=refused.detail,
        retry_after_ms=max(1, int(refused.retry_after_ms * jitter)) if refused.retry_after_ms else 0,
    )


def changed(change: Change, conversation_seq: int) -> bytes:
    """A membership change was committed at this sequence."""
    rewrite = change.rewrite
    assert rewrite is not None
    return GroupReply(
        members=MemberListBatch(total_hint=rewrite.member_count),
        conversation_seq=conversation_seq,
        membership_version=rewrite.new_version,
    ).SerializeToString()


def unchanged(member_count: int, membership_version: int) -> bytes:
    """Nothing was left to change."""
    return GroupReply(
        members=MemberListBatch(total_hint=member_count), membership_version=membership_version
    ).SerializeToString()


def created(create: Create, page_limit: int) -> bytes:
    """The first page of the initial members; a repeated CREATE_GROUP gets the same one."""
    page = create.member_ids[:page_limit]
    more = len(create.member_ids) > len(page)
    members = [Member(user_id=user_id, role=OWNER if user_id == create.sender_id else MEMBER) for user_id in page]
    return GroupReply(
        members=MemberListBatch(
            members=members,
            total_hint=len(create.member_ids),
            next_offset=len(page) if more else 0,
            has_more=more,
        ),
        membership_version=1,
    ).SerializeToString()
