"""The injectors of faults really act: on a node of their own, seen from outside of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from qim.app.own_node import OwnNode
from qim.backplane.unix import socket_path
from qim.registry.api import LeaseKind
from qim.runtime.crash_point import AFTER_CHUNK, CRASH_POINTS
from tests.support.faults.clock import HostClock
from tests.support.faults.kill import CrashPoints, kill, kill_node
from tests.support.faults.link_cut import link_cut, open_sockets
from tests.support.faults.older_aof import OlderAof
from tests.support.faults.pause import is_stopped, paused
from tests.support.faults.registry_loss import registry_lost
from tests.support.node import APART, devices_of, options_with
from tests.support.supervised import is_alive
from tests.support.takeover import TENTH, Leases, conversation_with, talk_on
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> CrashPoints:
    return CrashPoints(tmp_path_factory.mktemp("crashes"))


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> HostClock:
    return HostClock(tmp_path_factory.mktemp("clock") / "step")


@pytest.fixture(scope="module")
def node(crashes: CrashPoints, clock: HostClock) -> Iterator[OwnNode]:
    """One for all tests of this file; each leaves it working."""
    options = options_with(APART, append_chunk_members="1", **TENTH)
    with OwnNode(clock.options(crashes.options(options))) as started:
        yield started


def test_kill_returns_when_there_is_another_process(node: OwnNode) -> None:
    before = node.pid("writer-1")
    assert kill(node, "writer-1") < 10
    assert node.pid("writer-1") != before
    assert not is_alive(before)


def test_kill_node_starts_everything_anew(node: OwnNode) -> None:
    before = node.processes()
    kill_node(node)
    after = node.processes()
    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())


def test_a_crash_point_kills_the_one_that_passes(node: OwnNode, crashes: CrashPoints) -> None:
    """Every point but the one after a chunk, which takes more members than people in this test."""

    async def run() -> None:
        async with devices_of(node) as devices, talk_on(devices) as talk:
            for point in CRASH_POINTS:
                if point == AFTER_CHUNK:
                    continue
                before = node.processes()
                crashes.arm(point)
                await talk.say(point)
                async with asyncio.timeout(20):
                    while crashes.is_armed(point) or node.processes() == before or not all(node.processes().values()):
                        await asyncio.sleep(0.02)
                died = {name for name, pid in node.processes().items() if pid != before[name]}
                assert len(died) == 1, (point, died)
            await talk.check()

    asyncio.run(run())


def test_a_crash_point_after_a_chunk(node: OwnNode, crashes: CrashPoints) -> None:
    async def run() -> None:
        async with devices_of(node) as devices:
            ann = await devices.add("ann")
            await ann.create_group("large", [f"member{number}" for number in range(499)])
            crashes.arm(AFTER_CHUNK)
            before = node.processes()
            handles = [await ann.send("g:large", f"{number}") for number in range(60)]
            async with asyncio.timeout(30):
                while crashes.is_armed(AFTER_CHUNK):
                    await asyncio.sleep(0.02)
                for handle in handles:
                    await handle
            died = {name for name, pid in node.processes().items() if pid != before[name]}
            assert died < {"mailbox-0", "mailbox-1"}

    try:
        asyncio.run(run())
    finally:
        crashes.disarm(AFTER_CHUNK)


def test_an_unknown_crash_point_is_refused(crashes: CrashPoints) -> None:
    with pytest.raises(ValueError, match="no crash point"):
        crashes.arm("somewhere")


def test_paused_stops_and_goes_on(node: OwnNode) -> None:
    pid = node.pid("admin-0")
    with paused(pid):
        wait_for(lambda: is_stopped(pid))
    wait_for(lambda: not is_stopped(pid))
    assert node.pid("admin-0") == pid


def test_a_server_comes_back_with_what_it_held_at_the_copy(node: OwnNode) -> None:
    older = OlderAof(node)
    server = redis.Redis.from_url(node.address().mailbox_address)
    server.set("fault:kept", "1")
    time.sleep(0.1)
    older.copy()
    server.set("fault:lost", "1")
    older.restart()
    server.close()
    server = redis.Redis.from_url(node.address().mailbox_address)

    def loaded() -> bool:
        try:
            return bool(server.ping())
        except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
            return False

    wait_for(loaded)
    assert server.get("fault:kept") == b"1"
    assert server.get("fault:lost") is None
    server.delete("fault:kept")
    server.close()


def test_a_stepped_clock_is_that_of_every_process(node: OwnNode, clock: HostClock) -> None:
    """Ids carry the writer's clock: an hour later by the step, not by waiting."""

    async def sent_at_ms() -> int:
        async with devices_of(node) as devices:
            ann = await devices.add("ann")
            await devices.add("peer0")
            await (await ann.send(conversation_with("peer0"), "what time is it"))
            rows = ann.store.messages(conversation_with("peer0"))
            return int.from_bytes(rows[-1].message_id[:6], "big")

    before = asyncio.run(sent_at_ms())
    clock.step(2_000)
    after = asyncio.run(sent_at_ms())
    clock.set_right()
    assert after - before >= 2_000


def test_a_lost_registry_costs_one_process_its_leases(node: OwnNode) -> None:
    leases = Leases(node)
    both = {"mailbox-0", "mailbox-1"}
    leases.wait_for_owners(LeaseKind.MAILBOX_SHARD, both)
    with registry_lost(node, "mailbox-0") as cut:
        assert cut >= 3, "message, log and registry have a connection each"
        leases.wait_for_owners(LeaseKind.MAILBOX_SHARD, {"mailbox-1"})
    leases.wait_for_owners(LeaseKind.MAILBOX_SHARD, both)


def test_a_cut_link_stays_cut_and_comes_back(node: OwnNode) -> None:
    run_dir = Path(node.address().run_dir)
    gateway, path = node.pid("gateway-0"), socket_path(run_dir, "writer-0")

    def links() -> int:
        found = open_sockets(gateway, path)
        for one in found:
            one.close()
        return len(found)

    wait_for(lambda: links() == 1)
    with link_cut(node, "gateway-0", "writer-0") as cut:
        assert cut >= 1
        wait_for(lambda: links() == 0)
        time.sleep(1.0)
        assert links() == 0
    wait_for(lambda: links() == 1)
