"""Life of a gateway worker: start, heartbeats, drain, stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qim.errors import StartupError
from qim.presence.shm import table_path
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.registry.api import RouteMap
from tests.support.gateway_fixture import Gateway, auth, running_gateway, text, until


async def test_start_connects_to_everybody_and_serves() -> None:
    async with running_gateway() as gateway:
        assert gateway.backplane.connected == ["writer-0", "mailbox-0", "gateway-1"]
        assert gateway.role.ready()
        assert table_path(gateway.run_dir, "gateway-0").exists()
    assert not gateway.role.ready()
    assert not table_path(gateway.run_dir, "gateway-0").exists()


async def test_not_ready_before_start_nor_without_owners(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, {}, {})
    assert not gateway.role.ready()
    gateway.backplane.deliver(InternalOpcode.PUSH_BATCH, b"")
    gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, b"")
    gateway.backplane.deliver(InternalOpcode.REPLACE_SESSION, b"")
    gateway.backplane.link("mailbox-0", True)
    gateway.routes.grant(2)
    await gateway.role.start()
    assert gateway.role.ready()
    gateway.routes.change(RouteMap(3, {}))
    assert not gateway.role.ready()
    await gateway.role.stop()


async def test_start_says_what_is_wrong(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, {}, {"presence_slots_per_worker": 100})
    with pytest.raises(StartupError, match="power of two"):
        await gateway.role.start()
    await gateway.role.stop()


async def test_drain_answers_what_was_accepted_then_closes() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        idle = await gateway.online("bob")
        gate = asyncio.Event()
        honest = gateway.node.submit_send

        async def wait(peer: str, body: bytes) -> bytes:
            await gate.wait()
            return await honest(peer, body)

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = wait
        request_id = client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1"))
        await until(lambda: len(gateway.backplane.asked(InternalOpcode.SUBMIT_SEND)) == 1)
        port = gateway.role.port
        drain = asyncio.get_running_loop().create_task(gateway.role.drain())
        await until(lambda: not gateway.role.ready())
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        gate.set()
        await client.expect(Opcode.SEND_ACK, request_id)
        await client.expect_closed()
        await idle.expect_closed()
        await drain
        closed = [pb.CloseSession.FromString(b) for b in gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)]
        assert sorted(c.device.user_id for c in closed) == ["ann", "bob"]


async def test_drain_does_not_wait_for_ever() -> None:
    async with running_gateway(submit_timeout_ms=200) as gateway:
        client = await gateway.client()

        async def silent(peer: str, body: bytes) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

        gateway.backplane.answers[InternalOpcode.OPEN_SESSION] = silent
        client.send(Opcode.AUTH, auth("ann"))
        await until(lambda: len(gateway.backplane.asked(InternalOpcode.OPEN_SESSION)) == 1)
        async with asyncio.timeout(5):
            await gateway.role.drain()


async def test_stop_without_drain_reports_every_session() -> None:
    async with running_gateway() as gateway:
        clients = [await gateway.online(name) for name in ("ann", "bob")]
        await gateway.role.stop()
        assert len(gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)) == 2
        for client in clients:
            await client.expect_closed()


async def test_a_defect_in_one_request_leaves_the_worker_alive() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")

        async def broken(peer: str, body: bytes) -> bytes:
            raise RuntimeError("defect")

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = broken
        client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1"))
        await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert gateway.failures == []
