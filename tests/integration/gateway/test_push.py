"""PushBatch to sockets: who gets it, who must not, and what a client hears when a push may be missing."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

from qim.errors import ErrorCode
from qim.gateway.listen import TLS_SHUTDOWN_TIMEOUT_S
from qim.obs.metrics import REGISTRY
from qim.protocol import qim_pb2 as pb
from qim.protocol.internal import PushRecipient, encode_push_batch, user_key
from qim.protocol.opcodes import STREAM_REALTIME, InternalOpcode, Opcode
from tests.support.fake_backplane import EPOCH_1
from tests.support.gateway_fixture import TENANT, auth, complete, running_gateway, until


def mark_dirty(device: pb.DeviceTarget, *, shard: int = 0, shard_epoch: int = 1) -> bytes:
    return pb.MarkDirty(devices=[device], shard=shard, shard_epoch=shard_epoch).SerializeToString()


async def test_push_reaches_every_device_once() -> None:
    async with running_gateway() as gateway:
        clients = [await gateway.online("ann", device) for device in ("phone", "tablet")]
        common = pb.Entry(payload_or_ciphertext=b"one body").SerializeToString()
        recipients = [
            PushRecipient(
                user_key(TENANT, "ann"),
                opened.device.connection_id,
                opened.device.session_epoch,
                EPOCH_1 | 30,
                pb.Entry(mailbox_seq=EPOCH_1 | 30).SerializeToString(),
            )
            for opened in gateway.node.opened
        ]
        batch = encode_push_batch(TENANT, common, recipients)
        gateway.backplane.deliver(InternalOpcode.PUSH_BATCH, batch + batch)
        for client in clients:
            for _ in range(2):
                received = await client.receive()
                assert received is not None
                assert (received.opcode, received.stream_id) == (Opcode.PUSH_EVENTS, STREAM_REALTIME)
                assert received.body.events[0].payload_or_ciphertext == b"one body"
            pong = await client.expect(Opcode.PONG, client.send(Opcode.PING, pb.Ping(ping_id=4, client_time=5)))
            assert pong.last_pushed_user_seq == EPOCH_1 | 30
            assert (pong.ping_id, pong.echo_client_time) == (4, 5)
            assert (pong.next_ping_interval_ms, pong.idle_timeout_ms) == (60_000, 130_000)


async def test_pushes_to_other_sessions_are_dropped_and_reported() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        opened = gateway.node.opened[0]
        gateway.node.push(opened, EPOCH_1 | 11, session_epoch=7)
        gateway.node.push(opened, EPOCH_1 | 12, user_id="eve")
        ghost = pb.OpenSession(
            device=pb.DeviceTarget(tenant_id=TENANT, user_id="ann", connection_id=1, session_epoch=3)
        )
        gateway.node.push(ghost, EPOCH_1 | 13)
        pong = await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert pong.last_pushed_user_seq == EPOCH_1 | 10
        stale = [pb.PresenceStale.FromString(body) for body in gateway.backplane.sent(InternalOpcode.PRESENCE_STALE)]
        connection_id = opened.device.connection_id
        assert [(s.device.connection_id, s.device.session_epoch, s.observed_epoch) for s in stale] == [
            (connection_id, 7, 1),
            (connection_id, 1, 1),
            (1, 3, 0),
        ]
        assert [s.user_key for s in stale] == [user_key(TENANT, user) for user in ("ann", "eve", "ann")]


async def test_dirty_is_told_once_shown_in_pong_and_cleared_by_a_pull() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        device = gateway.node.opened[0].device
        for _ in range(2):
            gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, mark_dirty(device))
        await client.expect_error(ErrorCode.MAILBOX_DIRTY, 0)
        pong = await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert pong.mailbox_dirty
        pull = pb.PullMailbox(after_seq=EPOCH_1 | 10, up_to_seq=0)
        await client.expect(Opcode.MAILBOX_BATCH, client.send(Opcode.PULL_MAILBOX, pull))
        pong = await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert not pong.mailbox_dirty
        gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, mark_dirty(device))
        await client.expect_error(ErrorCode.MAILBOX_DIRTY, 0)


async def test_dirty_mark_of_another_session_is_reported_stale() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        other = pb.DeviceTarget(connection_id=gateway.node.opened[0].device.connection_id, session_epoch=9)
        gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, mark_dirty(other))
        pong = await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert not pong.mailbox_dirty
        assert len(gateway.backplane.sent(InternalOpcode.PRESENCE_STALE)) == 1


async def test_dirty_mark_of_a_newer_shard_epoch_opens_again() -> None:
    async with running_gateway() as gateway:
        await gateway.online("ann")
        gateway.node.shard_epoch = 2
        device = gateway.node.opened[0].device
        for shard in range(16):
            gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, mark_dirty(device, shard=shard, shard_epoch=2))
        await until(lambda: len(gateway.node.opened) == 2)
        assert gateway.node.opened[1].reopen


async def test_dirty_before_ready_is_told_with_ready() -> None:
    async with running_gateway() as gateway:
        client, welcome = await gateway.login("ann")
        gateway.backplane.deliver(InternalOpcode.MARK_DIRTY, mark_dirty(gateway.node.opened[0].device))
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))
        await client.expect_error(ErrorCode.MAILBOX_DIRTY, 0)


async def test_overflow_of_the_barrier_drops_the_queue_and_says_so() -> None:
    soft = {"bytes": 1 << 20, "items": 3}
    async with running_gateway(conn_send_soft_watermark=soft) as gateway:
        client, welcome = await gateway.login("ann")
        for seq in range(11, 16):
            gateway.node.push(gateway.node.opened[0], EPOCH_1 | seq)
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))
        await client.expect_error(ErrorCode.MAILBOX_DIRTY, 0)
        gateway.node.push(gateway.node.opened[0], EPOCH_1 | 16)
        assert (await client.expect(Opcode.PUSH_EVENTS)).last_pushed_user_seq == EPOCH_1 | 16


async def test_client_that_does_not_read_turns_dirty_and_recovers() -> None:
    watermarks: dict[str, Any] = {
        "conn_send_soft_watermark": {"bytes": 200_000, "items": 2000},
        "conn_send_low_watermark": 50_000,
    }
    before = REGISTRY.get_sample_value("slow_connections_degraded") or 0.0
    async with running_gateway(**watermarks) as gateway:
        little = socket.socket()
        little.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client = await gateway.client(sock=little)
        request_id = client.send(Opcode.AUTH, auth("ann", applied=gateway.node.watermark))
        welcome = await client.expect(Opcode.AUTH_OK, request_id)
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        opened = gateway.node.opened[0]
        body = pb.Entry(payload_or_ciphertext=b"x" * 20_000).SerializeToString()
        count = 800
        degraded = set()
        for seq in range(11, 11 + count):
            ref = pb.Entry(mailbox_seq=EPOCH_1 | seq).SerializeToString()
            recipient = PushRecipient(
                user_key(TENANT, "ann"), opened.device.connection_id, opened.device.session_epoch, EPOCH_1 | seq, ref
            )
            gateway.backplane.deliver(InternalOpcode.PUSH_BATCH, encode_push_batch(TENANT, body, [recipient]))
            degraded.add(REGISTRY.get_sample_value("slow_connections_degraded"))
            if seq % 40 == 0:
                await asyncio.sleep(0)
        assert degraded == {before, before + 1}
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        seen = []
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            received = await client.receive()
            assert received is not None
            if received.opcode is Opcode.ERROR:
                assert received.body.code == ErrorCode.MAILBOX_DIRTY
                break
            seen.append(received.body.events[0].mailbox_seq)
        assert seen == sorted(seen)
        assert len(seen) < count, "what the client did not take was dropped, not kept in memory"
        last = EPOCH_1 | (11 + count)
        gateway.node.push(opened, last)
        while (received := await client.receive()) is not None and received.opcode is Opcode.PUSH_EVENTS:
            if received.body.last_pushed_user_seq == last:
                break
        assert received is not None
        assert received.body.last_pushed_user_seq == last, "a connection that reads again is pushed again"
        assert REGISTRY.get_sample_value("slow_connections_degraded") == before


async def test_client_that_does_not_read_is_gone_soon_after_it_reads_its_end() -> None:
    async with running_gateway() as gateway:
        little = socket.socket()
        little.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        slow = await gateway.client(sock=little)
        request_id = slow.send(Opcode.AUTH, auth("ann", applied=gateway.node.watermark))
        welcome = await slow.expect(Opcode.AUTH_OK, request_id)
        await slow.expect(Opcode.ONLINE_READY, complete(slow, welcome.sync_to_seq))
        node = gateway.role._node
        assert node is not None
        (connection,) = node._table.by_id.values()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        opened = gateway.node.opened[0]
        while not connection._paused:
            gateway.node.push(opened, EPOCH_1 | 11, payload=b"x" * 50_000)
            await asyncio.sleep(0)
        await gateway.online("ann")
        assert len(node) == 2
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        last = None
        while (received := await slow.receive()) is not None:
            last = received.opcode
        assert last is Opcode.KICKED
        await until(lambda: len(node) == 1, timeout_s=TLS_SHUTDOWN_TIMEOUT_S / 2)
