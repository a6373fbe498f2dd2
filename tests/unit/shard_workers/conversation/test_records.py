"""Bytes of a commit: what is stored, for whom it is, and that nothing readable is in it."""

from __future__ import annotations

from typing import Any

import pytest

from qim.config.parameters import default_parameters
from qim.core.secret import Secret
from qim.errors import StoreError
from qim.protocol.entry import FLAGS_ORDINARY
from qim.protocol.qim_pb2 import (
    EVENT_MEMBERSHIP,
    EVENT_MESSAGE,
    MESSAGE_TYPE_CONTROL,
    MESSAGE_TYPE_IMAGE,
    MESSAGE_TYPE_TEXT,
    InlineBody,
    MediaMetadata,
    MentionTargets,
    MessageRecord,
    OutboxRecord,
    SendMessage,
)
from qim.shard_workers.conversation.membership import GroupContext, Placement, plan_join
from qim.shard_workers.conversation.records import FLAGS_MEMBERSHIP, RecordEncoder
from qim.shard_workers.conversation.submission import MEMBERSHIP_CUSTOM_TYPE, Change, Create, Send
from qim.stores.api import CommitRequest, GroupMeta, MembershipRewrite
from qim.stores.crypto import KeyRing

RING = KeyRing(Secret(bytes(32)))
LIMITS = default_parameters()
ID = bytes(range(16))
AT_MS = 1_800_000_000_000


def make_send(conversation: str = "dm:ann:bob", payload: bytes = b"the secret words", **fields: Any) -> Send:
    message = SendMessage(
        **{
            "client_message_id": "m2", "after_client_message_id": "m1", "conversation_id": conversation,
            "message_type": MESSAGE_TYPE_TEXT, "payload": payload, "schema_version": 3, **fields,
        }
    )  # fmt: skip
    send = Send("t", "ann", "phone", message, b"d" * 16, expires_at_ms=1)
    send.message_id = ID
    return send


def opened(request: CommitRequest, ciphertext: bytes) -> bytes:
    dek = RING.unwrap(request.dek_id, request.wrapped_dek)
    return RING.decrypt(dek, ciphertext, request.tenant_id, request.conversation_id, request.message_id)


def encoded(send: Send) -> tuple[CommitRequest, MessageRecord, OutboxRecord]:
    request = RecordEncoder(RING, LIMITS).send(send, 4, AT_MS)
    return request, MessageRecord.FromString(request.record), OutboxRecord.FromString(request.outbox)


def test_a_message_is_stored_encrypted_under_its_own_id() -> None:
    request, record, outbox = encoded(make_send())
    assert (request.message_id, request.client_message_id, request.after_client_message_id) == (ID, "m2", "m1")
    assert (request.request_digest, request.membership_version, request.created_at_ms) == (b"d" * 16, 0, AT_MS)
    assert opened(request, record.payload_ciphertext) == b"the secret words"
    assert opened(request, request.preview_ciphertext) == b"the secret words"
    assert InlineBody.FromString(opened(request, outbox.inline_ciphertext)).payload == b"the secret words"
    assert b"secret" not in request.record + request.outbox + request.preview_ciphertext
    assert record.dek_id == outbox.dek_id == request.dek_id
    assert (record.sender_id, record.sender_device_id, record.client_message_id) == ("ann", "phone", "m2")
    assert (record.created_at, record.schema_version, record.event_type) == (AT_MS, 3, EVENT_MESSAGE)


def test_the_outbox_record_says_for_whom_it_is() -> None:
    _, _, outbox = encoded(make_send())
    (event,) = outbox.events
    assert (event.event_type, event.audience_all, event.flags) == (EVENT_MESSAGE, True, FLAGS_ORDINARY)
    assert not event.HasField("mention")
    assert (outbox.fencing_epoch, outbox.membership_version, outbox.conversation_seq) == (4, 0, 0)
    assert (outbox.tenant_id, outbox.conversation_id, outbox.sender_id) == ("t", "dm:ann:bob", "ann")
    assert (outbox.message_id, outbox.created_at, outbox.message_type) == (ID, AT_MS, MESSAGE_TYPE_TEXT)
    assert ID.hex().startswith(outbox.trace_id) and outbox.trace_id


def test_mentions_travel_as_a_rule() -> None:
    send = make_send("g:choir", mention_targets=MentionTargets(user_ids=["bob"]), reply_to_conversation_seq=3)
    send.reply_to_user_id = "cid"
    _, record, outbox = encoded(send)
    rule = outbox.events[0].mention
    assert (list(rule.user_ids), rule.reply_to_user_id, rule.at_all) == (["bob"], "cid", False)
    assert (list(record.mention_targets.user_ids), record.reply_to_conversation_seq) == (["bob"], 3)
    _, _, to_all = encoded(make_send("g:choir", mention_targets=MentionTargets(all=True)))
    assert to_all.events[0].mention.at_all


@pytest.mark.parametrize(("members", "inline"), [(13, True), (14, False)])
def test_the_inline_decision_is_made_once(members: int, inline: bool) -> None:
    send = make_send("g:choir", payload=bytes(600))
    send.member_count = members
    _, _, outbox = encoded(send)
    assert (outbox.inline_body, bool(outbox.inline_ciphertext)) == (inline, inline)
    assert outbox.dek_id


def test_media_are_sealed_beside_the_body_and_count_for_the_inline_rule() -> None:
    media = MediaMetadata(object_id="o1", thumbnail=bytes(1900))
    request, record, outbox = encoded(
        make_send(message_type=MESSAGE_TYPE_IMAGE, payload=bytes(200), media_metadata=media)
    )
    assert MediaMetadata.FromString(opened(request, record.media_ciphertext)) == media
    assert opened(request, request.preview_ciphertext) == b"[image]"
    assert not outbox.inline_body


def test_a_conversation_keeps_its_key_and_every_attempt_a_fresh_nonce() -> None:
    encoder = RecordEncoder(RING, LIMITS)
    first, again = encoder.send(make_send(), 4, AT_MS), encoder.send(make_send(), 4, AT_MS)
    assert (first.dek_id, first.wrapped_dek) == (again.dek_id, again.wrapped_dek)
    assert first.record != again.record
    assert encoder.send(make_send("dm:ann:cid"), 4, AT_MS).dek_id != first.dek_id


def test_an_adopted_key_is_used_and_a_foreign_one_refused() -> None:
    encoder = RecordEncoder(RING, LIMITS)
    encoder.send(make_send(), 4, AT_MS)
    stored = RING.new_dek("t")
    encoder.adopt("t", "dm:ann:bob", stored.dek_id, stored.wrapped)
    request = encoder.send(make_send(), 4, AT_MS)
    assert (request.dek_id, request.wrapped_dek) == (stored.dek_id, stored.wrapped)
    foreign = KeyRing(Secret(b"\x01" * 32)).new_dek("t")
    with pytest.raises(StoreError, match="master key"):
        encoder.adopt("t", "dm:ann:bob", foreign.dek_id, foreign.wrapped)


def joined(members_after: int, users: tuple[str, ...] = ("dan", "eve")) -> Change:
    placement = Placement(4, 8)
    count = members_after - len(users)
    meta = GroupMeta(
        membership_version=6, member_count=count, next_slot=count, creator_id="ann", create_digest=bytes(16)
    )
    change = Change(
        "t", "g:choir", "operator", "c1", b"d" * 16, joining=True, user_ids=users, by_subject=False, expires_at_ms=1
    )
    change.rewrite = plan_join(
        "t", "choir", GroupContext(meta, {}), dict.fromkeys(users), placement.shards("t", users), {}, placement
    )
    change.message_id, change.membership_version, change.member_count = ID, 6, members_after
    return change


def test_a_change_is_a_control_message_under_the_new_version() -> None:
    change = joined(10)
    request = RecordEncoder(RING, LIMITS).change(change, 4, AT_MS)
    record, outbox = MessageRecord.FromString(request.record), OutboxRecord.FromString(request.outbox)
    assert (request.membership_version, outbox.membership_version) == (6, 7)
    assert request.membership is change.rewrite
    assert (record.message_type, record.custom_type) == (MESSAGE_TYPE_CONTROL, MEMBERSHIP_CUSTOM_TYPE)
    assert opened(request, record.payload_ciphertext) == b'{"joined":["dan","eve"],"left":[],"by":"operator"}'
    assert opened(request, request.preview_ciphertext) == b"[members]"
    assert (record.client_message_id, outbox.client_message_id) == ("", ""), "the id is no client's"


@pytest.mark.parametrize(("members", "everybody"), [(500, True), (501, False)])
def test_a_large_group_tells_only_who_joined(members: int, everybody: bool) -> None:
    outbox = OutboxRecord.FromString(RecordEncoder(RING, LIMITS).change(joined(members), 4, AT_MS).outbox)
    (event,) = outbox.events
    assert (event.event_type, event.flags, event.audience_all) == (EVENT_MEMBERSHIP, FLAGS_MEMBERSHIP, everybody)
    assert list(event.user_ids) == ([] if everybody else ["dan", "eve"])


@pytest.mark.parametrize(("left_behind", "events"), [(2, 1), (0, 0), (501, 0)])
def test_who_left_hears_nothing(left_behind: int, events: int) -> None:
    change = Change(
        "t", "g:choir", "ann", "c1", b"", joining=False, user_ids=("ann",), by_subject=True, expires_at_ms=1
    )
    change.message_id = ID
    change.rewrite = MembershipRewrite(
        group_id="choir", new_version=2, member_count=left_behind, joining={}, joining_shards={}, leaving=("ann",),
        next_slot=3, snapshots={}, index={},
    )  # fmt: skip
    outbox = OutboxRecord.FromString(RecordEncoder(RING, LIMITS).change(change, 4, AT_MS).outbox)
    assert len(outbox.events) == events


def test_a_creation_is_announced_without_a_sequence_or_a_body() -> None:
    create = Create("t", "g:choir", "ann", ["ann", "bob"], expires_at_ms=1)
    outbox = OutboxRecord.FromString(RecordEncoder(RING, LIMITS).announcement(create, ID, 4, AT_MS))
    (event,) = outbox.events
    assert (event.event_type, event.audience_all) == (EVENT_MEMBERSHIP, True)
    assert (outbox.conversation_seq, outbox.membership_version, outbox.inline_body) == (0, 1, False)
    assert (outbox.message_id, outbox.sender_id, outbox.fencing_epoch) == (ID, "ann", 4)
