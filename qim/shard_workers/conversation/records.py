"""From a submission to the bytes of its commit: MessageRecord, OutboxRecord, preview, all encrypted (§21.3.4).

The only encryption point of the write path. Every attempt has its own message_id, so every attempt encrypts again
with fresh nonces. A conversation's DEK is guessed: an unknown one is made here, and the store tells the existing one if
there is one (DEK_MISMATCH), which costs the round trip that asking first would have cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import orjson

from qim.config.parameters import Parameters
from qim.protocol.entry import FLAG_AFFECTS_SESSION_ORDER, FLAG_TIMELINE_VISIBLE, FLAGS_ORDINARY
from qim.protocol.qim_pb2 import (
    EVENT_MEMBERSHIP,
    EVENT_MESSAGE,
    MESSAGE_TYPE_CONTROL,
    DispatchEvent,
    InlineBody,
    MentionRule,
    MessageRecord,
    OutboxRecord,
)
from qim.shard_workers.conversation.content import may_inline, preview
from qim.shard_workers.conversation.submission import MEMBERSHIP_CUSTOM_TYPE, Change, Create, Send, Submission
from qim.stores.api import CommitRequest
from qim.stores.crypto import KeyRing

DEKS_MAX: Final = 65536
"""Wrapped conversation keys held: about 20 MiB. An evicted one comes back by DEK_MISMATCH."""
TRACE_ID_BYTES: Final = 13
"""Of the message_id: the rest is reserved zeros."""
FLAGS_MEMBERSHIP: Final = FLAG_AFFECTS_SESSION_ORDER | FLAG_TIMELINE_VISIBLE
"""A change of members is shown and moves the conversation up, but is nothing to read (§12.9)."""
MEMBERSHIP_SCHEMA_VERSION: Final = 1


_TO_ALL: Final = [DispatchEvent(event_type=EVENT_MESSAGE, audience_all=True, flags=FLAGS_ORDINARY)]
"""The events of an ordinary message; copied wherever it is used."""


class WrappedDek(NamedTuple):
    """A conversation's key as stored; the key ring unwraps it and forgets it in time."""

    dek_id: str
    wrapped: bytes


class RecordEncoder:
    """Encodes commits under the DEK of their conversation."""

    __slots__ = ("_deks", "_key_ring", "_parameters")

    def __init__(self, key_ring: KeyRing, parameters: Parameters) -> None:
        self._key_ring = key_ring
        self._parameters = parameters
        self._deks: OrderedDict[tuple[str, str], WrappedDek] = OrderedDict()

    def adopt(self, tenant_id: str, conversation_id: str, dek_id: str, wrapped_dek: bytes) -> None:
        """The conversation has had this DEK all along. StoreError if it is not one of ours."""
        self._key_ring.unwrap(dek_id, wrapped_dek)
        self._remember((tenant_id, conversation_id), WrappedDek(dek_id, wrapped_dek))

    def send(self, send: Send, fencing_epoch: int, created_at_ms: int) -> CommitRequest:
        """A SEND_MESSAGE with its id, version and member count frozen."""
        message = send.message
        record = MessageRecord(
            sender_device_id=send.device_id,
            client_message_id=send.client_message_id,
            message_type=message.message_type,
            custom_type=message.custom_type,
            schema_version=message.schema_version,
            reply_to_conversation_seq=message.reply_to_conversation_seq,
            event_type=EVENT_MESSAGE,
        )
        events = _TO_ALL
        if message.HasField("mention_targets"):
            record.mention_targets.CopyFrom(message.mention_targets)
        if send.reply_to_user_id or message.HasField("mention_targets"):
            events = [_mentioning(send)]
        body = InlineBody(payload=message.payload)
        if message.HasField("media_metadata"):
            body.media_metadata.CopyFrom(message.media_metadata)
        return self._commit(send, record, events, body, fencing_epoch, created_at_ms)

    def change(self, change: Change, fencing_epoch: int, created_at_ms: int) -> CommitRequest:
        """The control message of a membership change whose rewrite is planned."""
        rewrite = change.rewrite
        assert rewrite is not None
        record = MessageRecord(
            message_type=MESSAGE_TYPE_CONTROL,
            custom_type=MEMBERSHIP_CUSTOM_TYPE,
            schema_version=MEMBERSHIP_SCHEMA_VERSION,
            event_type=EVENT_MEMBERSHIP,
        )
        said = {"joined": list(rewrite.joining), "left": list(rewrite.leaving), "by": change.sender_id}
        body = InlineBody(payload=orjson.dumps(said))
        return self._commit(change, record, self._audience(change), body, fencing_epoch, created_at_ms)

    def announcement(self, create: Create, message_id: bytes, fencing_epoch: int, created_at_ms: int) -> bytes:
        """The OutboxRecord of a new group: no conversation_seq, no record, no body (DESIGN-data §8)."""
        outbox = OutboxRecord(
            tenant_id=create.tenant_id,
            conversation_id=create.conversation_id,
            message_id=message_id,
            sender_id=create.sender_id,
            fencing_epoch=fencing_epoch,
            membership_version=1,
            created_at=created_at_ms,
            events=[DispatchEvent(event_type=EVENT_MEMBERSHIP, audience_all=True, flags=FLAGS_MEMBERSHIP)],
            message_type=MESSAGE_TYPE_CONTROL,
            custom_type=MEMBERSHIP_CUSTOM_TYPE,
            schema_version=MEMBERSHIP_SCHEMA_VERSION,
            trace_id=message_id[:TRACE_ID_BYTES].hex(),
        )
        return outbox.SerializeToString()

    def _audience(self, change: Change) -> list[DispatchEvent]:
        """Everybody hears of a change in a small group, in a large one only who joined; who left hears nothing from
        the control message on (§10.1.3, ADR-0021)."""
        rewrite = change.rewrite
        assert rewrite is not None
        event = DispatchEvent(event_type=EVENT_MEMBERSHIP, flags=FLAGS_MEMBERSHIP)
        if 0 < rewrite.member_count <= self._parameters.membership_event_broadcast_max_members:
            event.audience_all = True
        elif rewrite.joining:
            event.user_ids.extend(rewrite.joining)
        else:
            return []
        return [event]

    def _commit(
        self,
        submission: Send | Change,
        record: MessageRecord,
        events: list[DispatchEvent],
        body: InlineBody,
        fencing_epoch: int,
        created_at_ms: int,
    ) -> CommitRequest:
        dek = self._dek(submission)
        message_id = submission.message_id
        seal = self._sealer(submission, dek)
        record.message_id = message_id
        record.sender_id = submission.sender_id
        record.payload_ciphertext = seal(body.payload)
        if body.HasField("media_metadata"):
            record.media_ciphertext = seal(body.media_metadata.SerializeToString())
        record.created_at = created_at_ms
        record.dek_id = dek.dek_id
        outbox = OutboxRecord(
            tenant_id=submission.tenant_id,
            conversation_id=submission.conversation_id,
            message_id=message_id,
            sender_id=submission.sender_id,
            sender_device_id=record.sender_device_id,
            client_message_id=record.client_message_id,
            fencing_epoch=fencing_epoch,
            membership_version=submission.membership_version,
            created_at=created_at_ms,
            dek_id=dek.dek_id,
            events=events,
            message_type=record.message_type,
            custom_type=record.custom_type,
            schema_version=record.schema_version,
            trace_id=message_id[:TRACE_ID_BYTES].hex(),
        )
        if may_inline(submission.member_count, _size(body), record.retention_class, self._parameters):
            outbox.inline_body = True
            outbox.inline_ciphertext = seal(body.SerializeToString())
        rewrite = None
        if isinstance(submission, Change):
            rewrite = submission.rewrite
            assert rewrite is not None
            outbox.membership_version = rewrite.new_version
        return CommitRequest(
            tenant_id=submission.tenant_id,
            conversation_id=submission.conversation_id,
            sender_id=submission.sender_id,
            client_message_id=submission.client_message_id,
            request_digest=submission.request_digest,
            after_client_message_id=(
                submission.message.after_client_message_id if isinstance(submission, Send) else ""
            ),
            membership_version=submission.membership_version,
            message_id=message_id,
            record=record.SerializeToString(),
            outbox=outbox.SerializeToString(),
            dek_id=dek.dek_id,
            wrapped_dek=dek.wrapped,
            preview_ciphertext=seal(preview(record.message_type, body.payload)),
            created_at_ms=created_at_ms,
            membership=rewrite,
        )

    def _sealer(self, submission: Submission, dek: WrappedDek) -> Callable[[bytes], bytes]:
        """Encrypts for this attempt's coordinates, every time under a fresh nonce."""
        key = self._key_ring.unwrap(dek.dek_id, dek.wrapped)
        encrypt = self._key_ring.encrypt
        tenant_id, conversation_id, message_id = (
            submission.tenant_id, submission.conversation_id, submission.message_id,
        )  # fmt: skip
        return lambda plaintext: encrypt(key, plaintext, tenant_id, conversation_id, message_id)

    def _dek(self, submission: Submission) -> WrappedDek:
        key = (submission.tenant_id, submission.conversation_id)
        dek = self._deks.get(key)
        if dek is None:
            made = self._key_ring.new_dek(submission.tenant_id)
            dek = WrappedDek(made.dek_id, made.wrapped)
            self._remember(key, dek)
        else:
            self._deks.move_to_end(key)
        return dek

    def _remember(self, key: tuple[str, str], dek: WrappedDek) -> None:
        self._deks[key] = dek
        self._deks.move_to_end(key)
        if len(self._deks) > DEKS_MAX:
            self._deks.popitem(last=False)


def _mentioning(send: Send) -> DispatchEvent:
    """The event of a message that addresses somebody: no entry of its own, a rule on everybody's (§11.4.1)."""
    targets = send.message.mention_targets
    rule = MentionRule(at_all=targets.all, user_ids=targets.user_ids, reply_to_user_id=send.reply_to_user_id or "")
    return DispatchEvent(event_type=EVENT_MESSAGE, audience_all=True, flags=FLAGS_ORDINARY, mention=rule)


def _size(body: InlineBody) -> int:
    """`body_size` of the inline rule: what the sender gave, without our framing."""
    size = len(body.payload)
    return size + body.media_metadata.ByteSize() if body.HasField("media_metadata") else size
