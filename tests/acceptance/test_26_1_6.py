"""26.1.6 Forced trim: above the entry cap it passes the device cursor and is exposed explicitly.

All criteria. The trimmer is held until 1,200 entries exist and then runs once, on the mailboxes it met while they grew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qim.client.perform import REBUILD
from qim.client.store import LocalStore
from qim.errors import ErrorCode
from qim.obs import metrics
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.aging import days_pass
from tests.acceptance.devices import RecordedClient, direct
from tests.acceptance.harness import TENANT, Node, running_node

USER = "erin"
SENDERS = [f"sender{number}" for number in range(4)]
"""Each sends 300, so that their own mailboxes stay below the cap."""
CAP = 1000
ENTRIES = 1200
HELD_MS = 86_400_000


def evicted() -> float:
    value: float = metrics.MAILBOX_ENTRY_CAP_EVICTED_TOTAL.labels(tenant=TENANT)._value.get()
    return value


def alerts() -> dict[str, str]:
    return metrics.firing_alerts(metrics.render().decode())


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> None:
    """Alerts of other cases are not this one's."""
    metrics.MAILBOX_ENTRY_CAP_EVICTED_TOTAL.clear()


@asynccontextmanager
async def node_with_backlog(tmp_path: Path) -> AsyncIterator[tuple[Node, Path]]:
    """1,200 entries of the user; E1, whose cursor stops at entry 100, has its store, E2 has read everything."""
    async with running_node(max_mailbox_entries_per_user=CAP, retention_interval_ms=HELD_MS) as node:
        path = tmp_path / "e1.db"
        first = node.client(USER, "e1", store=LocalStore(path))
        await first.wait_ready(10_000)
        await say(node, 100)
        await first.resync(10_000)
        await first.close()
        await say(node, ENTRIES - 100)
        second = node.client(USER, "e2")
        await second.wait_ready(30_000)
        assert second.state.sync.cursor.last_applied_mailbox_seq == node.watermark(USER)
        yield node, path


async def say(node: Node, count: int) -> None:
    for sender in SENDERS:
        device = await node.online(sender, f"for-{count}")  # client_message_ids follow from the device
        await device.say_all(direct(sender, USER), [b"hello"] * (count // len(SENDERS)))
    await node.delivered()


async def rebuild(node: Node, path: Path) -> RecordedClient:
    """E1 comes back with the SDK and rebuilds."""
    client = node.client(USER, "e1", store=LocalStore(path))
    await client.wait_ready(30_000)
    await client._wait(lambda: not client.store.meta(REBUILD), 60_000)
    return client


def check_expired_login(client: RecordedClient, cursor_seq: int, trim: int) -> None:
    (old, new) = client.requests(Opcode.AUTH)[:2]
    assert old.body.mailbox_cursor.last_applied_mailbox_seq == cursor_seq
    assert new.body.mailbox_cursor == pb.MailboxCursorToken()
    (error,) = client.bodies(Opcode.ERROR)
    assert (error.code, error.rebuild_required, error.trim_watermark) == (ErrorCode.CURSOR_EXPIRED, True, trim)
    answered = [frame for frame in client.received if frame.request_id == old.request_id]
    assert [frame.opcode for frame in answered] == [Opcode.ERROR], "criterion 4: never AUTH_OK"


@pytest.mark.timeout(180)
async def test_a_mailbox_above_the_cap_is_trimmed_and_a_cursor_behind_it_rebuilds(tmp_path: Path) -> None:
    async with node_with_backlog(tmp_path) as (node, path):
        before = [row.mailbox_seq for row in await node.stored_rows(USER)]
        assert len(before) == ENTRIES
        counted = evicted()

        assert await node.mailbox.retention.enforce_caps() == 400

        after = [row.mailbox_seq for row in await node.stored_rows(USER)]
        assert len(after) == 800  # criterion 1
        assert after == before[400:]  # criterion 2
        newcomer = await node.device(USER, "e3")
        assert (await newcomer.log_in()).trim_watermark == before[399]  # criterion 3
        assert evicted() - counted == 400  # criterion 6
        assert alerts() == {"mailbox_entry_cap_evicted_total": "P2"}  # criterion 6

        client = await rebuild(node, path)
        check_expired_login(client, before[99], before[399])  # criterion 4
        for sender in SENDERS:
            seqs = client.store.seqs(direct(sender, USER))
            assert seqs == list(range(1, ENTRIES // len(SENDERS) + 1)), "nothing is missing after the rebuild"
            unread = client.store.unread(direct(sender, USER))
            assert unread is not None and not unread[1]
        await check_traffic(node, client)  # criterion 5


async def check_traffic(node: Node, client: RecordedClient) -> None:
    """It sends and receives as any other device."""
    conversation_id = direct(SENDERS[0], USER)
    result = await (await client.send(conversation_id, "back again"))
    sender = await node.online(SENDERS[0], "laptop")
    await sender.say_all(conversation_id, [b"welcome"])

    def arrived() -> bool:
        return client.store.messages(conversation_id, newest=1)[0].payload == b"welcome"

    await client._wait(arrived, 10_000)
    assert client.store.messages(conversation_id, newest=2)[0].conversation_seq == result.conversation_seq


@pytest.mark.timeout(180)
async def test_expiry_by_time_is_no_eviction(tmp_path: Path) -> None:
    async with running_node(max_mailbox_entries_per_user=CAP, retention_interval_ms=HELD_MS) as node:
        path = tmp_path / "e1.db"
        first = node.client(USER, "e1", store=LocalStore(path))
        await first.wait_ready(10_000)
        await say(node, 100)
        await first.resync(10_000)
        await first.close()
        await say(node, 100 + len(SENDERS))
        rows = [row.mailbox_seq for row in await node.stored_rows(USER)]
        days_pass(node, 8)
        assert await node.stored_rows(USER) == []
        node.mailbox.retention.sampler.suspects[node.shard_of(USER), TENANT, USER] = None
        assert await node.mailbox.retention.enforce_caps() == 0

        client = await rebuild(node, path)
        check_expired_login(client, rows[99], rows[-1])  # criterion 7
        assert evicted() == 0  # criterion 7
        assert alerts() == {}  # criterion 7
        assert sum(len(client.store.seqs(direct(sender, USER))) for sender in SENDERS) == 204
        await check_traffic(node, client)
