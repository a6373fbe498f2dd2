"""Background reading of history: what is asked for, in which order, and when it stops asking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qim.client.history import HistoryReader, Rebuilding, contiguous_until
from qim.protocol import qim_pb2 as pb
from tests.unit.client.scene import DM


class Log:
    """A conversation of `size` messages, served in pages; `broken` answers fail."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gone: set[int] = set()
        self.broken = 0
        self.lists = 0
        self.finished = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.asked: list[tuple[pb.Direction, int]] = []
        self.restated: list[int] = []
        self.looked: list[dict[str, tuple[bytes, int]] | None] = []
        self.event = asyncio.Event()

    async def pull(
        self, conversation_id: str, direction: pb.Direction, anchor: int, limit: int
    ) -> pb.HistoryBatch | None:
        self.asked.append((direction, anchor))
        self.event.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if self.broken:
            self.broken -= 1
            return None
        there = [seq for seq in range(1, self.size + 1) if seq not in self.gone]
        if direction == pb.NEWER:
            found = [seq for seq in there if seq > anchor]
            page, more = found[:limit], len(found) > limit
        else:
            found = [seq for seq in there if seq <= (anchor or self.size)]
            page, more = found[-limit:], len(found) > limit
        messages = [
            pb.HistoryMessage(conversation_seq=seq, message_id=bytes(16), client_message_id=f"m{seq}") for seq in page
        ]
        return pb.HistoryBatch(messages=messages, latest_conversation_seq=self.size, has_more=more)

    def restate(self, conversation_id: str, messages: list[pb.HistoryMessage]) -> None:
        self.restated += [m.conversation_seq for m in messages]

    def look(self, conversation_id: str, own: dict[str, tuple[bytes, int]] | None) -> None:
        self.looked.append(own)

    async def sessions(self) -> pb.SessionListBatch | None:
        self.lists += 1
        if self.broken:
            self.broken -= 1
            return None
        return pb.SessionListBatch()

    def finish(self) -> None:
        self.finished += 1

    def reader(self, anchors: dict[str, int] | None = None) -> HistoryReader:
        rebuilding = Rebuilding(self.sessions, lambda listed: dict(anchors or {}), self.finish)
        return HistoryReader(self.pull, self.restate, self.look, rebuilding, spacing_ms=0)


@pytest.fixture
async def tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    started: list[asyncio.Task[None]] = []
    yield started
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def settle(reader: HistoryReader, tasks: list[asyncio.Task[None]]) -> None:
    tasks.append(asyncio.create_task(reader.run()))
    for _ in range(60):
        await asyncio.sleep(0)


async def test_refresh_reads_only_what_was_wanted(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(200)
    reader = log.reader()
    reader.refresh(DM, [7, 9, 120])
    await settle(reader, tasks)
    assert log.restated == [7, 9, 120]
    assert log.asked == [(pb.NEWER, 6), (pb.NEWER, 119)]


async def test_a_message_that_is_gone_is_asked_for_once(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(200)
    log.gone = {7}
    reader = log.reader()
    reader.refresh(DM, [7])
    reader.refresh(DM, [0])
    await settle(reader, tasks)
    assert (log.restated, len(log.asked)) == ([], 1)


async def test_a_look_through_reaches_the_newest_page(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(90)
    reader = log.reader()
    reader.look_through(DM)
    await settle(reader, tasks)
    assert log.asked == [(pb.OLDER, 0)]
    (own,) = log.looked
    assert own is not None
    assert set(own) == {f"m{seq}" for seq in range(41, 91)}


async def test_a_look_through_that_cannot_be_answered_says_so(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(90)
    log.broken = 1
    reader = log.reader()
    reader.look_through(DM)
    await settle(reader, tasks)
    assert log.looked == [None]


async def test_rebuild_pages_to_the_end(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(120)
    reader = log.reader({DM: 10})
    reader.rebuild()
    await settle(reader, tasks)
    assert log.restated == list(range(11, 121))
    assert (log.lists, log.finished) == (1, 1)


async def test_what_is_not_here_at_all_gets_its_newest_page(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(120)
    reader = log.reader({DM: 0})
    reader.rebuild()
    await settle(reader, tasks)
    assert log.restated == list(range(71, 121))
    assert log.finished == 1


async def test_four_conversations_are_filled_at_a_time(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(60)
    reader = log.reader({f"dm:alice:bob{n}": 20 for n in range(6)})
    reader.rebuild()
    await settle(reader, tasks)
    assert len(log.restated) == 6 * 40
    assert log.most_in_flight == 4
    assert log.finished == 1


async def test_a_rebuild_goes_on_after_what_could_not_be_read(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(120)
    log.broken = 1
    reader = log.reader({DM: 10})
    reader.rebuild()
    await settle(reader, tasks)
    assert (log.lists, log.restated, log.finished) == (1, [], 0)
    log.broken = 1
    reader.rebuild()
    reader.resume()
    for _ in range(60):
        await asyncio.sleep(0)
    assert log.finished == 0
    reader.resume()
    for _ in range(60):
        await asyncio.sleep(0)
    assert log.restated == list(range(11, 121))
    assert log.finished == 1


async def test_work_that_failed_waits_for_the_next_occasion(tasks: list[asyncio.Task[None]]) -> None:
    log = Log(10)
    log.broken = 1
    reader = log.reader()
    reader.refresh(DM, [5])
    await settle(reader, tasks)
    assert log.restated == []
    reader.refresh(DM, [6])
    for _ in range(20):
        await asyncio.sleep(0)
    assert log.restated == [5, 6]


@pytest.mark.parametrize(("seqs", "end"), [([], 0), ([4], 4), ([1, 2, 3, 5, 6], 3), ([7, 8], 8)])
def test_contiguous_until(seqs: list[int], end: int) -> None:
    assert contiguous_until(seqs) == end
