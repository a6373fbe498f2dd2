"""The life of a connection over real TLS: logins, cursors that are mended, links that die, doors that close."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qim.client.actions import Cursor
from qim.client.events import ClientClosed
from qim.client.perform import REBUILD
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.support.fake_server import EPOCH, FakeServer, Peer
from tests.unit.client.devices import FAST, Make, drop, say
from tests.unit.client.scene import DM


async def test_login_pulls_the_backlog_in_pages_and_goes_live(server: FakeServer, device: Make) -> None:
    for number in range(40):
        server.entry(DM, f"m{number}")
    server.hint = 10_000
    one = device(options=replace(FAST, pull_max_items=3))
    client = await one.live()
    assert one.texts() == [f"m{number}" for number in range(40)]
    assert client.state.sync.cursor == Cursor(b"signed", server.watermark, 3)
    assert client.store.cursor() == client.state.sync.cursor
    first = [pull.after_seq for pull in server.peer.bodies(Opcode.PULL_MAILBOX)[:4]]
    assert first == [0, server.watermark // 4, server.watermark // 2, server.watermark * 3 // 4]
    server.push_new(DM, "live")
    await client._wait(lambda: "live" in one.received(), 5_000)


async def test_a_second_start_goes_on_where_the_first_ended(server: FakeServer, device: Make, tmp_path: Path) -> None:
    server.entry(DM, "before")
    path = tmp_path / "device.db"
    one = device(path=path)
    await one.live()
    await one.client.close()
    server.entry(DM, "while away")
    two = device(path=path)
    await two.live()
    assert two.received() == ["while away"]
    assert two.texts() == ["before", "while away"]
    auth = server.peer.bodies(Opcode.AUTH)[0]
    assert (auth.mailbox_cursor.token, auth.mailbox_cursor.last_applied_mailbox_seq) == (b"signed", EPOCH + 1)


async def test_a_killed_client_shows_nothing_twice(server: FakeServer, device: Make, tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    one = device(path=path, options=replace(FAST, commit_interval_ms=60_000))
    client = await one.live()
    server.push_new(DM, "pushed")
    await client._wait(lambda: one.received() == ["pushed"], 5_000)
    await client.abort()
    two = device(path=path)
    await two.live()
    assert two.texts() == ["pushed"]


async def test_dirty_pulls_what_was_dropped_before_it_shows_more(server: FakeServer, device: Make) -> None:
    one = device()
    client = await one.live()
    server.entry(DM, "dropped")
    later = server.entry(DM, "staged")
    server.peer.error(ErrorCode.MAILBOX_DIRTY)
    server.peer.push(later)
    await client._wait(lambda: len(one.received()) == 2 and not client.state.sync.dirty, 5_000)
    assert one.received() == ["dropped", "staged"]


def dirty_pong(peer: Peer, request_id: int, ping: Any) -> bool:
    peer.server.pong(peer, request_id, ping, dirty=True)
    return True


async def test_pong_tells_of_dropped_pushes(server: FakeServer, device: Make) -> None:
    server.ping_interval_ms = 20
    server.script[Opcode.PING].append(dirty_pong)
    one = device()
    client = await one.live()
    server.entry(DM, "dropped")
    await client._wait(lambda: one.received() == ["dropped"], 5_000)


async def test_the_cursor_follows_pushes_by_pulls_alone(server: FakeServer, device: Make) -> None:
    server.ping_interval_ms = 20
    one = device()
    client = await one.live()
    for number in range(5):
        server.push_new(DM, f"m{number}")
    await client.wait_synced_to(server.watermark, 5_000)
    assert client.state.counters.cursor_moved_by_push == 0
    assert one.received() == [f"m{number}" for number in range(5)]


async def test_rebased_cursor(server: FakeServer, device: Make) -> None:
    server.entry(DM, "m")
    rebased = say(ErrorCode.CURSOR_REBASED, new_cursor=pb.MailboxCursorToken(token=b"epoch 2"), replay_from_seq=EPOCH)
    server.script[Opcode.AUTH].append(rebased)
    one = device()
    await one.live()
    assert [auth.mailbox_cursor.token for auth in server.peer.bodies(Opcode.AUTH)] == [b"", b"epoch 2"]
    assert one.texts() == ["m"]


async def test_invalid_cursor_keeps_the_messages(server: FakeServer, device: Make, tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    server.entry(DM, "kept")
    one = device(path=path)
    await one.live()
    await one.client.close()
    server.script[Opcode.AUTH].append(say(ErrorCode.CURSOR_INVALID))
    two = device(path=path)
    await two.live()
    assert (two.received(), two.texts()) == ([], ["kept"])
    assert server.peer.bodies(Opcode.AUTH)[1].mailbox_cursor == pb.MailboxCursorToken()


async def test_expired_cursor_fills_the_gap_from_history(server: FakeServer, device: Make, tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    server.entry(DM, "old")
    one = device(path=path)
    await one.live()
    await one.client.close()
    for number in range(60):
        server.entry(DM, f"m{number}")
    del server.mailbox[:-1]
    server.script[Opcode.AUTH].append(say(ErrorCode.CURSOR_EXPIRED, rebuild_required=True))
    server.entry("dm:alice:carol", "while you were away")
    del server.mailbox[-1]
    two = device(path=path)
    await two.live()
    await two.client._wait(lambda: not two.client.store.meta(REBUILD), 5_000)
    assert two.texts() == ["old", *[f"m{number}" for number in range(60)]]
    assert [row.payload for row in two.client.store.messages("dm:alice:carol")] == [b"while you were away"]
    assert two.client.store.unread(DM) == (61, False)
    assert len(server.peer.bodies(Opcode.PULL_SESSION_LIST)) == 1


async def test_a_missing_body_is_read_from_history(server: FakeServer, device: Make) -> None:
    made = server.entry(DM, "body")
    bare = pb.Entry()
    bare.CopyFrom(made)
    bare.body_included = False
    bare.payload_or_ciphertext = b""
    server.mailbox[-1] = bare
    one = device()
    client = await one.live()
    await client._wait(lambda: one.texts() == ["body"], 3_000)
    assert len(server.peer.bodies(Opcode.PULL_HISTORY)) == 1


async def test_a_reset_is_followed_by_another_login(server: FakeServer, device: Make) -> None:
    one = device()
    client = await one.live()
    server.peer.reset()
    server.entry(DM, "meanwhile")
    await client._wait(lambda: client.live and client.connects == 2, 5_000)
    assert one.received() == ["meanwhile"]
    assert [state for state, _ in one.states()] == ["connecting", "online", "offline", "connecting", "online"]


async def test_a_cut_by_our_side_heals_too(server: FakeServer, device: Make) -> None:
    client = await device().live()
    client.cut()
    await client._wait(lambda: client.connects == 2 and client.live, 5_000)


async def test_a_silent_link_is_found_dead_by_the_heartbeat(server: FakeServer, device: Make) -> None:
    server.ping_interval_ms = 30
    one = device()
    client = await one.live()
    server.muted = True
    await client._wait(lambda: not client.live, 5_000)
    server.muted = False
    await client.wait_ready(5_000)
    assert ("offline", "link_dead") in one.states()


async def test_a_silent_link_is_found_dead_by_an_unanswered_send(server: FakeServer, device: Make) -> None:
    one = device()
    client = await one.live()
    server.muted = True
    handle = await client.send(DM, "hello")
    await client._wait(lambda: not client.live, 5_000)
    server.muted = False
    assert (await handle).conversation_seq == 1
    assert ("offline", "link_dead") in one.states()
    assert one.texts() == ["hello"]


@pytest.mark.parametrize(
    ("kick", "reason"), [(pb.REPLACED, "replaced"), (pb.ADMIN_REVOKED, "admin"), (pb.BANNED, "banned")]
)
async def test_kicked_ends_the_client(server: FakeServer, device: Make, kick: pb.KickReason, reason: str) -> None:
    one = device()
    client = await one.live()
    server.peer.send(Opcode.KICKED, pb.Kicked(reason=kick))
    assert await asyncio.wait_for(client.wait_closed(), 5) == reason
    with pytest.raises(ClientClosed, match=reason):
        await client.send(DM, "too late")
    assert len(server.peers) == 1


async def test_a_revoked_device_forgets_everything(server: FakeServer, device: Make) -> None:
    server.entry(DM, "secret")
    one = device()
    client = await one.live()
    server.peer.send(Opcode.KICKED, pb.Kicked(reason=pb.KICKED_TOKEN_REVOKED))
    assert await asyncio.wait_for(client.wait_closed(), 5) == "token_revoked"
    assert (one.texts(), client.store.cursor()) == ([], Cursor())


async def test_a_refused_token_ends_a_client_that_has_no_other(server: FakeServer, device: Make) -> None:
    server.script[Opcode.AUTH].append(say(ErrorCode.TOKEN_EXPIRED))
    one = device()
    one.client.start()
    assert await asyncio.wait_for(one.client.wait_closed(), 5) == "token_expired"


async def test_a_provider_gives_the_next_token(server: FakeServer, device: Make) -> None:
    tokens = iter(["stale", "fresh"])

    async def provide() -> str:
        return next(tokens)

    server.script[Opcode.AUTH].append(say(ErrorCode.TOKEN_EXPIRED))
    await device(token=provide).live()
    assert server.peer.bodies(Opcode.AUTH)[0].access_token == "fresh"


async def test_a_provider_that_fails_is_asked_again(server: FakeServer, device: Make) -> None:
    calls = 0

    async def provide() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ConnectionError("no token now")
        return "token"

    one = device(token=provide)
    await one.live()
    assert ("offline", "connect_failed: no token now") in one.states()


async def test_a_token_is_renewed_inside_the_connection(
    server: FakeServer, device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qim.client.link._RENEWAL_MIN_MS", 20)

    async def provide() -> str:
        claims = base64.urlsafe_b64encode(json.dumps({"exp": 1}).encode()).decode().rstrip("=")
        return f"e30.{claims}.c2ln"

    client = await device(token=provide).live()
    await server.until(lambda: len(server.peer.bodies(Opcode.AUTH)) >= 3)
    assert client.live
    assert client.connects == 1


async def test_a_refused_login_comes_back_when_the_server_says(server: FakeServer, device: Make) -> None:
    server.script[Opcode.AUTH] += [say(ErrorCode.SHARD_MOVED, retry_after_ms=100), say(ErrorCode.RATE_LIMITED)]
    one = device()
    await one.live()
    assert [reason for state, reason in one.states() if state == "offline"] == ["shard_moved", "rate_limited"]


async def test_a_redirect_is_followed_and_a_bad_endpoint_forgotten(server: FakeServer, device: Make) -> None:
    def redirect(peer: Peer, *_: Any) -> bool:
        peer.send(Opcode.REDIRECT, pb.Redirect(endpoint_hint="127.0.0.1:1"))
        return True

    server.script[Opcode.AUTH].append(redirect)
    one = device()
    await one.live()
    reasons = [reason for state, reason in one.states() if state == "offline"]
    assert reasons[0] == "redirect"
    assert reasons[1].startswith("connect_failed")


async def test_the_server_is_not_there_yet(server: FakeServer, device: Make) -> None:
    await server.stop()
    one = device()
    one.client.start()
    while len(one.states()) < 4:
        await asyncio.sleep(0.001)
    await server.start()
    await one.client.wait_ready(5_000)


async def test_an_incomplete_sync_is_pulled_again(server: FakeServer, device: Make) -> None:
    server.entry(DM, "m")
    server.script[Opcode.SYNC_COMPLETE].append(say(ErrorCode.SYNC_INCOMPLETE))
    one = device()
    await one.live()
    assert one.texts() == ["m"]
    assert len(server.peer.bodies(Opcode.SYNC_COMPLETE)) == 2


async def test_a_link_that_breaks_in_the_middle_of_a_sync_loses_nothing(server: FakeServer, device: Make) -> None:
    for number in range(20):
        server.entry(DM, f"m{number}")
    server.hint = 1
    server.script[Opcode.PULL_MAILBOX] += [lambda *_: False, drop, lambda *_: False, drop]
    one = device(options=replace(FAST, pull_max_items=4))
    await one.live()
    assert one.texts() == one.received() == [f"m{number}" for number in range(20)]
    assert one.client.connects == 3


async def test_waits_end_with_the_client_and_with_time(server: FakeServer, device: Make) -> None:
    one = device()
    with pytest.raises(TimeoutError):
        await one.client.wait_ready(1)
    waiting = asyncio.create_task(one.client.wait_ready())
    await asyncio.sleep(0)
    await one.client.close()
    with pytest.raises(ClientClosed, match="closed"):
        await waiting


async def test_a_crash_inside_ends_the_client_loudly(server: FakeServer, device: Make) -> None:
    async def provide() -> str:
        raise RuntimeError("broken provider")

    one = device(token=provide)
    one.client.start()
    assert "broken provider" in await asyncio.wait_for(one.client.wait_closed(), 5)
