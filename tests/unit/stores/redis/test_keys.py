"""Key names are stored data: they never change."""

from __future__ import annotations

import inspect

from qim.stores.redis import keys

ARGUMENTS = {
    "bucket": 7,
    "tenant_id": "acme",
    "sender_id": "ann",
    "user_id": "ann",
    "client_message_id": "c:1",
    "conversation_id": "dm:ann:bob",
    "group_id": "team",
    "seq_bucket": 2,
    "mailbox_shard": 12,
    "partition": 7,
}

MESSAGE_KEYS = {
    "bucket_tag": "{b0007}:",
    "fence": "fence:{b0007}",
    "hlc": "hlc:{b0007}",
    "outbox": "outbox:{b0007}",
    "outbox_next": "outboxn:{b0007}",
    "dedup": "dedup:{b0007}:acme:ann:c:1",
    "conversation": "conv:{b0007}:acme:dm:ann:bob",
    "records": "rec:{b0007}:acme:dm:ann:bob:2",
    "group": "grp:{b0007}:acme:team",
    "group_slots": "grpslot:{b0007}:acme:team",
    "group_intervals": "grpmember:{b0007}:acme:team",
    "group_users": "grpusers:{b0007}:acme:team:12",
    "group_snapshots": "grpver:{b0007}:acme:team:12",
    "group_index": "grpidx:{b0007}:acme:team",
}

NOT_A_KEY = {"bucket_tag", "records_prefix", "group_snapshots_prefix", "split_conversation"}
"""Parts of the keys of one kind, and the way back."""


def test_names_of_the_message_instance() -> None:
    assert {name: _call(name) for name in MESSAGE_KEYS} == MESSAGE_KEYS


def test_no_two_kinds_of_key_collide() -> None:
    """Equal arguments give different names, and no name is the beginning of another kind's."""
    found = inspect.getmembers(keys, inspect.isfunction)
    names = [_call(name) for name, function in found if function.__module__ == keys.__name__ and name not in NOT_A_KEY]
    names += [keys.STAMP, "stage:"]
    assert [(one, other) for one in names for other in names if one != other and other.startswith(one)] == []
    assert len(set(names)) == len(names)


def test_the_name_of_a_head_reads_back() -> None:
    for conversation_id in ("dm:ann:bob", "g:team"):
        name = keys.conversation(1023, "acme", conversation_id)
        assert keys.split_conversation(name.encode()) == (1023, "acme", conversation_id)
        assert name.startswith(keys.CONVERSATIONS.removesuffix("*"))


def _call(name: str) -> str:
    function = getattr(keys, name)
    wanted = inspect.signature(function).parameters
    return str(function(**{parameter: ARGUMENTS.get(parameter, "x") for parameter in wanted}))
