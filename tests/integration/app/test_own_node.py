"""A node stops, dies and loses its servers; what was acknowledged is there afterwards, on both topologies."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qim.app.connect import NodeAddress
from qim.app.own_node import OwnNode, OwnNodeOptions, pids_of
from qim.client.aio import Client
from qim.core.ids import direct_conversation_id
from tests.support.node import APART, MERGED, devices_of, running_node
from tests.support.waiting import wait_for

TOPOLOGIES = [pytest.param(MERGED, id="merged"), pytest.param(APART, id="apart")]
CONVERSATION = direct_conversation_id("ann", "bob")
LINES = 20
CONVERGE_S = 30
ACK_S = 30


async def say(client: Client, texts: list[str]) -> None:
    """Send and wait for every ACK."""
    async with asyncio.timeout(ACK_S):
        for handle in [await client.send(CONVERSATION, text) for text in texts]:
            await handle


def shown(client: Client) -> list[str]:
    return [row.payload.decode() for row in client.store.messages(CONVERSATION)]


async def converge(client: Client, texts: list[str]) -> None:
    async with asyncio.timeout(CONVERGE_S):
        while len(shown(client)) < len(texts):
            await asyncio.sleep(0.02)
    assert shown(client) == texts


def texts_of(part: str) -> list[str]:
    return [f"{part} {number}" for number in range(LINES)]


async def talk(node: OwnNode, part: str) -> None:
    """ann writes; bob has no device."""
    async with devices_of(node) as devices:
        await say(await devices.add("ann"), texts_of(part))


async def everything_is_there(node: OwnNode, texts: list[str]) -> None:
    """A new device of each finds the whole conversation, and it goes on."""
    async with devices_of(node) as devices:
        ann, bob = await devices.add("ann", "new"), await devices.add("bob", "new")
        for client in (ann, bob):
            await converge(client, texts)
        await say(bob, ["and on"])
        for client in (ann, bob):
            await converge(client, [*texts, "and on"])


@pytest.mark.parametrize("options", TOPOLOGIES)
def test_after_ctrl_c_the_same_data(options: OwnNodeOptions) -> None:
    with running_node(options) as node:
        asyncio.run(talk(node, "before"))
        assert node.stop() == 0
        node.start()
        asyncio.run(everything_is_there(node, texts_of("before")))


@pytest.mark.parametrize("options", TOPOLOGIES)
def test_after_kill_9_of_everything_the_same_data(options: OwnNodeOptions) -> None:
    with running_node(options) as node:
        asyncio.run(talk(node, "before"))
        node.kill_all()
        node.start()
        asyncio.run(everything_is_there(node, texts_of("before")))


@pytest.mark.parametrize("options", TOPOLOGIES)
@pytest.mark.parametrize("server", ["redis-core", "redis-mailbox"])
def test_after_kill_9_of_a_server_under_traffic_the_same_data(options: OwnNodeOptions, server: str) -> None:
    async def traffic(node: OwnNode) -> None:
        async with devices_of(node) as devices:
            ann, bob = await devices.add("ann"), await devices.add("bob")
            await say(ann, texts_of("before"))
            killed = node.kill(server)
            await say(ann, texts_of("while"))
            for client in (ann, bob):
                await converge(client, texts_of("before") + texts_of("while"))
            wait_for(lambda: node.processes()[server] not in (0, killed))

    with running_node(options) as node:
        asyncio.run(traffic(node))
        asyncio.run(everything_is_there(node, texts_of("before") + texts_of("while")))


@pytest.mark.parametrize("options", TOPOLOGIES)
def test_three_starts_without_a_message_and_everyone_can_log_in(options: OwnNodeOptions) -> None:
    with running_node(options) as node:
        for _ in range(3):
            assert node.stop() == 0
            node.start()
        asyncio.run(talk(node, "first"))
        asyncio.run(everything_is_there(node, texts_of("first")))


@pytest.mark.parametrize("options", TOPOLOGIES)
def test_a_worker_of_every_role_dies_and_comes_back(options: OwnNodeOptions) -> None:
    async def traffic(node: OwnNode) -> None:
        async with devices_of(node) as devices:
            ann, bob = await devices.add("ann"), await devices.add("bob")
            texts: list[str] = []
            for process in [name for name in node.processes() if not name.startswith("redis-")]:
                node.kill(process)
                await say(ann, [f"while {process} was away"])
                texts.append(f"while {process} was away")
            for client in (ann, bob):
                await converge(client, texts)

    with running_node(options) as node:
        asyncio.run(traffic(node))


def test_workers_and_servers_die_with_their_supervisor(tmp_path: Path) -> None:
    with running_node(MERGED) as node:
        pids = list(node.processes().values())
        node.kill_supervisor()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=30)
        node.start()
        asyncio.run(talk(node, "after"))


def test_a_node_stops_when_the_program_that_wanted_it_is_killed() -> None:
    program = (
        "import time; from qim.app.own_node import OwnNode; from tests.support.node import MERGED\n"
        "node = OwnNode(MERGED); node.start(); print(node.data_dir, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        data_dir = Path(owner.stdout.readline().strip())
        pids = list(pids_of(NodeAddress.read(data_dir).run_dir).values())
        owner.kill()
    try:
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=30)
    finally:
        shutil.rmtree(data_dir.parent)
