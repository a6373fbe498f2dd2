from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from qim.backplane.api import Priority
from qim.errors import StoreUnavailable
from qim.protocol.internal import decode_push_batches
from qim.protocol.qim_pb2 import DispatchEvent, Entry, GroupDispatch, OutboxRecord
from qim.runtime.tasks import TaskSet
from qim.shard_workers.mailbox import push
from qim.shard_workers.mailbox.expand import Dispatch, RecentEvents
from qim.shard_workers.mailbox.lanes import SubTask, Work
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex
from qim.shard_workers.mailbox.push import Covered, PushPump
from tests.unit.shard_workers.mailbox.bodies_scene import TENANT, Scene
from tests.unit.shard_workers.pipeline import Hub

AB = "dm:alice:bob"
MEMBERS = [(0, "alice"), (1, "bob")]


class PushScene:
    """A pump whose frames are kept as (gateway, priority, body)."""

    def __init__(self) -> None:
        self.bodies = Scene()
        self.index = OnlineIndex()
        self.frames: list[tuple[str, Priority, bytes]] = []
        self.takes = True
        self.missed: list[int] = []
        self.missed_gateways: list[str] = []
        self.backplane = Hub().backplane("mailbox-0")
        self.backplane.notify = self._notify  # type: ignore[method-assign]
        self.tasks = TaskSet(lambda name, error: None)
        self.pump = PushPump(
            self.backplane,
            self.index,
            self.bodies.reader,
            self.tasks,
            mailbox_shard_count=16,
            on_missed=lambda devices: self.missed.extend(device.connection_id for device in devices),
            on_gateway_missed=self.missed_gateways.append,
        )

    def _notify(self, peer: str, opcode: int, body: bytes, priority: Priority = Priority.CONTROL) -> bool:
        if self.takes:
            self.frames.append((peer, priority, body))
        return self.takes

    def online(self, user: str, connection: int, gateway: str = "gateway-0", device: str = "d") -> None:
        self.index.open(
            OnlineDevice(
                TENANT, user, device, gateway=gateway, connection_id=connection, session_epoch=3, shard=0, lane=0
            )
        )

    async def covered(
        self, text: str, offset: int, *, inline: bool = True, kinds: Iterable[int] = (1,), conversation_id: str = AB,
        member_count: int = 2,
    ) -> Covered:  # fmt: skip
        seq = await self.bodies.commit_one(conversation_id, text, inline=inline)
        record = OutboxRecord()
        record.CopyFrom(self.bodies.outboxes[conversation_id, seq])
        record.sender_device_id = "phone"
        record.events.extend(DispatchEvent(event_type=kind, audience_all=True, flags=7) for kind in kinds)  # type: ignore[arg-type]
        frame = GroupDispatch(record=record, member_count=member_count)
        dispatch = Dispatch(offset, frame.SerializeToString())
        dispatch.prepare(RecentEvents())
        work = Work(dispatch, 1)
        work.tasks = [SubTask(work, [(0, len(MEMBERS))], MEMBERS, 100, mask=1)]
        return Covered(work, 1, 1 << 48 | offset)

    def pushed(self, connection: int) -> list[Entry]:
        return [
            Entry.FromString(recipient.ref + batch.common)
            for _, _, body in self.frames
            for batch in decode_push_batches(body)
            for recipient in batch.recipients
            if recipient.connection_id == connection
        ]

    def texts(self, connection: int) -> list[str]:
        return [entry.payload_or_ciphertext.decode() for entry in self.pushed(connection)]


async def rest() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_nobody_online_costs_no_body() -> None:
    scene = PushScene()
    scene.pump.push(0, [await scene.covered("text", 0)])
    await rest()
    assert scene.frames == []
    assert scene.bodies.head_reads == 0


async def test_one_frame_per_gateway_and_tick_carries_everybody() -> None:
    scene = PushScene()
    scene.online("alice", 1)
    scene.online("bob", 2)
    scene.online("bob", 3, device="tablet")
    scene.online("bob", 4, gateway="gateway-1", device="tv")
    scene.pump.push(0, [await scene.covered("warm the key", 0)])
    await rest()
    scene.frames.clear()
    scene.pump.push(0, [await scene.covered(f"line {n}", n) for n in (1, 2)])
    await rest()
    assert sorted((gateway, priority) for gateway, priority, _ in scene.frames) == [
        ("gateway-0", Priority.SINGLE_CHAT),
        ("gateway-1", Priority.SINGLE_CHAT),
    ]
    for connection in (1, 2, 3, 4):
        assert scene.texts(connection) == ["line 1", "line 2"]
    (batch, _) = decode_push_batches(scene.frames[0][2])
    assert {recipient.session_epoch for recipient in batch.recipients} == {3}
    assert {recipient.mailbox_seq for recipient in batch.recipients} == {1 << 48 | 1}
    assert len(batch.recipients) == 3, "the body once for all connections of a gateway"


async def test_order_is_kept_behind_a_body_that_must_be_read() -> None:
    scene = PushScene()
    scene.online("bob", 2)
    scene.pump.push(0, [await scene.covered(f"line {n}", n, inline=n != 1) for n in range(3)])
    scene.pump.push(0, [await scene.covered("line 3", 3)])
    await rest()
    assert scene.texts(2) == [f"line {n}" for n in range(4)]
    assert len(scene.bodies.range_reads) == 1


async def test_an_unreadable_body_ends_in_dirty_and_the_rest_goes_on() -> None:
    scene = PushScene()
    scene.online("bob", 2)
    scene.pump.push(0, [await scene.covered("warm the key", 0)])
    await rest()
    scene.bodies.failing = StoreUnavailable("down")
    scene.pump.push(0, [await scene.covered("unreadable", 1, inline=False), await scene.covered("fine", 2)])
    await rest()
    assert scene.texts(2) == ["warm the key", "fine"]
    assert scene.missed == [2]


async def test_more_than_may_wait_ends_in_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "WAITING_MAX", 2)
    scene = PushScene()
    scene.online("bob", 2)
    scene.pump.push(0, [await scene.covered(f"{n}", n, inline=False) for n in range(4)])
    await rest()
    assert scene.texts(2) == ["0", "1"]
    assert scene.missed == [2, 2]


async def test_a_frame_the_link_refused_is_told() -> None:
    scene = PushScene()
    scene.online("bob", 2)
    scene.takes = False
    scene.pump.push(0, [await scene.covered("text", 0)])
    await rest()
    assert scene.missed_gateways == ["gateway-0"]


async def test_a_frame_is_closed_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "FRAME_BYTES_MAX", 600)
    scene = PushScene()
    scene.online("bob", 2)
    scene.pump.push(0, [await scene.covered("x" * 100, n) for n in range(9)])
    await rest()
    assert len(scene.frames) > 2
    assert len(scene.texts(2)) == 9


async def test_a_control_event_does_not_go_back_to_the_device_that_made_it() -> None:
    scene = PushScene()
    scene.online("bob", 2, device="phone")
    scene.online("bob", 3, device="tablet")
    scene.pump.push(0, [await scene.covered("text", 0, kinds=(1, 4))])
    await rest()
    assert [entry.event_ordinal for entry in scene.pushed(2)] == [0]
    assert [entry.event_ordinal for entry in scene.pushed(3)] == [0, 3]


@pytest.mark.parametrize(
    ("conversation_id", "members", "priority"),
    [(AB, 2, Priority.SINGLE_CHAT), ("g:g", 10, Priority.SMALL_GROUP), ("g:g", 100, Priority.LARGE_GROUP)],
)
async def test_the_channel_follows_the_size_of_the_conversation(
    conversation_id: str, members: int, priority: Priority, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = PushScene()
    monkeypatch.setattr(scene.bodies, "_refusal", lambda *_: None)
    scene.online("bob", 2)
    scene.pump.push(0, [await scene.covered("text", 0, conversation_id=conversation_id, member_count=members)])
    await rest()
    assert [found for _, found, _ in scene.frames] == [priority]


async def test_only_the_lanes_that_w_passed_are_pushed() -> None:
    scene = PushScene()
    scene.online("alice", 1)
    scene.online("bob", 2)
    scene.pump.push(0, [await scene.covered("warm the key", 0)])
    await rest()
    scene.frames.clear()
    work = (await scene.covered("text", 1)).work
    (task,) = work.tasks
    work.mask = task.mask = 0b1001
    task.lanes = [(0, 1), (3, 1)]
    _, task.built, _ = work.dispatch.chunk(1 << 48 | 1, task.lanes, task.members)
    for lanes, passed in ((0b1000, [0, 1]), (0b0001, [1, 1]), (0b1001, [2, 2])):
        scene.pump.push(0, [Covered(work, lanes, 1 << 48 | 1)])
        await rest()
        assert [len(scene.texts(connection)) for connection in (1, 2)] == passed
