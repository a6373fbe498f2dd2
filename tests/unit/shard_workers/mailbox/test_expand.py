from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.core import ids
from qim.protocol.entry import AT_ALL, AT_ME, FLAG_COUNTS_UNREAD, FLAGS_ORDINARY, MENTION_NONE, REPLY_ME
from qim.protocol.qim_pb2 import Entry, MentionRule, OutboxRecord
from qim.shard_workers.mailbox.expand import (
    RECENT_MESSAGES_MAX,
    Dispatch,
    LaneMembers,
    Member,
    RecentEvents,
    check_members,
    direct_by_lane,
    encode_body_at_rest,
    split_entry,
    subjects_by_lane,
)
from tests.unit.shard_workers.mailbox.making import CREATED_AT_MS, TENANT, packed_dispatch

SEQ = 1 << 48 | 7
USERS = ["sender", "u1", "u2"]
MEMBERS = [(n, user) for n, user in enumerate(USERS)]


def dispatch(**options: object) -> Dispatch:
    made = Dispatch(7, packed_dispatch(USERS, **options))  # type: ignore[arg-type]
    made.prepare(RecentEvents())
    return made


def entries(made: Dispatch, members: list[Member] = MEMBERS) -> list[Entry]:
    common, recipients, _ = made.chunk(SEQ, [(0, len(members))], members)
    commons = [common] * len(recipients) if isinstance(common, bytes) else common
    return [Entry.FromString(ref + shared) for (*_, ref), shared in zip(recipients, commons, strict=True)]


def test_an_entry_has_the_references_of_its_message_and_user() -> None:
    made = dispatch()
    own, other, _ = entries(made)
    assert other.mailbox_seq == SEQ
    assert other.event_id == int.from_bytes(ids.event_id(made.event_prefix, "u1", 0), "big")
    assert (other.conversation_id, other.conversation_seq, other.sender_id) == ("g:g", 1, "sender")
    assert other.message_id == other.last_activity_id == made.message_id
    assert (other.created_at, other.flags, other.mention_type) == (CREATED_AT_MS, FLAGS_ORDINARY, MENTION_NONE)
    assert not other.HasField("client_message_id")
    assert own.client_message_id == "cmid"
    assert own.flags == FLAGS_ORDINARY & ~FLAG_COUNTS_UNREAD


def test_the_most_personal_mention_wins_and_nobody_mentions_oneself() -> None:
    rule = MentionRule(at_all=True, user_ids=["u1", "sender"], reply_to_user_id="u2")
    assert [entry.mention_type for entry in entries(dispatch(mention=rule))] == [MENTION_NONE, AT_ME, REPLY_ME]
    rule = MentionRule(at_all=True, reply_to_user_id="u1")
    assert [entry.mention_type for entry in entries(dispatch(mention=rule))] == [MENTION_NONE, REPLY_ME, AT_ALL]


def test_an_event_group_shares_its_seq_and_differs_in_ordinal() -> None:
    made = dispatch(event_types=(1, 2, 3, 4))
    assert made.event_count == 4
    found = entries(made, MEMBERS[1:2])
    assert [(entry.mailbox_seq, entry.event_ordinal, entry.event_type) for entry in found] == [
        (SEQ, ordinal, ordinal + 1) for ordinal in range(4)
    ]
    assert len({entry.event_id for entry in found}) == 4
    assert [entry.origin_device_id for entry in found] == ["", "", "", "device"]


def test_chunks_of_a_replay_are_byte_identical() -> None:
    again, lanes = dispatch(event_types=(1, 3)), [(0, 2), (1, 1)]
    assert dispatch(event_types=(1, 3)).chunk(SEQ, lanes, MEMBERS) == again.chunk(SEQ, lanes, MEMBERS)
    assert again.chunk(SEQ, lanes, MEMBERS)[2] == [(0, 4), (1, 2)], "entries per lane"


def test_a_user_gets_only_the_events_that_name_it() -> None:
    packed = packed_dispatch(["u1", "u2"], event_types=(1, 3))
    made = Dispatch(0, packed)
    del made.record.events[1].user_ids[1:], made.record.events[1].slots[1:]
    made.prepare(RecentEvents())
    assert [(entry.event_ordinal) for entry in entries(made, [(0, "u1")])] == [0, 2]
    assert [(entry.event_ordinal) for entry in entries(made, [(1, "u2")])] == [0]


@given(st.text(alphabet="abc-123", max_size=64), st.integers(1, 1 << 40), st.sampled_from([1, 2, 3, 4]))
def test_the_ref_and_the_message_id_of_a_stored_entry_are_found_without_parsing(
    client_message_id: str, seq: int, event_type: int
) -> None:
    made = Dispatch(0, packed_dispatch(["sender", "u1"], conversation_seq=seq, event_types=(event_type,)))
    made.record.client_message_id = client_message_id
    made.prepare(RecentEvents())
    common, recipients, _ = made.chunk(SEQ, [(0, 2)], [(0, "sender"), (1, "u1")])
    assert isinstance(common, bytes)
    for *_, ref in recipients:
        assert split_entry(ref + common) == (len(ref), made.message_id)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout"):
        split_entry(bytes(200))


def test_a_body_at_rest_is_kept_with_inline_messages_only() -> None:
    record = OutboxRecord(inline_ciphertext=b"c" * 40, dek_id="k", message_type=1)  # type: ignore[arg-type]
    packed = encode_body_at_rest(record)
    assert packed == encode_body_at_rest(Entry.FromString(packed)), "a stored entry tells the length of its body"
    assert Entry.FromString(packed).inline_ciphertext == b"c" * 40
    assert dispatch().events[0].common == dispatch().events[0].reference
    announcement = dispatch(conversation_seq=0)
    announcement.record.message_type = 11  # type: ignore[assignment]
    announcement.prepare(RecentEvents())
    assert Entry.FromString(announcement.events[0].common).message_type == 11


def test_events_for_everybody_are_encoded_once_for_all_shards() -> None:
    recent = RecentEvents()
    packed = packed_dispatch([])
    first, second = Dispatch(0, packed), Dispatch(3, packed)
    for made in (first, second):
        made.record.events[0].audience_all = True
        made.prepare(recent)
    assert first.events is second.events
    named, named_too = (Dispatch(0, packed_dispatch([user], source=(99, 0))) for user in ("u1", "u2"))
    named.prepare(recent)
    named_too.prepare(recent)
    assert named.events is not named_too.events
    for n in range(RECENT_MESSAGES_MAX + 9):
        made = Dispatch(n, packed_dispatch([], source=(n + 1, 0)))
        made.record.events[0].audience_all = True
        made.prepare(recent)
    assert len(recent._recent) == RECENT_MESSAGES_MAX


def test_members_are_grouped_by_lane_in_slot_order() -> None:
    users = [f"u{n}" for n in range(50)]
    by_lane = subjects_by_lane(Dispatch(0, packed_dispatch(users)), 4)
    assert sum(map(len, by_lane.values())) == 50
    for lane, members in by_lane.items():
        assert members == sorted(members)
        assert all(ids.lane_id(TENANT, user_id, 4) == lane for _, user_id in members)


def test_a_single_chat_has_the_users_of_the_shard() -> None:
    found = [
        (shard, member)
        for shard in range(8)
        for members in direct_by_lane(TENANT, "dm:alice:bob", shard, 4, 8).values()
        for member in members
    ]
    assert sorted(member for _, member in found) == [(0, "alice"), (1, "bob")]
    assert all(ids.mailbox_shard_id(TENANT, user_id, 8) == shard for shard, (_, user_id) in found)


def test_members_must_fill_the_lanes_the_dispatch_names() -> None:
    made = Dispatch(0, packed_dispatch(["u1"]))
    check_members(made, subjects_by_lane(made, 4))
    with pytest.raises(ValueError, match="the dispatch names"):
        check_members(made, LaneMembers())


def test_lanes_with_few_members_go_together_and_one_of_several_chunks_alone() -> None:
    by_lane = {lane: [(n, f"{lane}/{n}") for n in range(count)] for lane, count in enumerate([2, 3, 1, 9, 4, 4])}
    members = LaneMembers(by_lane)
    assert members.mask == 0b111111
    shares = members.shares(5, 6)
    assert [share.lanes for share in shares] == [((0, 2), (1, 3), (2, 1)), ((3, 9),), ((4, 4),), ((5, 4),)]
    assert [share.mask for share in shares] == [0b111, 0b1000, 0b10000, 0b100000]
    assert [member for share in shares for member in share.members] == [m for found in by_lane.values() for m in found]
    assert members.shares(5, 6) is shares, "the next dispatch to the same members"
    assert [share.lanes for share in members.shares(5, 0)] == [((lane, len(by_lane[lane])),) for lane in range(6)]
