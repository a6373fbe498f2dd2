"""A whole node, merged and apart: readiness, metrics, the admin plane over TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from qim.app.cli import main
from qim.app.connect import AdminClient, AdminRefusal
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.tls import client_context
from qim.core.ids import group_conversation_id
from tests.support.node import APART, MERGED, TENANT, devices_of, running_node

TOPOLOGIES = [pytest.param(MERGED, id="merged"), pytest.param(APART, id="apart")]


@pytest.fixture(scope="module", params=TOPOLOGIES)
def node(request: pytest.FixtureRequest) -> Iterator[OwnNode]:
    options: OwnNodeOptions = request.param
    with running_node(options) as running:
        yield running


def test_the_node_is_ready_and_lists_a_metrics_endpoint_of_every_worker(node: OwnNode) -> None:
    async def ask() -> None:
        async with AdminClient(node.address()) as admin:
            assert await admin.problems() == []
            endpoints = await admin.metrics_endpoints()
        workers = {name for name in node.processes() if not name.startswith("redis-")} - {"admin-0"}
        assert {endpoint["process"] for endpoint in endpoints} == workers
        for endpoint in endpoints:
            connector = aiohttp.UnixConnector(path=endpoint["address"].removeprefix("unix://"))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get("http://worker" + endpoint["path"]) as response,
            ):
                assert "mailbox_seq_regression_count" in await response.text()

    asyncio.run(ask())


def test_a_worker_that_is_away_makes_the_node_unready(node: OwnNode) -> None:
    async def ask() -> None:
        victim = next(name for name in node.processes() if "gateway" in name)
        async with AdminClient(node.address()) as admin:
            node.kill(victim)
            assert victim in "".join(await admin.problems())
            async with asyncio.timeout(30):
                while await admin.problems():
                    await asyncio.sleep(0.05)

    asyncio.run(ask())


def test_group_members_come_and_go_by_the_admin_plane(node: OwnNode) -> None:
    async def change() -> None:
        group = "friends"
        conversation = group_conversation_id(group)
        async with devices_of(node) as devices:
            ann, bob = await devices.add("ann"), await devices.add("bob")
            await ann.create_group(group, [])
            await (await ann.send(conversation, "alone"))
            assert await devices.admin.add_members(TENANT, group, ["bob"]) > 0
            assert await devices.admin.add_members(TENANT, group, ["bob"]) == 0
            await (await ann.send(conversation, "together"))
            assert await devices.admin.remove_members(TENANT, group, ["bob"]) > 0
            await (await ann.send(conversation, "alone again"))
            async with asyncio.timeout(30):
                while "together" not in [row.payload.decode() for row in bob.store.messages(conversation)]:
                    await asyncio.sleep(0.02)
            texts = [row.payload.decode() for row in bob.store.messages(conversation) if row.conversation_seq]
            assert "alone" not in texts
            assert "alone again" not in texts

    asyncio.run(change())


def test_a_group_that_does_not_exist(node: OwnNode) -> None:
    async def add() -> None:
        async with AdminClient(node.address()) as admin:
            with pytest.raises(AdminRefusal) as caught:
                await admin.add_members(TENANT, "nobody-made-it", ["bob"])
            assert 400 <= caught.value.status < 500

    asyncio.run(add())


def test_the_admin_plane_speaks_tls_only(node: OwnNode) -> None:
    async def knock() -> None:
        address = node.address()
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://127.0.0.1:{address.admin_port}/healthz")
        context = client_context(Path(address.ca_path), alpn=("http/1.1",))
        context.maximum_version = ssl.TLSVersion.TLSv1_3
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://127.0.0.1:{address.admin_port}/healthz", ssl=context) as response,
        ):
            assert response.status == 200

    asyncio.run(knock())


def test_the_command_line_issues_tokens_and_changes_groups(node: OwnNode, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(node.data_dir)]
    assert main(["token", "ann", "phone", *data]) == 0
    assert capsys.readouterr().out.count(".") == 2
    assert main(["group", "add", "nobody-made-it", "ann", *data]) == 1
    assert capsys.readouterr().err.count("\n") == 1
