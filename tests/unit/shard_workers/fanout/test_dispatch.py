from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qim.core import ids
from qim.protocol.qim_pb2 import DispatchEvent, GroupDispatch, MentionRule, OutboxRecord
from qim.shard_workers.fanout.dispatch import (
    EVENT_GROUP_BYTES_MAX,
    Source,
    direct_slots,
    direct_targets,
    dispatches,
    split_events,
)
from qim.shard_workers.mailbox.expand import Dispatch
from qim.stores.api import SnapshotRef

TENANT, SHARDS, LANES = "t", 8, 64
ALL = DispatchEvent(event_type=1, audience_all=True, flags=7)  # type: ignore[arg-type]


def source(events: list[DispatchEvent], *, conversation_id: str = "g:g", inline_bytes: int = 0) -> Source:
    record = OutboxRecord(
        conversation_seq=9, tenant_id=TENANT, conversation_id=conversation_id, message_id=bytes(range(16)),
        sender_id="u0", fencing_epoch=3, membership_version=4, events=events, inline_ciphertext=bytes(inline_bytes),
    )  # fmt: skip
    return Source(2, 77, record.SerializeToString())


def made(found: Source, targets: dict[int, SnapshotRef], slots: dict[str, int]) -> list[tuple[int, GroupDispatch]]:
    return [
        (shard, GroupDispatch.FromString(packed))
        for shard, packed in dispatches(found, targets, slots, SHARDS, LANES, {})
    ]


def test_one_dispatch_per_shard_carries_the_record_as_it_is() -> None:
    found = source([ALL])
    targets = {1: SnapshotRef(3, 10, 0b1010), 6: SnapshotRef(4, 2, 0b1)}
    (first_shard, first), (_, second) = made(found, targets, {})
    assert first_shard == first.target_mailbox_shard == 1
    assert (first.source_bucket, first.source_offset, first.source_part) == (2, 77, 0)
    assert (first.lane_mask, first.snapshot_version, first.member_count) == (0b1010, 3, 10)
    assert first.dispatch_id == ids.dispatch_id(bytes(range(16)), 1) != second.dispatch_id
    assert first.record.SerializeToString() == found.packed


def test_a_single_chat_goes_to_the_shards_of_its_two_users() -> None:
    for n in range(50):
        conversation_id = ids.direct_conversation_id(f"a{n}", f"b{n}")
        targets = direct_targets(TENANT, conversation_id, SHARDS, LANES)
        expected: dict[int, int] = {}
        for user in (f"a{n}", f"b{n}"):
            shard = ids.mailbox_shard_id(TENANT, user, SHARDS)
            expected[shard] = expected.get(shard, 0) | 1 << ids.lane_id(TENANT, user, LANES)
        assert {shard: ref.lane_mask for shard, ref in targets.items()} == expected
        assert sum(ref.member_count for ref in targets.values()) == 2
    assert direct_slots(source([ALL], conversation_id="dm:a:b")) == {"a": 0, "b": 1}


def test_named_users_are_split_by_shard_with_slots_and_floors() -> None:
    users = [f"u{n}" for n in range(20)]
    event = DispatchEvent(event_type=3, user_ids=users, joined_at=range(100, 120), flags=6)  # type: ignore[arg-type]
    slots = {user: 500 + n for n, user in enumerate(users) if user != "u7"}
    seen: dict[str, tuple[int, int]] = {}
    for shard, dispatch in made(source([event]), {}, slots):
        (local,) = dispatch.record.events
        mask = 0
        for user, slot, floor in zip(local.user_ids, local.slots, local.joined_at, strict=True):
            assert ids.mailbox_shard_id(TENANT, user, SHARDS) == shard
            mask |= 1 << ids.lane_id(TENANT, user, LANES)
            seen[user] = (slot, floor)
        assert dispatch.lane_mask == mask
        assert dispatch.member_count == len(local.user_ids)
    assert seen == {user: (500 + n, 100 + n) for n, user in enumerate(users) if user != "u7"}


def test_everybody_and_named_users_are_separate_parts() -> None:
    named = DispatchEvent(event_type=3, user_ids=["u1"], flags=6)  # type: ignore[arg-type]
    parts = made(source([ALL, named]), {0: SnapshotRef(1, 5, 1)}, {"u1": 1})
    assert [dispatch.source_part for _, dispatch in parts] == [0, 1]
    assert [event.audience_all for event in parts[0][1].record.events] == [True]
    assert [list(event.user_ids) for event in parts[1][1].record.events] == [["u1"]]


def test_the_mention_rule_is_carried_as_is() -> None:
    rule = MentionRule(at_all=True, user_ids=["u5"], reply_to_user_id="u6")
    event = DispatchEvent(event_type=1, audience_all=True, mention=rule)  # type: ignore[arg-type]
    ((_, dispatch),) = made(source([event]), {0: SnapshotRef(1, 5, 1)}, {})
    assert dispatch.record.events[0].mention == rule


def test_an_event_group_of_four_types_stays_one_dispatch() -> None:
    events = [DispatchEvent(event_type=kind, audience_all=True) for kind in (1, 2, 3, 4)]  # type: ignore[arg-type]
    assert [len(part) for part in split_events(source(events))] == [4]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([0, 900, 2048, 9000]),
)
def test_parts_are_legal_event_groups_in_order(kinds: list[tuple[int, bool]], inline_bytes: int) -> None:
    events = [
        DispatchEvent(event_type=kind, audience_all=everybody, flags=n)  # type: ignore[arg-type]
        for n, (kind, everybody) in enumerate(kinds)
    ]
    found = source(events, inline_bytes=inline_bytes)
    parts = split_events(found)
    assert [event.flags for part in parts for event in part] == list(range(len(kinds)))
    for part in parts:
        assert len(part) <= 8
        assert len({event.event_type for event in part}) == len(part), "one event_id per user and ordinal"
        assert len({event.audience_all for event in part}) == 1
        assert len(part) == 1 or len(part) * len(found.packed) <= EVENT_GROUP_BYTES_MAX


def test_a_dispatch_names_the_one_before_it_in_its_append_call() -> None:
    named = DispatchEvent(event_type=3, user_ids=["u1"], flags=6)  # type: ignore[arg-type]
    shard = ids.mailbox_shard_id(TENANT, "u1", SHARDS)
    targets, chain = {shard: SnapshotRef(1, 5, 1)}, dict[int, int]()
    found = source([ALL, named])
    packed = [value for _, value in dispatches(found, targets, {"u1": 1}, SHARDS, LANES, chain)]
    packed += [value for _, value in dispatches(Source(2, 78, found.packed), targets, {"u1": 1}, SHARDS, LANES, chain)]
    made = [Dispatch(n, value) for n, value in enumerate(packed)]
    assert [dispatch.source for dispatch in made] == [(77, 0), (77, 1), (78, 0), (78, 1)]
    assert [dispatch.follows for dispatch in made] == [None, (77, 0), (77, 1), (78, 0)]
    other = (shard + 1) % SHARDS
    ((_, first),) = dispatches(source([ALL]), {other: SnapshotRef(1, 5, 1)}, {}, SHARDS, LANES, chain)
    assert Dispatch(0, first).follows is None
