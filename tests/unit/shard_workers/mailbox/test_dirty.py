from __future__ import annotations

import asyncio

from qim.shard_workers.mailbox.dirty import RETRY_MS, SPREAD_PER_DEVICE_MS, DirtySpreader
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex
from tests.unit.shard_workers.pipeline import Gateway, Hub

SPREAD_MS = 5000.0


class Scene:
    def __init__(self, devices: int = 1) -> None:
        self.hub = Hub()
        self.backplane = self.hub.backplane("mailbox-0")
        self.gateway = Gateway("gateway-0")
        self.gateway.attach(self.hub.backplane("gateway-0"))
        self.index = OnlineIndex()
        self.devices = [
            OnlineDevice("t", f"u{n}", "d", gateway="gateway-0", connection_id=n, session_epoch=1, shard=n % 2, lane=0)
            for n in range(devices)
        ]
        for device in self.devices:
            self.index.open(device)
        self.dirty = DirtySpreader(self.backplane, self.index, SPREAD_MS)
        self.backplane.connect("gateway-0")

    def sent(self, now_ms: float) -> int:
        """Marks sent by a tick."""
        before = len(self.dirty)
        self.dirty.tick(now_ms, {0: 7, 1: 8})
        return before - len(self.dirty)


async def test_a_mark_is_sent_once_with_the_epoch_of_its_shard() -> None:
    scene = Scene(2)
    scene.dirty.mark(scene.devices, 0)
    scene.dirty.mark(scene.devices, 0)
    assert scene.sent(0) == 2
    assert scene.sent(1000) == 0
    await asyncio.sleep(0)
    assert {(frame.shard, frame.shard_epoch) for frame in scene.gateway.dirty} == {(0, 7), (1, 8)}


async def test_many_marks_are_spread() -> None:
    scene = Scene(int(SPREAD_MS / SPREAD_PER_DEVICE_MS) + 500)
    scene.dirty.mark_all(scene.devices, 0)
    early = scene.sent(SPREAD_MS / 2)
    assert 0.4 < early / len(scene.devices) < 0.6
    assert scene.sent(SPREAD_MS) == len(scene.devices) - early


async def test_few_marks_do_not_wait_for_many_that_are_not_there() -> None:
    scene = Scene(40)
    scene.dirty.mark_all(scene.devices[:20], 0)
    assert scene.sent(20 * SPREAD_PER_DEVICE_MS) == 20
    scene.dirty.mark_all(scene.devices[:20], 0)
    scene.dirty.mark_all(scene.devices[20:], 0)
    assert scene.sent(20 * SPREAD_PER_DEVICE_MS) < 40, "those of two shards that died together share the time"
    scene.dirty.tick(40 * SPREAD_PER_DEVICE_MS, {0: 7, 1: 8})
    assert len(scene.dirty) == 0


async def test_a_mark_waits_for_a_link_and_dies_with_its_connection() -> None:
    scene = Scene(2)
    scene.hub.down.add("gateway-0")
    scene.dirty.mark(scene.devices, 0)
    assert scene.sent(0) == 0
    scene.index.close("t", "u0", "gateway-0", 0)
    scene.hub.down.clear()
    assert scene.sent(RETRY_MS) == 2
    assert len(scene.dirty) == 0


async def test_a_mark_survives_a_session_that_was_opened_again() -> None:
    """A reopened session is another object in the index, but the same connection, still a push short."""
    scene = Scene()
    scene.dirty.mark(scene.devices, 0)
    scene.index.open(
        OnlineDevice("t", "u0", "d", gateway="gateway-0", connection_id=0, session_epoch=1, shard=0, lane=0)
    )
    scene.dirty.tick(0, {0: 9})
    await asyncio.sleep(0)
    assert [(frame.shard_epoch, len(frame.devices)) for frame in scene.gateway.dirty] == [(9, 1)]


async def test_a_mark_names_the_session_that_replaced_the_one_it_was_made_for() -> None:
    """A client whose login was refused may AUTH again on its connection: the gateway drops what names the old epoch."""
    scene = Scene()
    scene.dirty.mark_all(scene.devices, 0)
    again = OnlineDevice("t", "u0", "d", gateway="gateway-0", connection_id=0, session_epoch=2, shard=0, lane=0)
    scene.index.open(again)
    scene.dirty.mark([again], 0)
    assert scene.sent(SPREAD_MS) == 1
    await asyncio.sleep(0)
    assert [device.session_epoch for frame in scene.gateway.dirty for device in frame.devices] == [2]


async def test_a_dropped_frame_marks_every_connection_of_its_gateway() -> None:
    scene = Scene(3)
    scene.dirty.gateway_missed("gateway-0")
    now = scene.sent(0)
    later = scene.sent(SPREAD_MS)
    await asyncio.sleep(0)
    assert scene.gateway.dirty_connections() == {0, 1, 2}
    assert now + later <= 3


async def test_a_link_that_comes_back_marks_everybody_and_a_dead_one_nobody() -> None:
    scene = Scene(3)
    scene.dirty.link_changed("gateway-0", False, 0)
    scene.dirty.gateway_missed("gateway-0")
    scene.dirty.tick(0, {})
    assert len(scene.dirty) == 0
    scene.dirty.link_changed("gateway-0", True, 0)
    assert len(scene.dirty) == 3
    assert scene.sent(SPREAD_MS) == 3
