"""What a message may contain and what identifies it."""

from __future__ import annotations

from typing import Any

import pytest

from qim.config.parameters import default_parameters
from qim.protocol.qim_pb2 import (
    COMPLIANCE_HOLD,
    EPHEMERAL_24H,
    MESSAGE_TYPE_CONTROL,
    MESSAGE_TYPE_CUSTOM,
    MESSAGE_TYPE_IMAGE,
    MESSAGE_TYPE_TEXT,
    MESSAGE_TYPE_UNSPECIFIED,
    RETENTION_CLASS_UNSPECIFIED,
    TENANT_CUSTOM,
    MediaMetadata,
    MentionTargets,
    MessageType,
    SendMessage,
)
from qim.shard_workers.conversation.admission import BAD_REQUEST, DENIED, TOO_LARGE, Refusal
from qim.shard_workers.conversation.content import (
    MENTION_USERS_MAX,
    check_send,
    check_users,
    may_inline,
    preview,
    request_digest,
)

LIMITS = default_parameters()


def message(**fields: Any) -> SendMessage:
    return SendMessage(
        **{
            "request_id": 1, "client_message_id": "m1", "conversation_id": "dm:ann:bob",
            "message_type": MESSAGE_TYPE_TEXT, "payload": b"hello", **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"conversation_id": "g:choir"},
        {"message_type": MESSAGE_TYPE_CUSTOM, "custom_type": "x" * 64},
        {"payload": bytes(32 * 1024)},
        {"payload": b""},
        {"client_message_id": "x" * 64, "after_client_message_id": "y" * 64},
        {"mention_targets": MentionTargets(user_ids=["bob"])},
    ],
)
def test_what_is_in_order(fields: dict[str, Any]) -> None:
    assert check_send(message(**fields), "ann", LIMITS) is None


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"conversation_id": "dm:bob:cid"}, DENIED),
        ({"conversation_id": "dm:bob:ann"}, DENIED),
        ({"conversation_id": "dm:ann:ann"}, DENIED),
        ({"conversation_id": "r:lobby"}, DENIED),
        ({"conversation_id": "g:"}, DENIED),
        ({"conversation_id": ""}, DENIED),
        ({"payload": bytes(32 * 1024 + 1)}, TOO_LARGE),
        ({"custom_type": "é" * 33}, TOO_LARGE),
        ({"media_metadata": MediaMetadata(thumbnail=bytes(32 * 1024 + 1))}, TOO_LARGE),
        ({"message_type": MESSAGE_TYPE_CONTROL}, BAD_REQUEST),
        ({"message_type": MESSAGE_TYPE_UNSPECIFIED}, BAD_REQUEST),
        ({"message_type": 99}, BAD_REQUEST),
        ({"client_message_id": ""}, BAD_REQUEST),
        ({"client_message_id": "x" * 65}, BAD_REQUEST),
        ({"after_client_message_id": "x" * 65}, BAD_REQUEST),
        ({"mention_targets": MentionTargets(user_ids=["no name"])}, BAD_REQUEST),
        ({"mention_targets": MentionTargets(user_ids=["u"] * (MENTION_USERS_MAX + 1))}, BAD_REQUEST),
    ],
)
def test_what_is_refused(fields: dict[str, Any], refusal: Refusal) -> None:
    assert check_send(message(**fields), "ann", LIMITS) == refusal


def test_a_list_of_users_has_a_bound_and_names_only() -> None:
    assert check_users(["ann", "bob"], 2) is None
    assert check_users([], 2) == BAD_REQUEST
    assert check_users(["a", "b", "c"], 2) == BAD_REQUEST
    assert check_users(["a b"], 2) == BAD_REQUEST


def test_an_attempt_changes_nothing_about_what_was_asked() -> None:
    first = request_digest(message())
    assert request_digest(message(request_id=9, client_message_id="m2", after_client_message_id="m1")) == first
    for changed in (
        {"payload": b"hullo"}, {"conversation_id": "dm:ann:cid"}, {"reply_to_conversation_seq": 1},
        {"mention_targets": MentionTargets(all=True)}, {"custom_type": "x"},
    ):  # fmt: skip
        assert request_digest(message(**changed)) != first
    assert len(first) == 16


def test_digesting_leaves_the_message_alone() -> None:
    asked = message()
    request_digest(asked)
    assert asked == message()


def test_a_text_is_previewed_by_its_beginning_and_media_by_a_word() -> None:
    assert preview(MESSAGE_TYPE_TEXT, b"hello") == b"hello"
    assert preview(MESSAGE_TYPE_TEXT, ("日" * 200).encode()) == ("日" * 100).encode()
    assert preview(MESSAGE_TYPE_TEXT, b"\xff\xfeok") == b"ok"
    assert preview(MESSAGE_TYPE_IMAGE, b"secret") == b"[image]"
    for kind in MessageType.values():
        if kind != MESSAGE_TYPE_UNSPECIFIED:
            preview(kind, b"")


@pytest.mark.parametrize(
    ("members", "body_bytes", "inline"),
    [(2, 600, True), (13, 600, True), (14, 600, False), (2, 2048, True), (2, 2049, False), (4, 2048, True)],
)
def test_the_inline_rule(members: int, body_bytes: int, inline: bool) -> None:
    assert may_inline(members, body_bytes, RETENTION_CLASS_UNSPECIFIED, LIMITS) is inline


@pytest.mark.parametrize("retention_class", [EPHEMERAL_24H, COMPLIANCE_HOLD, TENANT_CUSTOM])
def test_only_the_default_retention_class_is_inlined(retention_class: int) -> None:
    assert not may_inline(2, 1, retention_class, LIMITS)
