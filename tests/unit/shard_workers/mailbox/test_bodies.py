from __future__ import annotations

import pytest

from qim.errors import StoreError, StoreUnavailable
from qim.protocol.qim_pb2 import COMPLIANCE_HOLD, DELETED, EPHEMERAL_24H, MediaMetadata, OutboxRecord
from qim.shard_workers.mailbox.bodies import DAY_MS, SEQ_BUCKET_WIDTH
from tests.unit.shard_workers.mailbox.bodies_scene import TENANT, Scene

AB = "dm:alice:bob"


async def test_inline_and_joined_entries_look_alike_on_the_wire() -> None:
    scene = Scene()
    media = MediaMetadata(object_id="o", mime="image/png", bytes=9)
    seqs = [await scene.commit_one(AB, "text", inline=inline, media=media) for inline in (True, False)]
    inline, joined = await scene.wire([scene.entry(AB, seq) for seq in seqs])
    for found in (inline, joined):
        assert found.body_included
        assert (found.payload_or_ciphertext, found.media_metadata, found.message_type) == (b"text", media, 1)
        assert not found.inline_ciphertext
        assert not found.dek_id
    fields = [{field.name for field, _ in found.ListFields()} for found in (inline, joined)]
    assert fields[0] == fields[1]


async def test_a_join_is_one_range_read_per_conversation_and_bucket() -> None:
    scene = Scene()
    conversations = [f"dm:alice:b{n}" for n in range(20)]
    entries = [scene.entry(name, await scene.commit_one(name, f"{n}")) for name in conversations for n in range(5)]
    assert len(await scene.wire(entries)) == 100
    assert sorted(scene.range_reads) == sorted((name, 0, 5) for name in conversations)
    scene.range_reads.clear()
    await scene.wire(entries)
    assert scene.range_reads == [], "what was joined is in memory"
    scene.reader.clear()
    await scene.wire(entries[:5])
    assert len(scene.range_reads) == 1


async def test_a_page_across_two_buckets_reads_both_once() -> None:
    scene = Scene()
    await scene.commit_one(AB, "any")
    await scene.reader.records(TENANT, AB, [SEQ_BUCKET_WIDTH - 1, SEQ_BUCKET_WIDTH, SEQ_BUCKET_WIDTH + 1])
    assert scene.range_reads == [(AB, 0, 1), (AB, 1, 2)]


async def test_inline_entries_never_enter_the_join() -> None:
    scene = Scene()
    entries = [scene.entry(AB, await scene.commit_one(AB, f"{n}", inline=True)) for n in range(9)]
    assert [entry.payload_or_ciphertext for entry in await scene.wire(entries)] == [b"%d" % n for n in range(9)]
    assert scene.range_reads == []
    assert scene.head_reads == 1, "one key for the conversation"


@pytest.mark.parametrize(
    ("fields", "age_days", "included"),
    [
        ({}, 0, True),
        ({}, 29, True),
        ({}, 31, False),
        ({"state": DELETED}, 0, False),
        ({"retention_class": EPHEMERAL_24H}, 0, True),
        ({"retention_class": EPHEMERAL_24H}, 1, False),
        ({"retention_class": COMPLIANCE_HOLD}, 400, True),
    ],
)
async def test_bodies_removed_or_past_retention_are_left_out(
    fields: dict[str, object], age_days: int, included: bool
) -> None:
    scene = Scene()
    seq = await scene.commit_one(AB, "text", **fields)  # type: ignore[arg-type]
    scene.clock.now_ms += age_days * DAY_MS
    (found,) = await scene.wire([scene.entry(AB, seq)])
    assert found.body_included is included
    assert found.conversation_seq == seq
    assert bool(found.payload_or_ciphertext) is included


async def test_a_read_that_fails_fails_the_request() -> None:
    scene = Scene()
    entry = scene.entry(AB, await scene.commit_one(AB, "text"))
    scene.failing = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        await scene.wire([entry])


async def test_a_body_of_another_message_does_not_decrypt() -> None:
    scene = Scene()
    one, two = [await scene.commit_one(AB, "text", inline=True) for _ in range(2)]
    scene.outboxes[AB, one].inline_ciphertext = scene.outboxes[AB, two].inline_ciphertext
    with pytest.raises(StoreError, match="does not decrypt"):
        await scene.wire([scene.entry(AB, one)])


async def test_a_push_finds_inline_bodies_once_the_key_is_known() -> None:
    scene = Scene()
    first, second, third = [await scene.commit_one(AB, "text", inline=n < 2) for n in range(3)]
    record = scene.outboxes[AB, first]
    assert scene.reader.of_dispatch(record) is None
    loaded = await scene.reader.load_for_push([record, scene.outboxes[AB, third]])
    assert set(loaded) == {record.message_id, scene.outboxes[AB, third].message_id}
    assert scene.reader.of_dispatch(record) == loaded[record.message_id]
    assert scene.reader.of_dispatch(scene.outboxes[AB, second]) is not None
    announcement = scene.reader.of_dispatch(OutboxRecord(message_id=b"x" * 16))
    assert announcement is not None
    assert announcement.fragment


async def test_keys_are_fetched_again_after_their_time() -> None:
    scene = Scene()
    entries = [scene.entry(AB, await scene.commit_one(AB, f"{n}", inline=True)) for n in range(3)]
    await scene.wire(entries[:1])
    await scene.wire(entries[1:2])
    assert scene.head_reads == 1
    scene.clock.now_ms += 300_001
    await scene.wire(entries[2:])
    assert scene.head_reads == 2


async def test_the_cache_is_bounded_in_bytes() -> None:
    scene = Scene(cache_bytes=3000)
    entries = [scene.entry(AB, await scene.commit_one(AB, "x" * 600)) for _ in range(6)]
    await scene.wire(entries)
    assert len(scene.reader._bodies) == 3
    assert scene.reader._room_bytes >= 0
    scene.range_reads.clear()
    await scene.wire(entries[3:])
    assert scene.range_reads == []
