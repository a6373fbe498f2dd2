"""Heartbeats, deadlines and connections that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

from qim.obs import metrics
from qim.presence.shm import PresenceView, table_path
from qim.protocol import qim_pb2 as pb
from qim.protocol.header import encode_header
from qim.protocol.opcodes import InternalOpcode, Opcode
from tests.support.gateway_fixture import auth, running_gateway, until

BEFORE_AUTH_MS = 300
HEARTBEATS: dict[str, Any] = {
    "ping_interval_initial": 100,
    "idle_timeout": {"next_ping_interval_multiplier": 2, "plus_ms": 100},
    "unauth_connection_timeout": BEFORE_AUTH_MS,
}


async def test_idle_connections_are_closed_and_active_ones_are_not() -> None:
    async with running_gateway(**HEARTBEATS) as gateway:
        idle = await gateway.online("idle")
        active = await gateway.online("active")
        for _ in range(8):
            pong = await active.expect(Opcode.PONG, active.send(Opcode.PING))
            await asyncio.sleep(0.1)
        assert pong.idle_timeout_ms == 300
        await idle.expect_closed(timeout_s=0.5)
        await active.expect(Opcode.PONG, active.send(Opcode.PING))


async def test_presence_lease_is_renewed() -> None:
    async with running_gateway(presence_lease_renew=40) as gateway:
        with PresenceView(table_path(gateway.run_dir, "gateway-0")) as view:
            first = view.beat_unix_ms()
            await until(lambda: view.beat_unix_ms() > first)


async def test_half_a_frame_then_silence_is_closed_in_time() -> None:
    async with running_gateway(unauth_connection_timeout=200) as gateway:
        for data in (b"", encode_header(Opcode.AUTH, 100)[:7], encode_header(Opcode.AUTH, 100) + b"half"):
            client = await gateway.client()
            client.send_bytes(data)
            await client.expect_closed()


async def test_connection_that_ends_during_its_login_leaves_nothing_behind() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client()
        gate = asyncio.Event()
        honest = gateway.node.open_session

        async def wait(peer: str, body: bytes) -> bytes:
            await gate.wait()
            return await honest(peer, body)

        gateway.backplane.answers[InternalOpcode.OPEN_SESSION] = wait
        client.send(Opcode.AUTH, auth("ann"))
        await until(lambda: len(gateway.backplane.asked(InternalOpcode.OPEN_SESSION)) == 1)
        client.writer.transport.abort()
        await until(lambda: len(gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)) == 1)
        gate.set()
        with PresenceView(table_path(gateway.run_dir, "gateway-0")) as view:
            assert list(view.entries()) == []
        closed = pb.CloseSession.FromString(gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)[0])
        assert closed.device.session_epoch == 1


async def test_gauges_return_to_where_they_were() -> None:
    def gauges() -> tuple[float, float]:
        online = metrics.REGISTRY.get_sample_value("connections_online")
        waiting = metrics.REGISTRY.get_sample_value("unauth_connection_count")
        return online or 0, waiting or 0

    before = gauges()
    async with running_gateway() as gateway:
        await gateway.client()
        await gateway.online("ann")
        await until(lambda: gauges() == (before[0] + 1, before[1] + 1))
    assert gauges() == before
