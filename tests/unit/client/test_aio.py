"""What an application calls: sending in order through refusals and cuts, resending, groups, history, iterators."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qim.client.events import ClientClosed, MessageFailed, MessageSent, RequestFailed, SendRefused
from qim.client.pending import SendOptions
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.support.fake_server import FakeServer, Peer
from tests.unit.client.devices import FAST, Make, drop, ignore, say
from tests.unit.client.scene import DM


def honest(*_: Any) -> bool:
    return False


def order(server: FakeServer) -> list[str]:
    return [entry.payload_or_ciphertext.decode() for entry in server.logs[DM]]


LINES = [f"line {number}" for number in range(1, 9)]


async def test_messages_get_their_coordinates(server: FakeServer, device: Make) -> None:
    one = device()
    client = await one.live()
    handles = [await client.send(DM, line) for line in LINES]
    assert [(await handle).conversation_seq for handle in handles] == list(range(1, 9))
    assert one.texts() == LINES
    assert [type(event) for event in one.events].count(MessageSent) == 8
    assert one.received() == [], "own lines are no news"
    await client.wait_sent(5_000)


@pytest.mark.parametrize("code", [ErrorCode.RATE_LIMITED, ErrorCode.REGION_FAILOVER, ErrorCode.CLOCK_UNSAFE])
async def test_line_four_of_eight_is_refused_and_the_order_stands(
    server: FakeServer, device: Make, code: ErrorCode
) -> None:
    server.script[Opcode.SEND_MESSAGE] += [honest] * 3 + [say(code, retry_after_ms=5)]
    one = device()
    client = await one.live()
    handles = [await client.send(DM, line) for line in LINES]
    assert [(await handle).conversation_seq for handle in handles] == list(range(1, 9))
    assert order(server) == one.texts() == LINES


@pytest.mark.parametrize("survivors", [0, 3, 7])
async def test_the_link_breaks_in_the_middle_and_the_order_stands(
    server: FakeServer, device: Make, survivors: int
) -> None:
    server.script[Opcode.SEND_MESSAGE] += [honest] * survivors + [drop]
    one = device()
    client = await one.live()
    handles = [await client.send(DM, line) for line in LINES]
    await asyncio.gather(*(handle.future for handle in handles))
    assert order(server) == one.texts() == LINES
    assert client.connects == 2


async def test_a_committed_line_whose_ack_was_lost_is_not_sent_again(server: FakeServer, device: Make) -> None:
    def commit_and_die(peer: Peer, _: int, request: Any) -> bool:
        peer.live = False
        server.commit(request)
        peer.reset()
        return True

    server.script[Opcode.SEND_MESSAGE].append(commit_and_die)
    one = device()
    client = await one.live()
    handle = await client.send(DM, "once")
    assert (await handle).conversation_seq == 1
    assert order(server) == one.texts() == ["once"]
    assert server.peer.bodies(Opcode.SEND_MESSAGE) == [], "sync has settled it"


async def test_a_final_refusal_fails_one_line_and_the_others_go_on(server: FakeServer, device: Make) -> None:
    server.script[Opcode.SEND_MESSAGE] += [honest, say(ErrorCode.PERMISSION_DENIED)]
    one = device()
    client = await one.live()
    handles = [await client.send(DM, line) for line in LINES[:4]]
    with pytest.raises(SendRefused, match="PERMISSION_DENIED"):
        await handles[1]
    await client.wait_sent(5_000)
    assert order(server) == ["line 1", "line 3", "line 4"]
    again = client.resend(handles[1].client_message_id)
    assert again.client_message_id == handles[1].client_message_id
    assert (await again).conversation_seq == 4
    with pytest.raises(KeyError):
        client.resend("unknown")


async def test_an_unanswered_line_on_a_living_link_is_sent_again(server: FakeServer, device: Make) -> None:
    server.script[Opcode.SEND_MESSAGE].append(ignore)
    one = device(options=replace(FAST, send=SendOptions(send_ack_timeout_ms=20, unanswered_max_ms=60)))
    client = await one.live()
    assert (await (await client.send(DM, "hello"))).conversation_seq == 1
    assert client.connects == 1


async def test_lines_typed_offline_survive_a_restart(server: FakeServer, device: Make, tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    one = device(path=path)
    handles = [await one.client.send(DM, line) for line in LINES]
    await one.client.close()
    with pytest.raises(ClientClosed):
        await handles[0]
    two = device(path=path)
    client = await two.live()
    await client.wait_sent(5_000)
    assert order(server) == two.texts() == LINES
    assert [event for event in two.events if isinstance(event, MessageFailed)] == []


async def test_an_old_line_is_looked_up_in_history_before_it_is_sent(
    server: FakeServer, device: Make, tmp_path: Path
) -> None:
    path = tmp_path / "device.db"
    options = replace(FAST, send=SendOptions(dedup_ttl_ms=0))
    one = device(path=path, options=options)
    for name in ("committed", "lost"):
        await one.client.send(DM, name, client_message_id=name)
    await one.client.close()
    server.commit(pb.SendMessage(client_message_id="committed", conversation_id=DM, payload=b"committed"))
    server.mailbox.clear()
    server.committed.clear()
    await asyncio.sleep(0.002)
    two = device(path=path, options=options)
    client = await two.live()
    await client.wait_sent(5_000)
    assert order(server) == ["committed", "lost"]


async def test_send_waits_while_too_much_is_unacknowledged(server: FakeServer, device: Make) -> None:
    server.script[Opcode.SEND_MESSAGE] += [ignore, ignore]
    one = device(options=replace(FAST, pending_max=2, send=SendOptions(send_ack_timeout_ms=20, unanswered_max_ms=60)))
    client = await one.live()
    await client.send(DM, "a")
    await client.send(DM, "b")
    third = asyncio.create_task(client.send(DM, "c"))
    await asyncio.sleep(0)
    assert not third.done()
    await (await third)
    assert order(server) == ["a", "b", "c"]


async def test_one_id_is_on_its_way_once(server: FakeServer, device: Make) -> None:
    one = device()
    await one.client.send(DM, "a", client_message_id="x")
    with pytest.raises(ValueError, match="x is on its way"):
        await one.client.send(DM, "b", client_message_id="x")


async def test_send_carries_its_options(server: FakeServer, device: Make) -> None:
    client = await device().live()
    await (
        await client.send(
            DM, b"\x00", message_type=pb.MESSAGE_TYPE_CUSTOM, custom_type="card.order", mention_user_ids=["bob"],
            reply_to_conversation_seq=3,
        )
    )  # fmt: skip
    (sent,) = server.peer.bodies(Opcode.SEND_MESSAGE)
    assert (sent.custom_type, list(sent.mention_targets.user_ids), sent.reply_to_conversation_seq) == (
        "card.order", ["bob"], 3,
    )  # fmt: skip


async def test_messages_iterates_over_what_arrives(server: FakeServer, device: Make) -> None:
    client = await device().live()
    rows = client.messages()
    first = asyncio.ensure_future(anext(rows))
    await asyncio.sleep(0)
    server.push_new(DM, "one")
    server.push_new(DM, "two")
    assert (await asyncio.wait_for(first, 5)).payload == b"one"
    assert (await asyncio.wait_for(anext(rows), 5)).payload == b"two"
    last = asyncio.ensure_future(anext(rows, None))
    await asyncio.sleep(0)
    await client.close()
    assert await asyncio.wait_for(last, 5) is None


async def test_resync_pulls_to_the_newest_watermark(server: FakeServer, device: Make) -> None:
    one = device()
    client = await one.live()
    server.entry(DM, "never pushed")
    assert await client.resync(5_000) == server.watermark
    assert one.texts() == ["never pushed"]


async def test_resync_is_met_by_a_login_as_well(server: FakeServer, device: Make) -> None:
    server.script[Opcode.PULL_MAILBOX].append(drop)
    one = device()
    client = await one.live()
    server.entry(DM, "meanwhile")
    await client.resync(5_000)
    assert one.texts() == ["meanwhile"]
    client.cut()
    await client.resync(5_000)


async def test_pull_history_returns_a_page(server: FakeServer, device: Make) -> None:
    for number in range(5):
        server.entry(DM, f"m{number}")
    client = await device().live()
    page = await client.pull_history(DM, anchor_conversation_seq=4, limit=2)
    assert [message.conversation_seq for message in page.messages] == [3, 4]
    assert page.has_more


async def test_requests_fail_with_the_connection(server: FakeServer, device: Make) -> None:
    server.script[Opcode.PULL_HISTORY].append(drop)
    one = device()
    client = await one.live()
    with pytest.raises(RequestFailed, match="connection lost"):
        await client.pull_history(DM, anchor_conversation_seq=1)
    client.cut()
    await client._wait(lambda: not client.live, 5_000)
    with pytest.raises(RequestFailed, match="not connected"):
        await client.pull_history(DM, anchor_conversation_seq=1)


async def test_a_request_without_an_answer_fails(server: FakeServer, device: Make) -> None:
    server.script[Opcode.PULL_HISTORY].append(ignore)
    client = await device(options=replace(FAST, request_timeout_ms=30)).live()
    with pytest.raises(RequestFailed, match="no answer"):
        await client.pull_history(DM, anchor_conversation_seq=1)


async def test_groups_are_created_and_left_through_refusals(server: FakeServer, device: Make) -> None:
    server.script[Opcode.CREATE_GROUP] += [say(ErrorCode.REGION_FAILOVER, retry_after_ms=1), drop]
    client = await device().live()
    created = await client.create_group("team", ["bob"])
    assert [member.user_id for member in created.members] == ["alice", "bob"]
    left = await client.leave_group("team")
    assert left is not None
    assert left.total_hint == 1


async def test_a_repeated_leave_that_is_denied_is_done(server: FakeServer, device: Make) -> None:
    server.script[Opcode.LEAVE_GROUP] += [drop, say(ErrorCode.PERMISSION_DENIED)]
    client = await device().live()
    assert await client.leave_group("team") is None
    server.script[Opcode.LEAVE_GROUP].append(say(ErrorCode.PERMISSION_DENIED))
    with pytest.raises(RequestFailed, match="PERMISSION_DENIED"):
        await client.leave_group("team")


async def test_a_network_event_wakes_the_waiting_client(server: FakeServer, device: Make) -> None:
    one = device(options=replace(FAST, reconnect_scale=1_000.0))
    client = await one.live()
    server.peer.reset()
    await client._wait(lambda: not client.live, 5_000)
    await asyncio.sleep(0)
    client.network_changed()
    await client.wait_ready(5_000)
