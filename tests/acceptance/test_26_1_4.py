"""26.1.4 The global fallback pull brings back the newest `lane_watermark`: all criteria, with the SDK as the client.

The watermark moves while the client is online; its automatic pulls are off because no heartbeat falls into that time.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

from qim.client.actions import Cursor
from qim.client.aio import Client
from qim.client.store import LocalStore
from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import RecordedClient, direct, triple, triples
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to, expected_triples
from tests.acceptance.harness import WITHOUT_FANOUT, named_users, running_node

SHARD = 9
LOGIN, NOW = 10500, 20000
PUSHED = tuple(range(LOGIN + 400, NOW, 475))


async def trigger_fallbacks(client: Client) -> None:
    """Pull-to-refresh, then network recovery and self-check within one `client_resync_min_interval` of it."""
    await client.resync(10_000)
    await asyncio.gather(client.resync(10_000), client.resync(10_000))


def resync_spacings_ms(client: RecordedClient) -> list[float]:
    """Time between successive pulls up to the current watermark."""
    times = [sent.at_ms for sent in client.requests(Opcode.PULL_MAILBOX) if sent.body.up_to_seq == 0]
    return [later - earlier for earlier, later in pairwise(times)]


async def test_a_fallback_pull_reaches_the_present_watermark() -> None:
    assert len(PUSHED) == 20
    async with running_node(roles=WITHOUT_FANOUT) as node:
        (user,) = named_users(1, shard=SHARD, prefix="c")
        sender = await node.online("peer")
        chat = direct("peer", user)
        await sender.say_all(chat, [f"{offset}".encode() for offset in PUSHED])
        values = [await dispatch_to(node, source, SHARD) for source in await committed(node, chat)]
        placed = dict(zip(PUSHED, values, strict=True))
        lane_neighbours = named_users(8, shard=SHARD, lane=node.lane_of(user), prefix="same")
        log = DispatchLog(node, SHARD, lane_neighbours)
        await log.write_to(LOGIN + 1)
        await node.watermark_reaches(user, node.seq(user, LOGIN))

        device = await node.device(user)
        token = (await device.log_in()).mailbox_cursor.token
        await device.close()
        store = LocalStore()
        store.apply([], (), Cursor(token, node.seq(user, LOGIN), node.lane_of(user)))
        client = node.client(user, store=store)
        await client.wait_ready(10_000)
        (welcome,) = client.bodies(Opcode.AUTH_OK)
        assert welcome.lane_watermark == node.seq(user, LOGIN)
        await log.write_to(NOW + 1, placed)
        await node.watermark_reaches(user, node.seq(user, NOW))
        async with asyncio.timeout(10):
            while client.state.counters.entries_applied < len(PUSHED):
                await asyncio.sleep(0.01)
        assert len(client.bodies(Opcode.PUSH_EVENTS)) == len(PUSHED)
        assert client.requests(Opcode.PULL_MAILBOX) == [], "nothing was pulled meanwhile"

        await trigger_fallbacks(client)
        assert client.bodies(Opcode.ERROR) == []  # criterion 1
        batches = client.bodies(Opcode.MAILBOX_BATCH)
        assert batches[0].lane_watermark == node.watermark(user) == node.seq(user, NOW)  # criterion 2
        asked = client.requests(Opcode.PULL_MAILBOX)[0].body
        assert (asked.after_seq, asked.up_to_seq) == (node.seq(user, LOGIN), 0)
        first = batches[:1]
        assert sum(batch.lane_watermark > welcome.lane_watermark for batch in first) == 1  # criterion 3
        assert first[0].has_more is False
        assert first[0].covered_through_seq == node.seq(user, NOW)  # criterion 4
        assert client.state.sync.cursor.last_applied_mailbox_seq == node.seq(user, NOW)
        got = triples(batches)
        assert set(got) == expected_triples(node, user, placed)  # criterion 5
        assert len(got) == len(set(got))  # criterion 5
        pushed = [entry for push in client.bodies(Opcode.PUSH_EVENTS) for entry in push.events]
        assert set(map(triple, pushed)) == set(got)
        assert len(client.store.messages(chat)) == len(PUSHED)
        spacings_ms = resync_spacings_ms(client)
        assert len(spacings_ms) == 1, "two triggers inside one window are one pull after it"
        assert sum(spacing < node.parameters.client_resync_min_interval for spacing in spacings_ms) == 0  # criterion 6
