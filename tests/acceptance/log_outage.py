"""The run of 26.8.5: one partition of the dispatch log is away for two minutes, on the embedded log and on Kafka."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import redis

from qim.app.audit.command import audit_node
from qim.app.audit.report import AuditReport
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.config.parameters import default_parameters
from qim.core import ids
from qim.core.ids import direct_conversation_id
from qim.protocol.opcodes import Opcode
from qim.stores.redis import keys
from tests.acceptance.crowd import bare_device, crowd_of
from tests.acceptance.devices import Device, Received
from tests.acceptance.watching import Watch, watched
from tests.support.faults.broker import SplitCluster, running_split_cluster
from tests.support.kafka_server import what_is_missing
from tests.support.node import MERGED, TENANT, Devices, devices_of, running_node
from tests.support.waiting import wait_for

OUTAGE_S: Final = 120.0
USERS: Final = [f"user{n}" for n in range(10)]
LINE_EVERY_S: Final = 0.2
PROBE_EVERY_S: Final = 0.5
PREFIX: Final = "outage"
SHARDS: Final = default_parameters().single_host_mailbox_shard_count
PARTITION: Final = ids.mailbox_shard_id(TENANT, USERS[0], SHARDS)
"""The one that goes: user0's MailboxShard."""
UNLED_S: Final = 60.0
"""A controller takes so long at most to notice a dead broker."""
CONVERGE_S: Final = 120.0

Outage = Callable[[], AbstractAsyncContextManager[None]]


class Answer(NamedTuple):
    """What a SEND_MESSAGE of the bare sender got during the outage."""

    to_partition: bool
    """The recipient has his mailbox behind the partition that is away."""
    answer: Received


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutage:
    """What the run showed; screens and mailboxes were compared inside it."""

    answers: Sequence[Answer]
    stalled_s: float
    """How long W of the shard stood still, at least."""
    moved_elsewhere: int
    """Log offsets the other shards materialized during the outage."""
    suppressed: float
    """Dispatches that were in the log twice and admitted once."""
    messages: int
    entries: int
    watch: Watch
    audit: AuditReport


def play_log_outages() -> dict[str, LogOutage]:
    """ "embedded", and "kafka" where there can be one: side by side, for they mostly wait."""
    with ExitStack() as stack:
        nodes = {"embedded": stack.enter_context(running_node(MERGED))}
        outages: dict[str, Outage] = {"embedded": lambda: _stream_away(nodes["embedded"])}
        if not what_is_missing():
            cluster = stack.enter_context(running_split_cluster())
            nodes["kafka"] = stack.enter_context(running_node(_on(cluster)))
            outages["kafka"] = lambda: _partition_away(cluster)
        return asyncio.run(_play_all(nodes, outages))


def _on(cluster: SplitCluster) -> OwnNodeOptions:
    parameters = default_parameters()
    counts = {"outbox": parameters.conversation_bucket_count, "dispatch": SHARDS}
    return replace(MERGED, commit_log=cluster.make_topics(PREFIX, counts, {"dispatch": {PARTITION}}))


async def _play_all(nodes: dict[str, OwnNode], outages: dict[str, Outage]) -> dict[str, LogOutage]:
    async with asyncio.TaskGroup() as tasks:
        running = {name: tasks.create_task(_play(node, outages[name])) for name, node in nodes.items()}
    return {name: task.result() for name, task in running.items()}


async def _play(node: OwnNode, outage: Outage) -> LogOutage:
    address = node.address()
    async with devices_of(node) as devices, watched(address) as watch:
        crowd = await crowd_of(devices, USERS, {"all": USERS}, 2685)
        sender = await bare_device(devices, "sender", "bare")
        await sender.go_online()
        for conversation_id in crowd.conversations:
            await (await crowd.say(conversation_id)).handle
        await crowd.check_screens()
        talking = asyncio.create_task(crowd.talk(LINE_EVERY_S))
        async with outage():
            before = watch.look()
            answers = await _probe(sender, devices)
            after = watch.look()
        crowd.end()
        await talking
        await crowd.settled(CONVERGE_S)
        await crowd.check_screens(CONVERGE_S)
        entries = await crowd.check_mailboxes(devices)
        await watch.scrape()
        await sender.close()
        audit = await audit_node(address)
        return LogOutage(
            answers=answers,
            stalled_s=OUTAGE_S if before[PARTITION] == after[PARTITION] else 0.0,
            moved_elsewhere=sum(
                min(new) - min(old) for shard, (old, new) in enumerate(zip(before, after, strict=True))
                if shard != PARTITION
            ),
            suppressed=watch.counted("dispatch_duplicate_suppressed_total"),
            messages=len(crowd.lines),
            entries=entries,
            watch=watch,
            audit=audit,
        )  # fmt: skip


async def _probe(sender: Device, devices: Devices) -> list[Answer]:
    """Until the outage has lasted OUTAGE_S: one send to somebody behind the partition, one to somebody who is not."""
    near, far = _recipients(devices.address.conversation_bucket_count)
    found: list[Answer] = []
    ends, number = time.monotonic() + OUTAGE_S, 0
    while time.monotonic() < ends:
        started = time.monotonic()
        requests = [
            (True, sender.say(direct_conversation_id("sender", near[number % len(near)]))),
            (False, sender.say(direct_conversation_id("sender", far[number % len(far)]))),
        ]
        for to_partition, request_id in requests:
            found.append(Answer(to_partition, await sender.answer(request_id)))
        number += 1
        await asyncio.sleep(max(0.0, started + PROBE_EVERY_S - time.monotonic()))
    return found


def _recipients(bucket_count: int) -> tuple[list[str], list[str]]:
    """(behind the partition, behind other ones in buckets that nobody else writes to)."""
    names = [f"peer{number}" for number in range(600)]
    near = [name for name in names if ids.mailbox_shard_id(TENANT, name, SHARDS) == PARTITION][:4]

    def bucket(name: str) -> int:
        return ids.conversation_bucket(TENANT, direct_conversation_id("sender", name), bucket_count)

    taken = {bucket(name) for name in near} | {ids.conversation_bucket(TENANT, "g:all", bucket_count)}
    taken |= {
        ids.conversation_bucket(TENANT, direct_conversation_id(one, other), bucket_count)
        for one, other in zip(USERS[::2], USERS[1::2], strict=False)
    }
    far = [name for name in names if bucket(name) not in taken and name not in near]
    far = [name for name in far if ids.mailbox_shard_id(TENANT, name, SHARDS) != PARTITION][:4]
    assert ids.mailbox_shard_id(TENANT, "sender", SHARDS) != PARTITION
    return near, far


@asynccontextmanager
async def _stream_away(node: OwnNode) -> AsyncIterator[None]:
    """Under the name of the partition lies something that is no stream: the server refuses appends and reads of it."""
    core = redis.Redis.from_url(node.address().core_address)
    name, away = keys.dispatch(PARTITION), "away"
    with core.pipeline(transaction=True) as both:
        both.rename(name, away)
        both.set(name, "away")
        both.execute()
    try:
        yield
    finally:
        core.rename(away, name)
        core.close()


@asynccontextmanager
async def _partition_away(cluster: SplitCluster) -> AsyncIterator[None]:
    """The broker that alone holds the partition is killed. Started again by this thread: it dies with its parent."""
    cluster.second.kill()
    try:
        await asyncio.to_thread(wait_for, lambda: cluster.unled(f"{PREFIX}.dispatch") == {PARTITION}, timeout_s=UNLED_S)
        yield
    finally:
        cluster.second.launch()
        await asyncio.to_thread(cluster.second.wait_until_ready)


def refused(answers: Sequence[Answer], *, to_partition: bool) -> Counter[int]:
    """Error code, 0 = SEND_ACK -> how often."""
    return Counter(
        one.answer.body.code if one.answer.opcode is Opcode.ERROR else 0
        for one in answers
        if one.to_partition is to_partition
    )
