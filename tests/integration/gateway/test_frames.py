"""Every kind of frame in every state of a connection, over real TLS."""

from __future__ import annotations

from qim.errors import Detail, ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import UPSTREAM, Opcode
from tests.support.fake_backplane import EPOCH_1
from tests.support.gateway_fixture import auth, complete, running_gateway, text

SERVED = {
    Opcode.AUTH, Opcode.PING, Opcode.PULL_MAILBOX, Opcode.SYNC_COMPLETE, Opcode.SEND_MESSAGE, Opcode.PULL_HISTORY,
    Opcode.CREATE_GROUP, Opcode.LEAVE_GROUP, Opcode.PULL_SESSION_LIST,
}  # fmt: skip


async def test_frames_before_auth_are_refused_and_end_the_connection() -> None:
    async with running_gateway() as gateway:
        for opcode in sorted(UPSTREAM - {Opcode.AUTH}):
            client = await gateway.client()
            request_id = client.send(opcode)
            client.send(Opcode.AUTH, auth("ann"))
            error = await client.expect_error(ErrorCode.PERMISSION_DENIED, request_id)
            assert error.detail == Detail.NOT_AUTHENTICATED
            await client.expect_closed()
        assert gateway.registry.epoch == 0


async def test_unknown_opcodes_are_answered_and_survived() -> None:
    async with running_gateway() as gateway:
        fresh = await gateway.client()
        for client in (fresh, await gateway.online("ann")):
            for opcode in (0x0999, Opcode.AUTH_OK, Opcode.PUSH_EVENTS, 0xF011, 0xFFFF):
                client.send(opcode, b"whatever", request_id=0)
                await client.expect_error(ErrorCode.UPGRADE_REQUIRED, client.send(opcode, b"whatever"))
        await fresh.expect(Opcode.AUTH_OK, fresh.send(Opcode.AUTH, auth("bob")))


async def test_frames_of_later_services_answer_upgrade_required() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        for opcode in sorted(UPSTREAM - SERVED):
            await client.expect_error(ErrorCode.UPGRADE_REQUIRED, client.send(opcode))
        await client.expect(Opcode.PONG, client.send(Opcode.PING))


async def test_bodies_that_do_not_parse_are_refused_alone() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        for opcode in sorted(SERVED - {Opcode.AUTH, Opcode.SYNC_COMPLETE}):
            error = await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(opcode, b"\xff\xff\xff"))
            assert error.detail == Detail.BAD_REQUEST
        syncing, _ = await gateway.login("bob")
        await syncing.expect_error(ErrorCode.PERMISSION_DENIED, syncing.send(Opcode.SYNC_COMPLETE, b"\xff"))
        await client.expect(Opcode.SEND_ACK, client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1")))


async def test_barrier_lifts_only_when_everything_was_answered() -> None:
    async with running_gateway() as gateway:
        gateway.node.mailbox = [EPOCH_1 | seq for seq in (2, 4, 6)]
        client, welcome = await gateway.login("ann")
        sync_to_seq = welcome.sync_to_seq
        opened = gateway.node.opened[0]
        gateway.node.push(opened, EPOCH_1 | 12)
        gateway.node.push(opened, EPOCH_1 | 11)
        gateway.node.push(opened, EPOCH_1 | 9)
        await client.expect_error(ErrorCode.SYNC_INCOMPLETE, complete(client, sync_to_seq))
        pull = client.send(Opcode.PULL_MAILBOX, pb.PullMailbox(up_to_seq=sync_to_seq, max_items=2))
        batch = await client.expect(Opcode.MAILBOX_BATCH, pull)
        assert batch.has_more
        await client.expect_error(ErrorCode.SYNC_INCOMPLETE, complete(client, sync_to_seq))
        client.send(Opcode.PULL_MAILBOX, pb.PullMailbox(after_seq=batch.covered_through_seq, up_to_seq=sync_to_seq))
        await client.expect(Opcode.MAILBOX_BATCH)
        await client.expect_error(ErrorCode.SYNC_INCOMPLETE, complete(client, sync_to_seq + 1))
        request_id = complete(client, sync_to_seq)
        await client.expect(Opcode.ONLINE_READY, request_id)
        for seq in (11, 12):
            pushed = await client.expect(Opcode.PUSH_EVENTS, 0)
            assert pushed.events[0].mailbox_seq == pushed.last_pushed_user_seq == EPOCH_1 | seq
            assert pushed.events[0].payload_or_ciphertext == b"hello"
        gateway.node.push(opened, EPOCH_1 | 13)
        assert (await client.expect(Opcode.PUSH_EVENTS)).events[0].mailbox_seq == EPOCH_1 | 13


async def test_nothing_offline_needs_no_pull_and_ready_repeats() -> None:
    async with running_gateway() as gateway:
        client, welcome = await gateway.login("ann")
        assert not welcome.has_offline
        for _ in range(2):
            await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))


async def test_ping_is_answered_at_once_with_orders() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        for probe in (False, True):
            ping = pb.Ping(ping_id=4, client_time=5, probe=probe)
            pong = await client.expect(Opcode.PONG, client.send(Opcode.PING, ping))
            assert (pong.ping_id, pong.echo_client_time) == (4, 5)
            assert pong.server_time > 1_700_000_000_000
            assert (pong.next_ping_interval_ms, pong.idle_timeout_ms) == (60_000, 130_000)
            assert pong.last_pushed_user_seq == gateway.node.watermark
            assert not pong.mailbox_dirty
