"""Sends, group changes and pulls: who is asked, in which order, and what a client hears when it goes wrong."""

from __future__ import annotations

import asyncio

from qim.core.ids import conversation_bucket
from qim.errors import Detail, ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import InternalOpcode, Opcode
from tests.support.fake_backplane import EPOCH_1
from tests.support.gateway_fixture import TENANT, complete, running_gateway, text, until


async def test_send_reaches_the_writer_unread_and_is_acknowledged() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        message = text("dm:ann:bob", "m1")
        unknown_field = b"\xf8\x07\x05"
        request_id = client.send(Opcode.SEND_MESSAGE, message.SerializeToString() + unknown_field)
        ack = await client.expect(Opcode.SEND_ACK, request_id)
        assert ack.request_id == request_id
        assert ack.client_message_id == "m1"
        assert ack.conversation_seq == 1
        submit = gateway.node.sent[0]
        assert (submit.tenant_id, submit.user_id, submit.device_id) == (TENANT, "ann", "phone")
        assert not submit.limits_lifted
        assert submit.message.payload == b"hi"
        assert unknown_field in submit.SerializeToString(), "fields of newer clients are kept"


async def test_one_senders_order_is_kept_while_answers_come_in_any_order() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        gates = [asyncio.Event() for _ in range(8)]
        honest = gateway.node.submit_send
        arrived: list[str] = []

        async def slow(peer: str, body: bytes) -> bytes:
            arrived.append(pb.SubmitSend.FromString(body).message.client_message_id)
            await gates[len(arrived) - 1].wait()
            return await honest(peer, body)

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = slow
        ids = [client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", f"m{n}")) for n in range(8)]
        await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert arrived == [f"m{n}" for n in range(8)]
        for gate, request_id in zip(reversed(gates), reversed(ids), strict=True):
            gate.set()
            await client.expect(Opcode.SEND_ACK, request_id)


async def test_refusals_of_a_send() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        cases = [
            (text("dm:bob:eve", "m1"), ErrorCode.PERMISSION_DENIED, ""),
            (text("dm:bob:ann", "m1"), ErrorCode.PERMISSION_DENIED, ""),
            (text("nonsense", "m1"), ErrorCode.PERMISSION_DENIED, ""),
            (text("r:lobby", "m1"), ErrorCode.UPGRADE_REQUIRED, ""),
            (text("dm:ann:bob", "m1", b"x" * (33 << 10)), ErrorCode.PAYLOAD_TOO_LARGE, ""),
            (text("dm:ann:bob", ""), ErrorCode.PERMISSION_DENIED, Detail.BAD_REQUEST),
        ]
        for message, code, detail in cases:
            error = await client.expect_error(code, client.send(Opcode.SEND_MESSAGE, message))
            assert error.detail == detail
            assert error.client_message_id == message.client_message_id
        await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.SEND_MESSAGE, b"\xff\xff"))
        assert gateway.node.sent == []
        await client.expect(Opcode.SEND_ACK, client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1")))


async def test_refusal_of_the_writer_is_forwarded() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")

        async def refuse(peer: str, body: bytes) -> bytes:
            error = pb.Error(code=pb.RATE_LIMITED, retry_after_ms=250, detail=Detail.DELIVERY_LAG)
            return pb.SubmitSendReply(error=error).SerializeToString()

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = refuse
        request_id = client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1"))
        error = await client.expect_error(ErrorCode.RATE_LIMITED, request_id)
        assert (error.retry_after_ms, error.detail, error.client_message_id) == (250, Detail.DELIVERY_LAG, "m1")


async def test_a_conversation_whose_delivery_lags_rests_as_long_as_the_writer_said() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        honest = gateway.node.submit_send
        asked = 0

        async def refuse(peer: str, body: bytes) -> bytes:
            nonlocal asked
            asked += 1
            error = pb.Error(code=pb.RATE_LIMITED, retry_after_ms=150, detail=Detail.DELIVERY_LAG)
            return pb.SubmitSendReply(error=error).SerializeToString()

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = refuse
        await client.expect_error(ErrorCode.RATE_LIMITED, client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1")))
        error = await client.expect_error(
            ErrorCode.RATE_LIMITED, client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m2"))
        )
        assert error.detail == Detail.DELIVERY_LAG
        assert 1 <= error.retry_after_ms <= 195
        assert asked == 1
        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = honest
        other = client.send(Opcode.SEND_MESSAGE, text("dm:ann:cid", "m3"))
        await client.expect(Opcode.SEND_ACK, other)
        await asyncio.sleep(0.16)
        await client.expect(Opcode.SEND_ACK, client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m2")))


async def test_silent_writer_is_a_failover_never_a_final_error() -> None:
    async with running_gateway(submit_timeout_ms=100) as gateway:
        client = await gateway.online("ann")

        async def silent(peer: str, body: bytes) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = silent
        for _ in range(2):
            request_id = client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1"))
            error = await client.expect_error(ErrorCode.REGION_FAILOVER, request_id)
            assert 1400 <= error.retry_after_ms <= 2600
            assert error.client_message_id == "m1"
            gateway.backplane.down.add("writer-0")
        assert gateway.routes.refreshes == 2


async def test_first_level_rates_and_the_lifted_tenant() -> None:
    for lifted in (False, True):
        tenants = frozenset({TENANT}) if lifted else frozenset()
        async with running_gateway(settings={"lifted_tenants": tenants}) as gateway:
            client = await gateway.online("ann")
            ids = [client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", f"m{n}")) for n in range(21)]
            received = [await client.receive() for _ in ids]
            refused = [r for r in received if r is not None and r.opcode is Opcode.ERROR]
            if lifted:
                assert refused == []
                assert gateway.node.sent[0].limits_lifted
            else:
                assert len(refused) == 1
                assert refused[0].body.code == ErrorCode.RATE_LIMITED
                assert refused[0].body.client_message_id == "m20"
                assert refused[0].body.retry_after_ms >= 1500


async def test_sends_in_flight_are_bounded() -> None:
    async with running_gateway(settings={"lifted_tenants": frozenset({TENANT})}) as gateway:
        client = await gateway.online("ann")
        gate = asyncio.Event()
        honest = gateway.node.submit_send

        async def wait(peer: str, body: bytes) -> bytes:
            await gate.wait()
            return await honest(peer, body)

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = wait
        ids = [client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", f"m{n}")) for n in range(65)]
        await client.expect_error(ErrorCode.RATE_LIMITED, ids[64])
        gate.set()
        for request_id in ids[:64]:
            await client.expect(Opcode.SEND_ACK, request_id)


async def test_group_changes_go_to_the_groups_writer() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        create = pb.CreateGroup(group_id="team", member_ids=["bob", "eve"])
        members = await client.expect(Opcode.MEMBER_LIST_BATCH, client.send(Opcode.CREATE_GROUP, create))
        assert members.total_hint == 3
        submitted = pb.SubmitCreateGroup.FromString(gateway.backplane.asked(InternalOpcode.SUBMIT_CREATE_GROUP)[0])
        assert (submitted.tenant_id, submitted.user_id) == (TENANT, "ann")
        assert submitted.request == create
        assert 0 <= conversation_bucket(TENANT, "g:team", 64) < 64
        await client.expect(Opcode.MEMBER_LIST_BATCH, client.send(Opcode.LEAVE_GROUP, pb.LeaveGroup(group_id="team")))
        assert len(gateway.backplane.asked(InternalOpcode.SUBMIT_LEAVE_GROUP)) == 1
        bad = pb.CreateGroup(group_id="team", member_ids=["no spaces"])
        await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.CREATE_GROUP, bad))
        gateway.backplane.down.add("writer-0")
        await client.expect_error(ErrorCode.REGION_FAILOVER, client.send(Opcode.CREATE_GROUP, create))

        async def refuse(peer: str, body: bytes) -> bytes:
            error = pb.Error(code=pb.PERMISSION_DENIED, detail=Detail.GROUP_EXISTS)
            return pb.GroupReply(error=error).SerializeToString()

        gateway.backplane.down.clear()
        gateway.backplane.answers[InternalOpcode.SUBMIT_CREATE_GROUP] = refuse
        error = await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.CREATE_GROUP, create))
        assert error.detail == Detail.GROUP_EXISTS


async def test_history_is_forwarded_checked_and_limited() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        pull = pb.PullHistory(conversation_id="dm:ann:bob", direction=pb.OLDER, limit=100_000)
        batch = await client.expect(Opcode.HISTORY_BATCH, client.send(Opcode.PULL_HISTORY, pull))
        assert batch.latest_conversation_seq == 7
        asked = pb.HistoryPull.FromString(gateway.backplane.asked(InternalOpcode.HISTORY_PULL)[0])
        assert asked.pull.limit == 200
        assert asked.device.user_id == "ann"
        foreign = pb.PullHistory(conversation_id="dm:bob:eve", direction=pb.OLDER)
        await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.PULL_HISTORY, foreign))
        ids = [client.send(Opcode.PULL_HISTORY, pull) for _ in range(5)]
        answers = [await client.receive() for _ in ids]
        codes = [a.body.code for a in answers if a is not None and a.opcode is Opcode.ERROR]
        assert codes == [ErrorCode.RATE_LIMITED]


async def test_the_session_list_is_forwarded_and_shares_the_rate_of_history() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        answered = pb.SessionListBatch(snapshot_revision=4, sessions=[pb.Session(conversation_id="dm:ann:bob")])
        refuse = False

        async def answer(peer: str, body: bytes) -> bytes:
            if refuse:
                return pb.SessionListPullReply(
                    error=pb.Error(code=pb.SHARD_MOVED, retry_after_ms=9)
                ).SerializeToString()
            return pb.SessionListPullReply(batch=answered.SerializeToString()).SerializeToString()

        gateway.backplane.answers[InternalOpcode.SESSION_LIST_PULL] = answer
        pull = pb.PullSessionList(snapshot_revision=3)
        batch = await client.expect(Opcode.SESSION_LIST_BATCH, client.send(Opcode.PULL_SESSION_LIST, pull))
        assert batch == answered
        asked = pb.SessionListPull.FromString(gateway.backplane.asked(InternalOpcode.SESSION_LIST_PULL)[0])
        assert (asked.device.user_id, asked.pull) == ("ann", pull)
        refuse = True
        await client.expect_error(ErrorCode.SHARD_MOVED, client.send(Opcode.PULL_SESSION_LIST, pull))
        await client.expect_error(ErrorCode.PERMISSION_DENIED, client.send(Opcode.PULL_SESSION_LIST, b"\xff"))
        gateway.backplane.down.add("mailbox-0")
        await client.expect_error(ErrorCode.SHARD_MOVED, client.send(Opcode.PULL_SESSION_LIST, pull))
        ids = [client.send(Opcode.PULL_SESSION_LIST, pull) for _ in range(4)]
        answers = [await client.receive() for _ in ids]
        assert ErrorCode.RATE_LIMITED in [a.body.code for a in answers if a is not None]


async def test_pulls_of_a_login_without_a_position_say_so() -> None:
    async with running_gateway() as gateway:
        for applied in (0, EPOCH_1 | 5):
            client, welcome = await gateway.login("ann", applied=applied)
            pull = pb.PullMailbox(after_seq=applied, up_to_seq=welcome.sync_to_seq)
            await client.expect(Opcode.MAILBOX_BATCH, client.send(Opcode.PULL_MAILBOX, pull))
        asked = [pb.MailboxPull.FromString(body) for body in gateway.backplane.asked(InternalOpcode.MAILBOX_PULL)]
        assert [one.zero_cursor for one in asked] == [True, False]


async def test_silent_mailbox_answers_shard_moved() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        gateway.backplane.down.add("mailbox-0")
        pull = pb.PullMailbox(after_seq=gateway.node.watermark, up_to_seq=0)
        error = await client.expect_error(ErrorCode.SHARD_MOVED, client.send(Opcode.PULL_MAILBOX, pull))
        assert error.retry_after_ms > 0
        history = pb.PullHistory(conversation_id="g:team", direction=pb.NEWER)
        await client.expect_error(ErrorCode.SHARD_MOVED, client.send(Opcode.PULL_HISTORY, history))


async def test_pull_errors_are_forwarded() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")

        async def expired(peer: str, body: bytes) -> bytes:
            error = pb.Error(code=pb.CURSOR_EXPIRED, trim_watermark=99, rebuild_required=True)
            return pb.MailboxPullReply(error=error).SerializeToString()

        gateway.backplane.answers[InternalOpcode.MAILBOX_PULL] = expired
        request_id = client.send(Opcode.PULL_MAILBOX, pb.PullMailbox(after_seq=1, up_to_seq=2))
        error = await client.expect_error(ErrorCode.CURSOR_EXPIRED, request_id)
        assert error.trim_watermark == 99
        assert error.rebuild_required


async def test_pulls_of_a_session_without_a_position_say_so() -> None:
    async with running_gateway() as gateway:
        for applied in (0, gateway.node.watermark):
            client, welcome = await gateway.login("ann", applied=applied)
            pull = pb.PullMailbox(after_seq=applied, up_to_seq=welcome.sync_to_seq)
            await client.expect(Opcode.MAILBOX_BATCH, client.send(Opcode.PULL_MAILBOX, pull))
        pulls = [pb.MailboxPull.FromString(body) for body in gateway.backplane.asked(InternalOpcode.MAILBOX_PULL)]
        assert [pull.zero_cursor for pull in pulls] == [True, False]


async def test_pulls_beyond_the_window_wait_and_beyond_the_queue_are_refused() -> None:
    async with running_gateway() as gateway:
        client, welcome = await gateway.login("ann")
        gate = asyncio.Event()
        honest = gateway.node.pull_mailbox
        running = 0
        most = 0

        async def slow(peer: str, body: bytes) -> bytes:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            return await honest(peer, body)

        gateway.backplane.answers[InternalOpcode.MAILBOX_PULL] = slow
        pull = pb.PullMailbox(up_to_seq=welcome.sync_to_seq)
        ids = [client.send(Opcode.PULL_MAILBOX, pull) for _ in range(21)]
        await client.expect_error(ErrorCode.RATE_LIMITED, ids[20])
        gate.set()
        answered = set()
        for _ in range(20):
            received = await client.receive()
            assert received is not None
            assert received.opcode is Opcode.MAILBOX_BATCH
            answered.add(received.request_id)
        assert answered == set(ids[:20])
        assert most == 4
        await client.expect(Opcode.ONLINE_READY, complete(client, welcome.sync_to_seq))


async def test_fallback_pulls_are_limited_and_answered() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        pull = pb.PullMailbox(after_seq=gateway.node.watermark, up_to_seq=0)
        await client.expect(Opcode.MAILBOX_BATCH, client.send(Opcode.PULL_MAILBOX, pull))
        error = await client.expect_error(ErrorCode.RATE_LIMITED, client.send(Opcode.PULL_MAILBOX, pull))
        assert error.retry_after_ms > 0
        assert len(gateway.backplane.asked(InternalOpcode.MAILBOX_PULL)) == 1
        gateway.node.push(gateway.node.opened[0], EPOCH_1 | 11)
        await client.expect(Opcode.PUSH_EVENTS)
        await client.expect(Opcode.MAILBOX_BATCH, client.send(Opcode.PULL_MAILBOX, pull))


async def test_pulls_of_a_login_storm_wait_in_order_and_leave_with_their_connection() -> None:
    async with running_gateway() as gateway:
        gate = asyncio.Event()
        honest = gateway.node.pull_mailbox

        async def slow(peer: str, body: bytes) -> bytes:
            await gate.wait()
            return await honest(peer, body)

        def asked() -> list[str]:
            bodies = gateway.backplane.asked(InternalOpcode.MAILBOX_PULL)
            return [pb.MailboxPull.FromString(body).device.user_id for body in bodies]

        clients = [(await gateway.login(name))[0] for name in ("ann", "bob", "eve", "zoe")]
        gateway.backplane.answers[InternalOpcode.MAILBOX_PULL] = slow
        for client in clients:
            for _ in range(4):
                client.send(Opcode.PULL_MAILBOX, pb.PullMailbox())
            await client.expect(Opcode.PONG, client.send(Opcode.PING))
        assert asked() == ["ann"] * 4 + ["bob"] * 4, "as many as one MailboxNode is asked for at the same time"
        clients[2].writer.transport.abort()
        await until(lambda: len(gateway.backplane.sent(InternalOpcode.CLOSE_SESSION)) == 1)
        gate.set()
        for client in (clients[0], clients[1], clients[3]):
            for _ in range(4):
                await client.expect(Opcode.MAILBOX_BATCH)
        assert asked() == ["ann"] * 4 + ["bob"] * 4 + ["zoe"] * 4


async def test_an_ack_with_words_of_a_newer_writer_is_an_ack_and_garbage_is_a_failover() -> None:
    async with running_gateway() as gateway:
        client = await gateway.online("ann")
        honest = gateway.node.submit_send
        tail = b"\x1a\x01x"

        async def newer(peer: str, body: bytes) -> bytes:
            return await honest(peer, body) + tail

        gateway.backplane.answers[InternalOpcode.SUBMIT_SEND] = newer
        request_id = client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m1"))
        ack = await client.expect(Opcode.SEND_ACK, request_id)
        assert (ack.request_id, ack.client_message_id) == (request_id, "m1")
        tail = b"\xff"
        error = await client.expect_error(
            ErrorCode.REGION_FAILOVER, client.send(Opcode.SEND_MESSAGE, text("dm:ann:bob", "m2"))
        )
        assert error.client_message_id == "m2"
        assert gateway.role.ready()
