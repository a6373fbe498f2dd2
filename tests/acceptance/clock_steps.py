"""The run of 26.8.4: the wall clock of a node's host goes back by 3 s, then by 30 s, then right."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis

from qim.app.audit.command import audit_node
from qim.app.audit.report import AuditReport
from qim.app.own_node import OwnNode
from qim.core import ids
from qim.core.ids import direct_conversation_id
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.protocol.qim_pb2 import OutboxRecord
from tests.acceptance.crowd import bare_device, whole_mailbox
from tests.acceptance.devices import Device, Received
from tests.acceptance.stored import outbox_of
from tests.acceptance.watching import Watch, watched
from tests.support.faults.clock import HostClock
from tests.support.node import MERGED, TENANT, Devices, devices_of, running_node
from tests.support.waiting import wait_for

SMALL_MS: Final = 3_000
LARGE_MS: Final = 30_000
SENDER: Final = "ann"
CONVERSATIONS: Final = 12
LINES: Final = 20
"""To each conversation, in each phase that commits."""


@dataclass(slots=True, kw_only=True)
class ClockSteps:
    """What the run showed."""

    acks: dict[str, list[pb.SendAck]]
    """phase -> its SEND_ACKs in order of the answers' sends."""
    unsafe: list[Received]
    """Answers during the large step: sends to known and to new conversations, and one CREATE_GROUP."""
    after_restart: list[Received]
    """Answers of a writer that was started while the clock was wrong."""
    ids_before: list[bytes]
    """message_ids of all that was committed before the large step; bucket by bucket."""
    ids_during: list[bytes]
    retried: list[Received]
    """The same client_message_ids again, when the clock was right."""
    buckets: Sequence[Sequence[OutboxRecord]]
    """In the end: all records of each bucket, in order."""
    mailbox: int
    """Entries of the sender."""
    alerts_before: dict[str, str]
    watch: Watch
    audit: AuditReport


def play_clock_steps() -> ClockSteps:
    """A quarter of a minute."""
    with tempfile.TemporaryDirectory(prefix="qim-clock-") as directory:
        clock = HostClock(Path(directory) / "step")
        with running_node(clock.options(MERGED)) as node:
            return asyncio.run(_play(node, clock))


async def _play(node: OwnNode, clock: HostClock) -> ClockSteps:
    address = node.address()
    core = redis.Redis.from_url(address.core_address)
    async with devices_of(node) as devices, watched(address) as watch:
        ann = await bare_device(devices, SENDER, "bare")
        await ann.go_online()
        known, fresh = _conversations(devices)
        acks = {"right": await _say(ann, known)}
        clock.step(-SMALL_MS)
        acks["3 s back"] = await _say(ann, known)
        await watch.scrape()
        alerts_before = dict(watch.alerts)
        before = _message_ids(core, address.conversation_bucket_count)
        clock.step(SMALL_MS - LARGE_MS)
        unsafe, requests = await _say_unsafe(ann, [*known, *fresh])
        await watch.scrape()
        after_restart = await _restart_and_say(node, devices, known)
        await watch.looked_often()
        during = _message_ids(core, address.conversation_bucket_count)
        clock.set_right()
        retried = [await ann.ask(Opcode.SEND_MESSAGE, request) for request in requests]
        acks["right again"] = await _say(ann, [*known, *fresh])
        audit = await audit_node(address)
        entries, _ = await whole_mailbox(devices, SENDER)
        await ann.close()
        buckets = [outbox_of(core, bucket) for bucket in range(address.conversation_bucket_count)]
    core.close()
    return ClockSteps(
        acks=acks, unsafe=unsafe, after_restart=after_restart, ids_before=before, ids_during=during, retried=retried,
        buckets=buckets, mailbox=len(entries), alerts_before=alerts_before, watch=watch, audit=audit,
    )  # fmt: skip


def _conversations(devices: Devices) -> tuple[list[str], list[str]]:
    """(known, fresh): the fresh ones lie in buckets in which nothing was ever committed."""
    bucket_count = devices.address.conversation_bucket_count
    found: dict[int, str] = {}
    for number in range(1000):
        conversation_id = direct_conversation_id(SENDER, f"peer{number}")
        found.setdefault(ids.conversation_bucket(TENANT, conversation_id, bucket_count), conversation_id)
    names = list(found.values())
    return names[:CONVERSATIONS], names[CONVERSATIONS : 2 * CONVERSATIONS]


async def _say(ann: Device, conversations: Sequence[str]) -> list[pb.SendAck]:
    """LINES to each, all acknowledged."""
    return [
        ack for _ in range(LINES) for conversation_id in conversations
        for ack in await ann.say_all(conversation_id, [b"hello"])
    ]  # fmt: skip


async def _say_unsafe(ann: Device, conversations: Sequence[str]) -> tuple[list[Received], list[pb.SendMessage]]:
    """(answers, the sends): one to each conversation, and a group."""
    requests = [
        pb.SendMessage(
            client_message_id=f"unsafe-{number}", conversation_id=conversation_id,
            message_type=pb.MESSAGE_TYPE_TEXT, payload=b"in doubt",
        )
        for number, conversation_id in enumerate(conversations)
    ]  # fmt: skip
    answers = [await ann.ask(Opcode.SEND_MESSAGE, request) for request in requests]
    answers.append(await ann.ask(Opcode.CREATE_GROUP, pb.CreateGroup(group_id="doubtful", member_ids=["bob"])))
    return answers, requests


async def _restart_and_say(node: OwnNode, devices: Devices, conversations: Sequence[str]) -> list[Received]:
    """The writer starts anew while the clock is wrong, and is asked again."""
    pid = node.kill("core-0")
    await asyncio.to_thread(wait_for, lambda: node.processes()["core-0"] not in (0, pid))
    async with asyncio.timeout(20):
        while await devices.admin.problems():
            await asyncio.sleep(0.05)
    other = await bare_device(devices, SENDER, "other")
    await other.go_online()
    answers = [await other.answer(other.say(conversation_id)) for conversation_id in conversations]
    await other.close()
    return answers


def _message_ids(core: redis.Redis, bucket_count: int) -> list[bytes]:
    return [record.message_id for bucket in range(bucket_count) for record in outbox_of(core, bucket)]
