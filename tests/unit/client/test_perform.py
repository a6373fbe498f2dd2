"""Actions meet the store and those who wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from qim.client.actions import (
    Apply,
    Cursor,
    Disconnect,
    PreferEndpoint,
    PullFinished,
    Ready,
    Rebuild,
    Reply,
    SendFailed,
    Sent,
)
from qim.client.dedup import DedupWindow
from qim.client.events import (
    ClientEvent,
    MessageFailed,
    MessageReceived,
    MessageSent,
    RequestFailed,
    SendRefused,
    SendResult,
    StateChanged,
)
from qim.client.history import HistoryReader, Rebuilding
from qim.client.pending import Pending
from qim.client.perform import PREFERRED_ENDPOINT, REBUILD, Performer
from qim.client.store import LocalStore
from qim.client.timeline import row_from_entry
from qim.core.seq import compose_message_id
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from tests.unit.client.scene import DM, NOW_MS, entry

MESSAGE_ID = compose_message_id(10_004, 0, 1, 0)


class Stage:
    def __init__(self, commit_interval_ms: int = 1_000) -> None:
        self.store = LocalStore()
        self.events: list[ClientEvent] = []

        async def no_history(*_: Any) -> None:
            return None

        rebuilding = Rebuilding(no_history, lambda listed: {}, lambda: None)
        self.history = HistoryReader(no_history, lambda *_: None, lambda *_: None, rebuilding)
        history = self.history
        self.performer = Performer("alice", self.store, DedupWindow(), history, self.events.append, commit_interval_ms)
        self.do = self.performer.do


@pytest.fixture
async def stage() -> Any:
    made = Stage()
    yield made
    made.performer.commit()
    made.store.close()


async def test_a_rebuild_survives_the_end_of_the_process_and_begins_once_live(stage: Stage) -> None:
    """The empty cursor and the wish share a transaction: one without the other would leave a gap for ever."""
    stage.do([Rebuild(), Apply(rows=[], dedup=[], cursor=Cursor(), durable=True)])
    assert stage.store.meta(REBUILD)
    assert not stage.store.writing
    assert not stage.history._rebuild_wanted
    stage.do([Ready()])
    assert stage.history._rebuild_wanted
    stage.store.set_meta(REBUILD, "")


async def test_pushes_share_a_transaction_and_a_cursor_ends_it(stage: Stage) -> None:
    stage.do([Apply(rows=[row_from_entry(entry(10))], dedup=[])])
    assert stage.store.writing
    stage.do([Apply(rows=[row_from_entry(entry(11))], dedup=[], cursor=Cursor(b"t", 11), durable=True)])
    assert not stage.store.writing
    assert [e.row.conversation_seq for e in stage.events if isinstance(e, MessageReceived)] == [10, 11]


async def test_interval_zero_commits_each_time() -> None:
    stage = Stage(commit_interval_ms=0)
    stage.do([Apply(rows=[row_from_entry(entry(10))], dedup=[])])
    assert not stage.store.writing
    stage.store.close()


async def test_a_row_the_store_knows_is_no_event(stage: Stage) -> None:
    apply = Apply(rows=[row_from_entry(entry(10))], dedup=[])
    stage.do([apply, apply])
    assert len(stage.events) == 1


async def test_sent_settles_row_handle_and_event(stage: Stage) -> None:
    request = pb.SendMessage(client_message_id="mine", conversation_id=DM, payload=b"hi")
    stage.store.add_pending(Pending(request, NOW_MS))
    handle: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
    stage.performer.handles["mine"] = handle
    stage.do([Sent(request=request, message_id=MESSAGE_ID, conversation_seq=4)])
    assert await handle == SendResult(MESSAGE_ID, 4)
    assert stage.store.pending() == []
    (row,) = stage.store.messages(DM)
    assert (row.sender_id, row.payload, row.conversation_seq) == ("alice", b"hi", 4)
    assert stage.events == [MessageSent(conversation_id=DM, client_message_id="mine", result=SendResult(MESSAGE_ID, 4))]
    stage.do([Apply(rows=[row_from_entry(entry(130, conversation_seq=4, own="mine"))], dedup=[])])
    assert len(stage.events) == 1, "the own entry is the same bubble"


async def test_a_room_message_leaves_no_row(stage: Stage) -> None:
    request = pb.SendMessage(client_message_id="mine", conversation_id="r:hall")
    stage.do([Sent(request=request, message_id=MESSAGE_ID, conversation_seq=0, room_seq=9)])
    assert stage.store.message_count() == 0


async def test_failed_keeps_the_message_and_tells(stage: Stage) -> None:
    request = pb.SendMessage(client_message_id="mine", conversation_id=DM)
    stage.store.add_pending(Pending(request, NOW_MS))
    handle: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
    stage.performer.handles["mine"] = handle
    stage.do([SendFailed(client_message_id="mine", code=15, detail="group_exists", resendable=False)])
    with pytest.raises(SendRefused, match="PERMISSION_DENIED group_exists"):
        await handle
    assert len(stage.store.pending(failed=True)) == 1
    assert isinstance(stage.events[0], MessageFailed)


async def test_replies_find_their_request(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    good: asyncio.Future[Message] = loop.create_future()
    bad: asyncio.Future[Message] = loop.create_future()
    lost: asyncio.Future[Message] = loop.create_future()
    stage.performer.replies.update({1: good, 2: bad, 3: lost})
    error = pb.Error(code=pb.RATE_LIMITED, retry_after_ms=70)
    stage.do([Reply(request_id=1, message=pb.HistoryBatch()), Reply(request_id=2, error=error), Reply(request_id=9)])
    assert await good == pb.HistoryBatch()
    with pytest.raises(RequestFailed) as refused:
        await bad
    assert (refused.value.code, refused.value.retry_after_ms) == (ErrorCode.RATE_LIMITED, 70)
    stage.performer.fail_replies()
    with pytest.raises(RequestFailed, match="connection lost"):
        await lost


async def test_counts_and_marks(stage: Stage) -> None:
    assert stage.do([Ready(), PullFinished(covered_through_seq=5)]) is None
    assert (stage.performer.logins, stage.performer.finished_pulls) == (1, 1)
    assert stage.events == [StateChanged(state="online")]
    stage.do([PreferEndpoint(endpoint="h:1")])
    assert stage.store.meta(PREFERRED_ENDPOINT) == "h:1"
    disconnect = Disconnect(reason="link_dead")
    assert stage.do([disconnect]) is disconnect
