"""What a request must look like."""

from __future__ import annotations

from typing import Any

import pytest

from qim.config.parameters import default_parameters
from qim.gateway.checks import (
    BAD_REQUEST,
    DENIED,
    TOO_LARGE,
    UNSERVED,
    Refused,
    check_group,
    check_history,
    check_pull,
    check_send,
    may_address,
)
from qim.protocol import qim_pb2 as pb

LIMITS = default_parameters()


def message(**changes: Any) -> pb.SendMessage:
    values: dict[str, Any] = {
        "client_message_id": "m1",
        "conversation_id": "dm:ann:bob",
        "message_type": pb.MESSAGE_TYPE_TEXT,
        "payload": b"hi",
    }
    return pb.SendMessage(**values | changes)


@pytest.mark.parametrize(
    ("conversation_id", "allowed"),
    [
        ("dm:ann:bob", True),
        ("dm:aaa:ann", True),
        ("dm:bob:ann", False),
        ("dm:ann:ann", False),
        ("dm:bob:eve", False),
        ("dm:annx:bob", False),
        ("g:team", True),
        ("g:", False),
        ("g:a b", False),
        ("r:lobby", True),
        ("", False),
        ("x:team", False),
        ("dm:ann:bob\n", False),
    ],
)
def test_whom_a_user_may_address(conversation_id: str, allowed: bool) -> None:
    assert may_address(conversation_id, "ann") is allowed


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"conversation_id": "g:team"}, None),
        ({"conversation_id": "dm:bob:eve"}, DENIED),
        ({"conversation_id": "r:lobby"}, UNSERVED),
        ({"payload": b"x" * 32768}, None),
        ({"payload": b"x" * 32769}, TOO_LARGE),
        ({"media_metadata": pb.MediaMetadata(thumbnail=b"x" * 32769)}, TOO_LARGE),
        ({"message_type": pb.MESSAGE_TYPE_CUSTOM, "custom_type": "c" * 64}, None),
        ({"message_type": pb.MESSAGE_TYPE_CUSTOM, "custom_type": "c" * 65}, TOO_LARGE),
        ({"message_type": pb.MESSAGE_TYPE_CONTROL}, BAD_REQUEST),
        ({"message_type": pb.MESSAGE_TYPE_UNSPECIFIED}, BAD_REQUEST),
        ({"message_type": 99}, BAD_REQUEST),
        ({"client_message_id": ""}, BAD_REQUEST),
        ({"client_message_id": "i" * 64}, None),
        ({"client_message_id": "i" * 65}, BAD_REQUEST),
        ({"client_message_id": "ü" * 33}, BAD_REQUEST),
        ({"after_client_message_id": "i" * 65}, BAD_REQUEST),
        ({"mention_targets": pb.MentionTargets(user_ids=["bob"])}, None),
        ({"mention_targets": pb.MentionTargets(user_ids=["b b"])}, BAD_REQUEST),
    ],
)
def test_sends(changes: dict[str, Any], refused: Refused | None) -> None:
    assert check_send(message(**changes), "ann", LIMITS) == refused


def test_history_limits_are_filled_in_and_capped() -> None:
    pull = pb.PullHistory(conversation_id="g:team", direction=pb.OLDER)
    assert check_history(pull, "ann", LIMITS) is None
    assert (pull.limit, pull.max_bytes) == (50, 512 << 10)
    pull = pb.PullHistory(conversation_id="g:team", direction=pb.NEWER, limit=1000, max_bytes=1 << 30)
    assert check_history(pull, "ann", LIMITS) is None
    assert (pull.limit, pull.max_bytes) == (200, 512 << 10)


@pytest.mark.parametrize(
    ("conversation_id", "direction", "refused"),
    [
        ("dm:bob:eve", pb.OLDER, DENIED),
        ("r:lobby", pb.OLDER, DENIED),
        ("g:team", pb.DIRECTION_UNSPECIFIED, BAD_REQUEST),
    ],
)
def test_history(conversation_id: str, direction: pb.Direction, refused: Refused) -> None:
    pull = pb.PullHistory(conversation_id=conversation_id, direction=direction)
    assert check_history(pull, "ann", LIMITS) == refused


def test_pull_limits_are_filled_in_and_capped() -> None:
    pull = pb.PullMailbox(after_seq=5)
    assert check_pull(pull, LIMITS) is None
    assert (pull.max_items, pull.max_bytes) == (500, 512 << 10)
    pull = pb.PullMailbox(after_seq=5, up_to_seq=5, max_items=10_000, max_bytes=1)
    assert check_pull(pull, LIMITS) is None
    assert (pull.max_items, pull.max_bytes) == (500, 1)
    assert check_pull(pb.PullMailbox(after_seq=6, up_to_seq=5), LIMITS) == BAD_REQUEST


def test_groups() -> None:
    assert check_group(pb.CreateGroup(group_id="team", member_ids=["bob"])) is None
    assert check_group(pb.CreateGroup(group_id="team", member_ids=["bob", ""])) == BAD_REQUEST
    assert check_group(pb.CreateGroup(group_id="a:b")) == DENIED
    assert check_group(pb.LeaveGroup(group_id="team")) is None
    assert check_group(pb.LeaveGroup(group_id="")) == DENIED
