from __future__ import annotations

import pytest

from qim.core.visibility import Interval
from qim.errors import StoreUnavailable
from qim.protocol.qim_pb2 import PullSessionList, Session
from qim.shard_workers.mailbox import session_list
from qim.shard_workers.mailbox.bodies import DAY_MS
from qim.shard_workers.mailbox.session_list import SessionListReader
from qim.stores.api import ConversationSeen
from tests.unit.shard_workers.mailbox.bodies_scene import START_MS, TENANT, Scene

AB, AC, GROUP = "dm:alice:bob", "dm:alice:carol", "g:team"


class ListScene(Scene):
    """Alice's conversations: `seen` is her set, `membership` what she may see of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.membership: tuple[Interval, ...] = (Interval(0),)
        self.list = SessionListReader(self, self, self, self.reader)  # type: ignore[arg-type]  # as far as it is asked

    async def conversations(self, tenant_id: str, user_id: str) -> list[ConversationSeen]:
        assert (tenant_id, user_id) == (TENANT, "alice")
        return [ConversationSeen(conversation_id=name, kind="", first_seen_at_ms=START_MS) for name in self.seen]

    async def intervals(self, tenant_id: str, group_id: str, user_id: str) -> tuple[Interval, ...]:
        return self.membership

    def _refusal(self, *_: object) -> None:
        """Groups need no publishing here."""

    async def say(self, conversation_id: str, *lines: str) -> None:
        for line in lines:
            self.clock.now_ms += 1000
            await self.commit_one(conversation_id, line)
        if conversation_id not in self.seen:
            self.seen.append(conversation_id)

    async def sessions(self) -> list[Session]:
        return list((await self.list.pull(TENANT, "alice", PullSessionList())).sessions)


async def test_the_last_active_conversation_comes_first_with_its_head() -> None:
    scene = ListScene()
    await scene.say(AB, "one", "two")
    await scene.say(AC, "three")
    await scene.say(AB, "four")
    first, second = await scene.sessions()
    assert (first.conversation_id, first.latest_conversation_seq) == (AB, 3)
    assert first.preview_or_placeholder == "preview four"
    assert first.last_message_id == first.last_activity_id == (await scene.head(TENANT, AB)).last_message_id
    assert (first.unread_count, first.unread_exact) == (3, False)
    assert (second.conversation_id, second.preview_or_placeholder) == (AC, "preview three")


async def test_a_snapshot_follows_the_one_the_client_has() -> None:
    scene = ListScene()
    assert (await scene.list.pull(TENANT, "alice", PullSessionList())).snapshot_revision == 1
    batch = await scene.list.pull(TENANT, "alice", PullSessionList(snapshot_revision=7))
    assert (batch.snapshot_revision, batch.projection_complete, batch.has_more) == (8, True, False)


async def test_who_left_sees_the_conversation_as_it_was() -> None:
    scene = ListScene()
    await scene.say(GROUP, "one", "two", "three", "four")
    scene.membership = (Interval(1, 3),)
    (session,) = await scene.sessions()
    assert (session.latest_conversation_seq, session.unread_count) == (2, 1)
    assert session.preview_or_placeholder == ""
    assert session.last_message_id == scene.outboxes[GROUP, 2].message_id
    scene.membership = ()
    assert await scene.sessions() == []


async def test_a_group_that_was_only_announced_has_nothing_to_read() -> None:
    scene = ListScene()
    scene.seen = [GROUP]
    (session,) = await scene.sessions()
    assert (session.latest_conversation_seq, session.unread_count, session.unread_exact) == (0, 0, True)


async def test_history_that_is_gone_is_not_unread_and_an_old_preview_not_shown() -> None:
    scene = ListScene()
    await scene.say(AB, "one", "two", "three")
    await scene.forget_history(0, 1, TENANT, AB, 3)
    assert (await scene.sessions())[0].unread_count == 1
    scene.clock.now_ms += 30 * DAY_MS
    (session,) = await scene.sessions()
    assert session.preview_or_placeholder == ""


async def test_an_unreadable_preview_is_a_placeholder_an_unreadable_store_an_error() -> None:
    scene = ListScene()
    await scene.say(AB, "one")
    name = (TENANT, AB)
    head = scene._heads[name]
    scene._heads[name] = type(head)(
        latest_conversation_seq=1, last_message_id=bytes(16), preview_ciphertext=head.preview_ciphertext,
        dek_id=head.dek_id, wrapped_dek=head.wrapped_dek, updated_at_ms=head.updated_at_ms,
    )  # fmt: skip
    assert (await scene.sessions())[0].preview_or_placeholder == ""
    scene.membership = (Interval(0, 2),)
    await scene.say(GROUP, "one", "two", "three")
    scene.failing = StoreUnavailable("gone")
    with pytest.raises(StoreUnavailable):
        await scene.sessions()


async def test_more_than_a_frame_leaves_the_quietest_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = ListScene()
    for n in range(70):
        await scene.say(f"dm:alice:user{n:02}", "hello")
    assert len(await scene.sessions()) == 70
    monkeypatch.setattr(session_list, "LIST_BYTES_MAX", 3000)
    batch = await scene.list.pull(TENANT, "alice", PullSessionList())
    assert 10 < len(batch.sessions) < 40
    assert batch.sessions[0].conversation_id == "dm:alice:user69"
    assert not batch.projection_complete
