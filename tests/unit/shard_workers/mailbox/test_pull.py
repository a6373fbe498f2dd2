from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qim.core.ids import lane_id
from qim.core.seq import LaneVector, log_offset_of, mailbox_seq
from qim.protocol.header import MAX_FRAME_BYTES
from qim.protocol.qim_pb2 import CURSOR_EXPIRED, CURSOR_INVALID, Entry, MailboxBatch, MailboxPullReply, PullMailbox
from qim.shard_workers.mailbox.bodies import NOT_INCLUDED, Body
from qim.shard_workers.mailbox.expand import Dispatch, RecentEvents
from qim.shard_workers.mailbox.pull import MailboxPuller, Reader, encode_batch
from qim.stores.api import AppendCall, AppendStatus, ChunkAppend, Watermarks
from qim.stores.memory_mailbox import MemoryMailboxStore
from tests.unit.shard_workers.mailbox.bodies_scene import START_MS, Scene
from tests.unit.shard_workers.mailbox.making import TENANT, packed_dispatch, run

USER, LANES = "bob", 4
LANE = lane_id(TENANT, USER, LANES)


class PullScene:
    """Bob's mailbox, filled at given offsets; W is wherever the test says."""

    def __init__(self) -> None:
        self.bodies = Scene()
        self.store = MemoryMailboxStore(1, lambda: START_MS)
        run(self.store.open_shard(0, 1, "g", LANES))
        self.puller = MailboxPuller(self.store, self.bodies.reader)
        self.w = LaneVector.zero(LANES)

    def add(self, offset: int, *, event_types: tuple[int, ...] = (1,)) -> None:
        """An event group of an announcement, which needs no record."""
        dispatch = Dispatch(
            offset, packed_dispatch([USER], source=(offset, 0), conversation_seq=0, event_types=event_types)
        )
        dispatch.prepare(RecentEvents())
        seq = mailbox_seq(1, offset)
        common, recipients, _ = dispatch.chunk(seq, [(LANE, 1)], [(0, USER)])
        item = ChunkAppend(
            log_offset=offset, lanes=[(LANE, len(recipients))], chunk_index=0, chunk_count=1,
            chunk_size=100, mailbox_seq=seq,
            tenant_id=TENANT, conversation_id="g:g", created_at_ms=START_MS, common=common, recipients=recipients,
        )  # fmt: skip
        call = AppendCall(shard=0, shard_epoch=1, tenant_items=[item], watermarks=None)
        assert run(self.store.append(call)).status is AppendStatus.OK

    def move_w(self, offset: int) -> None:
        new = LaneVector((mailbox_seq(1, offset),) * LANES)
        moves = Watermarks(previous=self.w, new=new, required=[])
        run(self.store.append(AppendCall(shard=0, shard_epoch=1, tenant_items=[], watermarks=moves)))
        self.w = new

    def pull(self, after: int, up_to: int = 0, *, zero_cursor: bool = False, **fields: int) -> MailboxPullReply:
        """Offsets instead of sequences; -1 is the zero cursor, `up_to` 0 stays 0."""
        reader = Reader(tenant_id=TENANT, user_id=USER, shard=0, shard_epoch=1, lane=LANE, watermark=self.w[LANE])
        request = PullMailbox(
            after_seq=mailbox_seq(1, after) if after >= 0 else 0,
            up_to_seq=mailbox_seq(1, up_to) if up_to else 0, **fields,
        )  # fmt: skip
        return run(self.puller.pull(reader, request, zero_cursor=zero_cursor))


def offsets(reply: MailboxPullReply) -> list[int]:
    return [log_offset_of(entry.mailbox_seq) for entry in MailboxBatch.FromString(reply.batch).entries]


def test_a_range_returns_its_entries_and_is_covered_to_the_end() -> None:
    scene = PullScene()
    for offset in (8, 17, 91):
        scene.add(offset)
    scene.move_w(500)
    reply = scene.pull(1, 400)
    batch = MailboxBatch.FromString(reply.batch)
    assert offsets(reply) == [8, 17, 91]
    assert (log_offset_of(batch.covered_through_seq), batch.has_more) == (400, False)
    assert batch.covered_through_seq == reply.covered_through_seq
    assert log_offset_of(batch.lane_watermark) == 500
    assert all(entry.body_included for entry in batch.entries)


def test_an_empty_range_is_skipped_and_zero_means_now() -> None:
    scene = PullScene()
    scene.move_w(500)
    reply = scene.pull(1)
    assert offsets(reply) == []
    assert log_offset_of(reply.covered_through_seq) == 500
    assert not MailboxBatch.FromString(reply.batch).has_more
    scene.move_w(600)
    assert log_offset_of(scene.pull(500).covered_through_seq) == 600


def test_stored_entries_beyond_w_stay_out_of_sight() -> None:
    scene = PullScene()
    for offset in (10, 20, 30):
        scene.add(offset)
    scene.move_w(20)
    assert offsets(scene.pull(-1)) == [10, 20]
    reply = scene.pull(-1, 40)
    assert offsets(reply) == [10, 20]
    assert log_offset_of(reply.covered_through_seq) == 20
    assert MailboxBatch.FromString(reply.batch).has_more


@pytest.mark.parametrize(("after", "up_to", "acked"), [(21, 0, 0), (20, 30, 0), (21, 22, 0), (15, 10, 0), (1, 2, 21)])
def test_impossible_ranges_are_invalid(after: int, up_to: int, acked: int) -> None:
    scene = PullScene()
    scene.move_w(20)
    reply = scene.pull(after, up_to, acked_seq=mailbox_seq(1, acked) if acked else 0)
    assert reply.error.code == CURSOR_INVALID


def test_an_event_group_is_never_cut() -> None:
    scene = PullScene()
    scene.add(5, event_types=(1, 2, 3, 4))
    scene.add(6)
    scene.move_w(10)
    reply = scene.pull(4, max_items=3)
    assert offsets(reply) == [5, 5, 5, 5]
    assert log_offset_of(reply.covered_through_seq) == 5
    assert MailboxBatch.FromString(reply.batch).has_more
    rest = scene.pull(5, max_items=3)
    assert (offsets(rest), log_offset_of(rest.covered_through_seq)) == ([6], 10)


def test_a_hole_below_the_trim_is_expired_but_not_for_a_session_that_started_from_zero() -> None:
    scene = PullScene()
    scene.add(30)
    scene.move_w(40)
    run(scene.store.truncate_before(0, 1, TENANT, USER, mailbox_seq(1, 10)))
    reply = scene.pull(5)
    assert (reply.error.code, log_offset_of(reply.error.trim_watermark)) == (CURSOR_EXPIRED, 10)
    assert reply.error.rebuild_required
    assert offsets(scene.pull(5, zero_cursor=True)) == [30]
    assert offsets(scene.pull(10)) == [30]
    assert offsets(scene.pull(-1)) == [30]


def test_a_batch_is_the_bytes_protobuf_would_write() -> None:
    refs = [Entry(mailbox_seq=n, event_type=1).SerializeToString() for n in (1, 2)]  # type: ignore[arg-type]
    body = Entry(body_included=True, payload_or_ciphertext=b"x" * 300).SerializeToString()
    made = encode_batch(
        [refs[0], refs[1] + b"at rest"], [Body(body, 0), Body(body, 7)], 1 << 48, 1 << 49, has_more=True
    )
    expected = MailboxBatch(
        entries=[Entry.FromString(ref + body) for ref in refs], covered_through_seq=1 << 48, lane_watermark=1 << 49,
        has_more=True,
    )  # fmt: skip
    assert made == expected.SerializeToString()
    assert encode_batch([], [], 0, 0, has_more=False) == b""


def test_bodies_beyond_a_frame_are_left_out_and_references_never() -> None:
    refs = [Entry(mailbox_seq=n).SerializeToString() for n in range(500)]
    body = Entry(body_included=True, payload_or_ciphertext=bytes(32 << 10)).SerializeToString()
    made = encode_batch(refs, [Body(body, 0)] * 499 + [NOT_INCLUDED], 9, 9, has_more=False)
    assert len(made) < MAX_FRAME_BYTES
    entries = MailboxBatch.FromString(made).entries
    assert [entry.mailbox_seq for entry in entries] == list(range(500))
    included = sum(entry.body_included for entry in entries)
    assert 100 < included < 130


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(0, 60), st.sampled_from([(1,), (1, 2), (1, 2, 3, 4)]), max_size=20),
    st.integers(1, 9), st.integers(60, 70),
)  # fmt: skip
def test_pages_give_every_entry_once_whatever_their_size(
    groups: dict[int, tuple[int, ...]], max_items: int, w: int
) -> None:
    scene = PullScene()
    for offset, kinds in groups.items():
        scene.add(offset, event_types=kinds)
    scene.move_w(w)
    found: list[int] = []
    after, rounds = -1, 0
    while True:
        reply = scene.pull(after, max_items=max_items)
        found += offsets(reply)
        covered = log_offset_of(reply.covered_through_seq)
        assert covered > after
        after, rounds = covered, rounds + 1
        if not MailboxBatch.FromString(reply.batch).has_more:
            break
    assert covered == w
    assert found == [offset for offset in sorted(groups) for _ in groups[offset]]
