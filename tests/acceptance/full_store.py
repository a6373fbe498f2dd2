"""The run of 26.8.3: the mailbox server of a node has no room left while people go on writing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from qim.app.audit.command import audit_node
from qim.app.audit.report import AuditReport
from qim.app.own_node import OwnNode
from qim.app.replay.chaos import BacklogProbe
from qim.core.ids import direct_conversation_id
from qim.protocol.opcodes import Opcode
from tests.acceptance.crowd import Crowd, bare_device, crowd_of, whole_mailbox
from tests.acceptance.devices import Device, Received, Triple, triple
from tests.acceptance.watching import Watch, watched
from tests.support.node import APART, Devices, devices_of, running_node

FULL_S: Final = 10.0
USERS: Final = [f"user{n}" for n in range(8)]
BURST: Final = 400
"""Lines written at once when the room ends, before anybody can know of it."""
ROOM_RATIO: Final = 0.9
"""Of what the server uses: buffers that come and go do not count as data."""
BEYOND: Final = 1000
"""Offsets above W that are asked for."""
READY_S: Final = 10.0


class Claim(NamedTuple):
    """A MAILBOX_BATCH of the time without room: it says that up to `covered` there is nothing but `found`."""

    user: str
    after: int
    covered: int
    found: frozenset[Triple]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullStore:
    """What the run showed; screens and mailboxes were compared inside it."""

    claims: Sequence[Claim]
    beyond: Sequence[Received]
    """Answers to pulls of what is not there."""
    refusals: Sequence[Received]
    """Answers to new sends."""
    not_ready: Sequence[str]
    """What /readyz said."""
    failures: float
    """Append calls that failed."""
    waiting: int
    """Log offsets no lane had passed when room was made."""
    final: dict[str, frozenset[Triple]]
    """user -> his whole mailbox in the end."""
    ready_again_s: float
    entries: int
    watch: Watch
    audit: AuditReport


def play_full_store() -> FullStore:
    """Half a minute."""
    with running_node(APART) as node:
        return asyncio.run(_play(node))


async def _play(node: OwnNode) -> FullStore:
    address = node.address()
    server = redis.Redis.from_url(address.mailbox_address)
    async with devices_of(node) as devices, watched(address) as watch:
        crowd = await crowd_of(devices, USERS, {"all": USERS}, 2683)
        for _ in range(20):
            await (await crowd.say()).handle
        readers = {user: await _reader(devices, user) for user in USERS}
        sender = await _reader(devices, "sender")
        room_bytes = _take_room(server)
        full = await _while_full(crowd, readers, sender, devices, watch)
        full["waiting"] = _waiting(address.core_address, address.mailbox_shard_count, watch)
        server.config_set("maxmemory", room_bytes)
        full["ready_again_s"] = await _ready_again(devices)
        await crowd.settled()
        await crowd.check_screens()
        entries = await crowd.check_mailboxes(devices)
        final = {user: frozenset((await whole_mailbox(devices, user))[1]) for user in USERS}
        for device in (*readers.values(), sender):
            await device.close()
        audit = await audit_node(address)
    server.close()
    return FullStore(**full, final=final, entries=entries, watch=watch, audit=audit)


def _take_room(server: redis.Redis) -> int:
    """From now on every write is refused; the limit there was."""
    before: Any = server.config_get("maxmemory")
    memory: Any = server.info("memory")
    server.config_set("maxmemory", int(memory["used_memory"] * ROOM_RATIO))
    return int(before["maxmemory"])


async def _while_full(
    crowd: Crowd, readers: dict[str, Device], sender: Device, devices: Devices, watch: Watch
) -> dict[str, Any]:
    """Write on, read on, for FULL_S."""
    for _ in range(BURST):
        await crowd.say()
    claims: list[Claim] = []
    beyond: list[Received] = []
    refusals: list[Received] = []
    problems: list[str] = []
    ends = time.monotonic() + FULL_S
    while time.monotonic() < ends:
        await crowd.say()
        for user, device in readers.items():
            claims += await _claim(user, device)
            above = device.welcome.sync_to_seq + BEYOND
            beyond.append(await device.pull(above - 1, above))
        problems = await devices.admin.problems() or problems
        refusals.append(await sender.answer(sender.say(direct_conversation_id("sender", "stranger"))))
        await asyncio.sleep(0.5)
    await watch.scrape()
    return {
        "claims": claims, "beyond": beyond, "refusals": refusals, "not_ready": problems,
        "failures": watch.counted("mailbox_write_failures_total"),
    }  # fmt: skip


async def _claim(user: str, device: Device) -> list[Claim]:
    """Ask for W as at a login and pull up to it: a claim per batch, none while the shard reloads."""
    answer = await device.authenticate()
    if answer.opcode is not Opcode.AUTH_OK:
        return []
    watermark = answer.body.lane_watermark
    found: list[Claim] = []
    after = 0
    while True:
        answer = await device.pull(after, watermark)
        if answer.opcode is not Opcode.MAILBOX_BATCH:
            return found
        batch = answer.body
        found.append(Claim(user, after, batch.covered_through_seq, frozenset(map(triple, batch.entries))))
        after = batch.covered_through_seq
        if not batch.has_more:
            return found


async def _reader(devices: Devices, user: str) -> Device:
    device = await bare_device(devices, user, "reader")
    await device.go_online()
    return device


def _waiting(core_address: str, shard_count: int, watch: Watch) -> int:
    """Dispatches above W of their shard's slowest lane."""
    probe = BacklogProbe(core_address, watch.address.mailbox_address, shard_count)
    try:
        return probe.read().above_w
    finally:
        probe.close()


async def _ready_again(devices: Devices) -> float:
    started = time.monotonic()
    async with asyncio.timeout(READY_S):
        while await devices.admin.problems():
            await asyncio.sleep(0.05)
    return time.monotonic() - started
