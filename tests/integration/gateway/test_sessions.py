"""Logins over real TLS: order, barrier, refusals, renewal, replacement, shards that move."""

from __future__ import annotations

import asyncio

from qim.errors import Detail, ErrorCode
from qim.presence.shm import live_connections
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.runtime.clock import SystemClock
from tests.support.fake_backplane import EPOCH_1
from tests.support.gateway_fixture import TENANT, Gateway, auth, complete, running_gateway, token, until
from tests.support.raw_client import RawClient, Received


async def answer_to(client: RawClient, request_id: int) -> Received:
    """The next frame, which must answer this request."""
    received = await client.receive()
    assert received is not None
    assert received.request_id == request_id
    return received


def present(gateway: Gateway) -> list[tuple[str, str, int]]:
    """(user, device, epoch) in the presence tables of the host."""
    found = live_connections(gateway.run_dir, now_unix_ms=SystemClock().unix_ms(), lease_ttl_ms=30_000)
    return sorted((entry.user_id, entry.device_id, entry.session_epoch) for _, entry in found)


async def test_login_order_and_answer() -> None:
    async with running_gateway() as gateway:
        gateway.node.mailbox = [EPOCH_1 | 4, EPOCH_1 | 8]
        seen_at_open: list[list[tuple[str, str, int]]] = []
        honest = gateway.node.open_session

        async def open_session(peer: str, body: bytes) -> bytes:
            seen_at_open.append(present(gateway))
            return await honest(peer, body)

        gateway.backplane.answers[InternalOpcode.OPEN_SESSION] = open_session
        _, welcome = await gateway.login("ann")
        assert seen_at_open == [[("ann", "phone", 1)]], "the presence slot stands before W is read"
        assert welcome.session_epoch == 1
        assert welcome.sync_to_seq == welcome.lane_watermark == gateway.node.watermark
        assert welcome.has_offline
        assert welcome.pending_entry_count_hint == 2
        assert welcome.mailbox_cursor.token == b"signed"
        assert welcome.next_ping_interval_ms == 60_000
        assert 0 <= welcome.sync_delay_hint_ms <= 30_000
        opened = gateway.node.opened[0]
        assert opened.gateway == "gateway-0"
        assert (opened.device.tenant_id, opened.device.user_id, opened.device.device_id) == (TENANT, "ann", "phone")


async def test_login_pulls_stay_inside_their_range() -> None:
    async with running_gateway() as gateway:
        gateway.node.mailbox = [EPOCH_1 | 8]
        client, welcome = await gateway.login("ann", applied=EPOCH_1 | 5)
        for after, up_to in ((5, 11), (4, 8)):
            pull = pb.PullMailbox(after_seq=EPOCH_1 | after, up_to_seq=EPOCH_1 | up_to)
            await client.expect_error(ErrorCode.CURSOR_INVALID, client.send(Opcode.PULL_MAILBOX, pull))
        pull = pb.PullMailbox(after_seq=EPOCH_1 | 5, up_to_seq=0)
        batch = await client.expect(Opcode.MAILBOX_BATCH, client.send(Opcode.PULL_MAILBOX, pull))
        assert batch.covered_through_seq == welcome.sync_to_seq
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))


async def test_refused_cursor_leaves_the_connection_able_to_auth_again() -> None:
    async with running_gateway() as gateway:
        gateway.node.open_error = pb.Error(
            code=pb.CURSOR_REBASED,
            new_cursor=pb.MailboxCursorToken(token=b"new", last_applied_mailbox_seq=3),
            replay_from_seq=3,
        )
        client = await gateway.client()
        error = await client.expect_error(ErrorCode.CURSOR_REBASED, client.send(Opcode.AUTH, auth("ann", applied=3)))
        assert error.new_cursor.token == b"new"
        assert error.replay_from_seq == 3
        assert present(gateway) == []
        assert len(gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)) == 1
        gateway.node.open_error = None
        welcome = await client.expect(Opcode.AUTH_OK, client.send(Opcode.AUTH, auth("ann", applied=3)))
        assert welcome.session_epoch == 2
        assert present(gateway) == [("ann", "phone", 2)]


async def test_unreachable_parts_are_retryable() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client()
        gateway.backplane.down.add("mailbox-0")
        error = await client.expect_error(ErrorCode.SHARD_MOVED, client.send(Opcode.AUTH, auth("ann")))
        assert error.retry_after_ms > 0
        assert gateway.routes.refreshes == 4, "it looked again before it sent the client away"
        gateway.backplane.down.clear()
        await client.expect(Opcode.AUTH_OK, client.send(Opcode.AUTH, auth("ann")))


async def test_a_login_waits_a_moment_for_a_shard_that_changes_hands() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client()
        gateway.node.open_error = pb.Error(code=pb.SHARD_MOVED, retry_after_ms=200)
        waiting = client.send(Opcode.AUTH, auth("ann"))
        await until(lambda: gateway.routes.refreshes > 0)
        gateway.node.open_error = None
        await client.expect(Opcode.AUTH_OK, waiting)


async def test_bad_tokens_end_the_connection() -> None:
    async with running_gateway() as gateway:
        cases = [
            (auth("ann", access_token=token("ann", "phone", ttl_s=-5)), ErrorCode.TOKEN_EXPIRED, ""),
            (auth("ann", access_token=token("ann", "phone")[:-4] + "AAAA"), ErrorCode.PERMISSION_DENIED, None),
            (auth("ann", access_token=token("ann", "other")), ErrorCode.PERMISSION_DENIED, Detail.DEVICE_MISMATCH),
            (auth("ann", access_token=""), ErrorCode.PERMISSION_DENIED, Detail.NOT_AUTHENTICATED),
        ]
        for message, code, detail in cases:
            client = await gateway.client()
            error = await client.expect_error(code, client.send(Opcode.AUTH, message))
            assert detail is None or error.detail == detail
            await client.expect_closed()
        client = await gateway.client()
        await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.AUTH, b"\xff\xff\xff"))
        await client.expect_closed()
        assert gateway.registry.epoch == 0


async def test_second_auth_while_the_first_is_judged_is_refused() -> None:
    async with running_gateway() as gateway:
        client = await gateway.client()
        first = client.send(Opcode.AUTH, auth("ann"))
        second = client.send(Opcode.AUTH, auth("ann"))
        await client.expect_error(ErrorCode.PERMISSION_DENIED, second)
        await client.expect(Opcode.AUTH_OK, first)
        assert gateway.registry.epoch == 1


async def test_silent_renewal_changes_nothing_but_the_token() -> None:
    async with running_gateway() as gateway:
        client, welcome = await gateway.login("ann")
        gateway.node.watermark += 5
        renewed = await client.expect(Opcode.AUTH_OK, client.send(Opcode.AUTH, auth("ann")))
        assert renewed.session_epoch == welcome.session_epoch
        assert renewed.sync_to_seq == welcome.sync_to_seq, "the barrier of the login stands"
        assert renewed.lane_watermark == gateway.node.watermark
        assert gateway.node.opened[-1].reopen
        assert present(gateway) == [("ann", "phone", 1)]
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))
        await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.AUTH, auth("ann", "tablet")))
        await client.expect_closed()


async def test_token_expiry_is_read_only_then_closes() -> None:
    async with running_gateway(token_expiry_grace=1000, unauth_connection_timeout=1000) as gateway:
        client = await gateway.client()
        client.send(Opcode.AUTH, auth("ann", access_token=token("ann", "phone", ttl_s=1.5)))
        welcome = await client.expect(Opcode.AUTH_OK)
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))
        leave = pb.LeaveGroup(group_id="team")
        while (received := await answer_to(client, client.send(Opcode.LEAVE_GROUP, leave))).opcode is not Opcode.ERROR:
            await asyncio.sleep(0.05)
        assert received.body.code == ErrorCode.TOKEN_EXPIRED
        await client.expect(Opcode.PONG, client.send(Opcode.PING, pb.Ping(ping_id=1)))
        await client.expect_error(ErrorCode.TOKEN_EXPIRED)
        await client.expect_closed()


async def test_newer_session_of_a_device_replaces_the_older_one() -> None:
    async with running_gateway() as gateway:
        old = await gateway.online("ann")
        other = await gateway.online("ann", "tablet")
        new = await gateway.online("ann")
        kicked = await old.expect(Opcode.KICKED, 0)
        assert kicked.reason == pb.REPLACED
        assert kicked.replaced_by_device == "phone"
        await old.expect_closed()
        assert present(gateway) == [("ann", "phone", 3), ("ann", "tablet", 2)]
        closed = [pb.CloseSession.FromString(b) for b in gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)]
        assert [c.device.session_epoch for c in closed] == [1]
        replaced = [pb.ReplaceSession.FromString(b) for b in gateway.backplane.sent(InternalOpcode.REPLACE_SESSION)]
        assert [r.device.session_epoch for r in replaced] == [1, 2, 3]
        assert {n.peer for n in gateway.backplane.notices if n.opcode == InternalOpcode.REPLACE_SESSION} == {
            "gateway-1"
        }
        for client in (other, new):
            await client.expect(Opcode.PONG, client.send(Opcode.PING))


async def test_replacement_and_eviction_reach_other_workers() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann", "phone")
        device = pb.DeviceTarget(tenant_id=TENANT, user_id="ann", device_id="phone", session_epoch=1)
        notice = pb.ReplaceSession(device=device, reason=pb.REPLACED, replaced_by_device="phone")
        gateway.backplane.deliver(InternalOpcode.REPLACE_SESSION, notice.SerializeToString(), "gateway-1")
        await client.expect(Opcode.PONG, client.send(Opcode.PING))
        gateway.registry.evict = "phone"
        await gateway.online("ann", "tablet")
        kicked = await client.expect(Opcode.KICKED)
        assert kicked.replaced_by_device == "tablet"
        await client.expect_closed()


async def test_sessions_are_opened_again_when_their_shard_moves() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        gateway.node.shard_epoch = 2
        gateway.routes.grant(2)
        await until(lambda: len(gateway.node.opened) == 2)
        assert gateway.node.opened[1].reopen
        gateway.routes.grant(2)
        gateway.backplane.link("writer-0", True)
        gateway.backplane.link("mailbox-0", False)
        gateway.backplane.link("mailbox-0", True)
        await until(lambda: len(gateway.node.opened) == 3)
        await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert len(gateway.node.opened) == 3, "an epoch that is known and another link ask for nothing"


async def test_reopening_is_tried_until_the_owner_answers() -> None:
    async with running_gateway() as gateway:
        await gateway.online("ann")
        gateway.backplane.down.add("mailbox-0")
        gateway.routes.grant(2)
        await until(lambda: gateway.routes.refreshes > 0)
        gateway.backplane.down.clear()
        gateway.node.shard_epoch = 2
        await until(lambda: len(gateway.node.opened) == 2)


async def test_end_of_a_connection_ends_the_session_everywhere() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        gateway.node.push(gateway.node.opened[0], EPOCH_1 | 20)
        await client.expect(Opcode.PUSH_EVENTS)
        client.writer.transport.abort()
        await until(lambda: present(gateway) == [])
        closed = pb.CloseSession.FromString(gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)[0])
        assert closed.last_pushed_user_seq == EPOCH_1 | 20
        assert closed.device.user_id == "ann"
