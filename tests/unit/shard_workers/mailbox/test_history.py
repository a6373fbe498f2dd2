from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.core.rate_limit import RateLimiter
from qim.core.visibility import OPEN_END, Interval, is_visible
from qim.errors import ErrorCode, WireError
from qim.protocol.qim_pb2 import DELETED, NEWER, OLDER, Direction, HistoryBatch, PullHistory
from qim.shard_workers.mailbox.bodies import SEQ_BUCKET_WIDTH
from qim.shard_workers.mailbox.history import EMPTY_BUCKET_SCAN_MAX, LIMIT_MAX, HistoryReader, visible_seqs
from qim.stores.api import ConversationHead
from tests.unit.shard_workers.mailbox.bodies_scene import TENANT, Scene

AB = "dm:alice:bob"
GROUP = "g:g"


class HistoryScene(Scene):
    """`membership` is what the requester may see of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.membership: tuple[Interval, ...] = ()
        self.history = HistoryReader(self, self, self.reader, self.clock, RateLimiter(per_ms=200, burst=5))

    async def intervals(self, tenant_id: str, group_id: str, user_id: str) -> tuple[Interval, ...]:
        return self.membership

    def _refusal(self, *_: object) -> None:
        """Groups need no publishing here."""

    async def pull(
        self, conversation_id: str, direction: Direction, anchor: int = 0, *, limit: int = 0, max_bytes: int = 0
    ) -> HistoryBatch:
        self.clock.now_ms += 200
        request = PullHistory(
            conversation_id=conversation_id, direction=direction, anchor_conversation_seq=anchor, limit=limit,
            max_bytes=max_bytes,
        )  # fmt: skip
        return await self.history.pull(TENANT, "alice", request)


def seqs(batch: HistoryBatch) -> list[int]:
    return [message.conversation_seq for message in batch.messages]


async def scene_with(count: int, conversation_id: str = AB) -> HistoryScene:
    scene = HistoryScene()
    for n in range(count):
        await scene.commit_one(conversation_id, f"line {n + 1}", sender="alice" if n % 2 else "bob")
    return scene


async def test_the_newest_page_and_scrolling_up() -> None:
    scene = await scene_with(7)
    newest = await scene.pull(AB, OLDER, limit=3)
    assert (seqs(newest), newest.has_more) == ([5, 6, 7], True)
    assert (newest.latest_conversation_seq, newest.earliest_available_conversation_seq) == (7, 1)
    assert newest.messages[0].payload_or_ciphertext == b"line 5"
    assert (seqs(await scene.pull(AB, OLDER, 7, limit=3))) == [5, 6, 7]
    last = await scene.pull(AB, OLDER, 3, limit=3)
    assert (seqs(last), last.has_more) == ([1, 2, 3], False)


async def test_filling_forward_moves_on_even_one_by_one() -> None:
    scene = await scene_with(4)
    anchor, found = 0, []
    while True:
        batch = await scene.pull(AB, NEWER, anchor, limit=1)
        found += seqs(batch)
        if not batch.has_more:
            break
        anchor = found[-1]
    assert found == [1, 2, 3, 4]


async def test_only_ones_own_messages_tell_their_client_id() -> None:
    scene = await scene_with(2)
    batch = await scene.pull(AB, OLDER)
    assert [(message.sender_id, message.client_message_id) for message in batch.messages] == [
        ("bob", ""),
        ("alice", "line 2"),
    ]


async def test_a_group_shows_what_was_said_while_one_was_in_it() -> None:
    scene = await scene_with(12, GROUP)
    scene.membership = (Interval(1, 4), Interval(6, 9))
    assert seqs(await scene.pull(GROUP, OLDER)) == [2, 3, 7, 8]
    assert seqs(await scene.pull(GROUP, NEWER, 3)) == [7, 8]
    batch = await scene.pull(GROUP, OLDER, 7, limit=2)
    assert (seqs(batch), batch.has_more) == ([3, 7], True)
    assert (batch.latest_conversation_seq, batch.earliest_available_conversation_seq) == (8, 2)


@pytest.mark.parametrize("conversation_id", [GROUP, "g:unknown", "dm:bob:carol", "r:room", "nonsense", ""])
async def test_foreign_and_unknown_conversations_are_refused_alike(conversation_id: str) -> None:
    scene = await scene_with(3, GROUP)
    with pytest.raises(WireError) as refusal:
        await scene.pull(conversation_id, OLDER)
    assert (refusal.value.code, refusal.value.detail) == (ErrorCode.PERMISSION_DENIED, "")


async def test_limits_of_a_page() -> None:
    scene = await scene_with(LIMIT_MAX + 9)
    assert len((await scene.pull(AB, OLDER)).messages) == 50
    assert len((await scene.pull(AB, OLDER, limit=9999)).messages) == LIMIT_MAX
    small = await scene.pull(AB, OLDER, limit=10, max_bytes=400)
    assert 1 < len(small.messages) < 10
    assert small.has_more
    assert seqs(small)[-1] == LIMIT_MAX + 9, "the page keeps what is nearest to the anchor"
    assert len((await scene.pull(AB, OLDER, limit=10, max_bytes=1)).messages) == 1


async def test_the_rate_is_limited_per_user() -> None:
    scene = await scene_with(1)
    request = PullHistory(conversation_id=AB, direction=OLDER)
    for _ in range(5):
        await scene.history.pull(TENANT, "alice", request)
    with pytest.raises(WireError) as refusal:
        await scene.history.pull(TENANT, "alice", request)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (ErrorCode.RATE_LIMITED, 200)
    await scene.history.pull(TENANT, "bob", request)


async def test_a_deleted_message_is_there_without_its_body() -> None:
    scene = HistoryScene()
    await scene.commit_one(AB, "text", state=DELETED)
    (message,) = (await scene.pull(AB, OLDER)).messages
    assert (message.state, message.body_included, message.payload_or_ciphertext) == (DELETED, False, b"")


async def test_an_endless_row_of_empty_buckets_ends_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = await scene_with(1)
    head = ConversationHead(latest_conversation_seq=SEQ_BUCKET_WIDTH * 40)

    async def far(tenant_id: str, conversation_id: str) -> ConversationHead:
        return head

    monkeypatch.setattr(scene, "head", far)
    batch = await scene.pull(AB, OLDER, limit=LIMIT_MAX)
    assert (seqs(batch), batch.has_more) == ([], False)
    assert len({bucket for _, bucket, _ in scene.range_reads}) == EMPTY_BUCKET_SCAN_MAX + 1


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(sorted), st.integers(0, 32), st.booleans(),
    st.integers(1, 5), st.integers(0, 30),
)  # fmt: skip
def test_sequences_offered_are_exactly_the_visible_ones_in_order(
    bounds: list[int], anchor: int, newer: bool, earliest: int, latest: int
) -> None:
    ends = [*bounds, OPEN_END] if len(bounds) % 2 else bounds
    intervals = tuple(Interval(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True))
    head = ConversationHead(latest_conversation_seq=latest, earliest_available_conversation_seq=earliest)
    expected = [
        seq
        for seq in range(earliest, latest + 1)
        if is_visible(intervals, seq) and (seq > anchor if newer else not anchor or seq <= anchor)
    ]
    found = list(visible_seqs(intervals, head, anchor, newer=newer))
    assert found == (expected if newer else expected[::-1])
