"""Rows of the local timeline and their order (§6.9.1): the key is server-given, never a local number or a clock."""

from __future__ import annotations

from typing import Final, NamedTuple

from qim.core.seq import MESSAGE_EPOCH_UNIX_MS, message_id_parts
from qim.protocol import qim_pb2 as pb
from qim.protocol.entry import FLAGS_ORDINARY, ORDINAL_MESSAGE

KNOWN_EVENT_TYPES: Final = frozenset((pb.EVENT_MESSAGE, pb.EVENT_MENTION, pb.EVENT_MEMBERSHIP, pb.EVENT_CONTROL))

TimelineKey = tuple[int, int, bytes]


class MessageRow(NamedTuple):
    """One row of `local_message`, in the order of its columns.

    `mailbox_seq` is 0 while the row is known only from a SEND_ACK or from history. `event_id` is 8 bytes big-endian,
    so that bytes compare like the number; empty while unknown.
    """

    conversation_id: str
    conversation_seq: int
    event_ordinal: int
    message_id: bytes
    timeline_anchor_seq: int
    event_id: bytes
    mailbox_seq: int
    sender_id: str
    created_at_ms: int
    last_activity_id: bytes
    flags: int
    mention_type: int
    client_message_id: str
    message_type: int
    custom_type: str
    schema_version: int
    payload: bytes
    media: bytes
    body_included: int
    state: int


def timeline_key(row: MessageRow) -> TimelineKey:
    """Order inside a conversation: `(timeline_anchor_seq, event_ordinal, event_id)` ascending."""
    return row.timeline_anchor_seq, row.event_ordinal, row.event_id


def row_from_entry(entry: pb.Entry) -> MessageRow:
    """Row of a sync entry; MAILBOX_BATCH and PUSH_EVENTS share this one branch (A.4.1)."""
    conversation_seq = entry.conversation_seq
    return MessageRow(
        entry.conversation_id,
        conversation_seq,
        entry.event_ordinal,
        entry.message_id,
        entry.target_conversation_seq or conversation_seq,
        entry.event_id.to_bytes(8, "big"),
        entry.mailbox_seq,
        entry.sender_id,
        entry.created_at,
        entry.last_activity_id,
        entry.flags,
        entry.mention_type,
        entry.client_message_id,
        entry.message_type,
        entry.custom_type,
        entry.schema_version,
        entry.payload_or_ciphertext,
        entry.media_metadata.SerializeToString() if entry.HasField("media_metadata") else b"",
        1 if entry.body_included else 0,
        pb.MESSAGE_STATE_UNSPECIFIED,
    )


def row_from_history(conversation_id: str, message: pb.HistoryMessage) -> MessageRow:
    """Row of a HISTORY_BATCH message: its current state, no mailbox coordinates (§9.5.3)."""
    return MessageRow(
        conversation_id=conversation_id,
        conversation_seq=message.conversation_seq,
        event_ordinal=max(message.event_type - 1, ORDINAL_MESSAGE),
        message_id=message.message_id,
        timeline_anchor_seq=message.conversation_seq,
        event_id=b"",
        mailbox_seq=0,
        sender_id=message.sender_id,
        created_at_ms=message.created_at,
        last_activity_id=message.last_activity_id,
        flags=FLAGS_ORDINARY,
        mention_type=0,
        client_message_id=message.client_message_id,
        message_type=message.message_type,
        custom_type=message.custom_type,
        schema_version=message.schema_version,
        payload=message.payload_or_ciphertext,
        media=message.media_metadata.SerializeToString() if message.HasField("media_metadata") else b"",
        body_included=1 if message.body_included else 0,
        state=message.state,
    )


def row_from_ack(sent: pb.SendMessage, sender_id: str, message_id: bytes, conversation_seq: int) -> MessageRow:
    """Row of an own message that is committed while its mailbox entry is still on the way (§8.4)."""
    return MessageRow(
        conversation_id=sent.conversation_id,
        conversation_seq=conversation_seq,
        event_ordinal=ORDINAL_MESSAGE,
        message_id=message_id,
        timeline_anchor_seq=conversation_seq,
        event_id=b"",
        mailbox_seq=0,
        sender_id=sender_id,
        created_at_ms=message_id_parts(message_id)[0] + MESSAGE_EPOCH_UNIX_MS,
        last_activity_id=message_id,
        flags=FLAGS_ORDINARY,
        mention_type=0,
        client_message_id=sent.client_message_id,
        message_type=sent.message_type,
        custom_type=sent.custom_type,
        schema_version=sent.schema_version,
        payload=sent.payload,
        media=sent.media_metadata.SerializeToString() if sent.HasField("media_metadata") else b"",
        body_included=1,
        state=pb.MESSAGE_STATE_UNSPECIFIED,
    )
