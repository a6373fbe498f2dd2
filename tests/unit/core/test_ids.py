from __future__ import annotations

import pytest

from qim.core import ids
from tests.support.golden import golden

VECTORS = golden("ids")


@pytest.mark.parametrize("vector", VECTORS["users"])
def test_user_hashes(vector: dict[str, object]) -> None:
    tenant, user = str(vector["tenant_id"]), str(vector["user_id"])
    assert ids.user_bucket(tenant, user) == vector["user_bucket"]
    assert ids.mailbox_shard_id(tenant, user, 256) == vector["mailbox_shard_of_256"]
    assert ids.mailbox_shard_id(tenant, user, 16) == vector["mailbox_shard_of_16"]
    assert ids.connection_shard_id(tenant, user, 1024) == vector["connection_shard_of_1024"]
    assert ids.lane_id(tenant, user, 64) == vector["lane_of_64"]


@pytest.mark.parametrize("vector", VECTORS["conversations"])
def test_conversation_bucket(vector: dict[str, object]) -> None:
    tenant, conversation = str(vector["tenant_id"]), str(vector["conversation_id"])
    assert ids.conversation_bucket(tenant, conversation, 64) == vector["bucket_of_64"]
    assert ids.conversation_bucket(tenant, conversation, 1024) == vector["bucket_of_1024"]


@pytest.mark.parametrize("vector", VECTORS["dispatches"])
def test_dispatch_id(vector: dict[str, object]) -> None:
    made = ids.dispatch_id(bytes.fromhex(str(vector["message_id"])), int(str(vector["mailbox_shard"])))
    assert made.hex() == vector["dispatch_id"]


@pytest.mark.parametrize("vector", VECTORS["events"])
def test_event_id(vector: dict[str, object]) -> None:
    prefix = ids.event_id_prefix(str(vector["tenant_id"]), bytes.fromhex(str(vector["dispatch_id"])))
    made = ids.event_id(prefix, str(vector["user_id"]), int(str(vector["event_ordinal"])))
    assert made.hex() == vector["event_id"]


@pytest.mark.parametrize("name", ["a", "A.b_c@d-9", "x" * 64])
def test_names(name: str) -> None:
    assert ids.is_name(name)


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a:b", "a/b", "ä", "a\n", "a\x00"])
def test_bad_names(name: str) -> None:
    assert not ids.is_name(name)


def test_a_direct_conversation_has_one_id_and_two_members() -> None:
    assert ids.direct_conversation_id("bob", "alice") == ids.direct_conversation_id("alice", "bob") == "dm:alice:bob"
    assert ids.direct_members("dm:alice:bob") == ("alice", "bob")


@pytest.mark.parametrize(
    ("conversation_id", "kind"),
    [
        ("dm:alice:bob", "direct"),
        ("g:team", "group"),
        ("r:lobby", "room"),
        ("dm:bob:alice", None),
        ("dm:bob:bob", None),
        ("dm:bob", None),
        ("dm:a:b:c", None),
        ("g:", None),
        ("x:team", None),
        ("", None),
    ],
)
def test_conversation_kind(conversation_id: str, kind: str | None) -> None:
    assert ids.conversation_kind(conversation_id) == kind


def test_group_ids() -> None:
    assert ids.group_id_of(ids.group_conversation_id("team")) == "team"
