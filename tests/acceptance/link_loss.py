"""The run of 26.8.2: half of a node loses its link to the dispatch log while people write to both halves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import redis

from qim.app.audit.command import audit_node
from qim.app.audit.report import AuditReport
from qim.app.own_node import OwnNode
from qim.core import ids
from qim.core.ids import direct_conversation_id
from qim.protocol.opcodes import Opcode
from qim.protocol.qim_pb2 import OutboxRecord
from qim.registry.api import LeaseKind
from qim.stores.redis import keys
from tests.acceptance.crowd import bare_device, crowd_of
from tests.acceptance.devices import Device
from tests.acceptance.stored import outbox_of
from tests.acceptance.watching import Watch, watched
from tests.support.faults.link_cut import cut_now, unreachable
from tests.support.node import APART, TENANT, Devices, devices_of, running_node

CUT_S: Final = 60.0
CUT_OFF: Final = ("writer-0", "fanout-0", "mailbox-0")
OTHERS: Final = ("writer-1", "fanout-1", "mailbox-1")
USERS: Final = [f"user{n}" for n in range(12)]
PROBER: Final = "prober"
LINE_EVERY_S: Final = 0.2
PROBE_EVERY_S: Final = 0.25
PROBES: Final = 4
"""Conversations of each half that are written to on the bare wire."""
SAMPLE_EVERY_S: Final = 0.25
SHARE_BACK_S: Final = 40.0


class Answer(NamedTuple):
    """What a SEND_MESSAGE got."""

    conversation_id: str
    sent_s: float
    """Since the cut."""
    took_s: float
    code: int
    """0: SEND_ACK."""
    retry_after_ms: int
    conversation_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoss:
    """What the run showed; screens and mailboxes were compared inside it."""

    cut_off: Sequence[Answer]
    """To conversations whose bucket was owned by the cut-off half."""
    served: Sequence[Answer]
    """To those of the other half."""
    unanswered: int
    held: Sequence[dict[LeaseKind, tuple[float, float]]]
    """During the cut, again and again: kind -> ids held by (the cut-off owner, the other one)."""
    counts: dict[LeaseKind, int]
    """kind -> how many ids there are."""
    outboxes: Sequence[Sequence[OutboxRecord]]
    """All that was ever committed: the records of each bucket, in order."""
    entries: int
    watch: Watch
    audit: AuditReport


def play_link_loss() -> LinkLoss:
    """About CUT_S and half a minute; all lease times at their defaults."""
    with running_node(APART) as node:
        return asyncio.run(_play(node))


async def _play(node: OwnNode) -> LinkLoss:
    address = node.address()
    core = redis.Redis.from_url(address.core_address)
    async with devices_of(node) as devices, watched(address) as watch:
        crowd = await crowd_of(devices, USERS, {"all": USERS}, 2682)
        probes = await _Probes.of(devices, core)
        talking = asyncio.create_task(crowd.talk(LINE_EVERY_S))
        await asyncio.sleep(1.0)
        with _cut(node):
            started = time.monotonic()
            asking = asyncio.create_task(probes.go_on(started))
            held = await _sample(watch, started)
            probes.end()
            await asking
        await _share_back(core)
        crowd.end()
        await talking
        await crowd.settled()
        await crowd.check_screens()
        assert len(set(crowd.message_ids())) == len(crowd.lines)
        entries = await crowd.check_mailboxes(devices)
        audit = await audit_node(address)
        result = LinkLoss(
            cut_off=probes.answers["cut off"],
            served=probes.answers["served"],
            unanswered=probes.unanswered,
            held=held,
            counts={
                LeaseKind.CONVERSATION_BUCKET: address.conversation_bucket_count,
                LeaseKind.OUTBOX_PARTITION: address.conversation_bucket_count,
                LeaseKind.MAILBOX_SHARD: address.mailbox_shard_count,
            },
            outboxes=[outbox_of(core, bucket) for bucket in range(address.conversation_bucket_count)],
            entries=entries,
            watch=watch,
            audit=audit,
        )
    core.close()
    return result


class _Probes:
    """A sender on the bare wire, who writes to somebody new in conversations of either half and keeps every answer."""

    def __init__(self, device: Device, conversations: dict[str, list[str]]) -> None:
        self.answers: dict[str, list[Answer]] = {half: [] for half in conversations}
        self.unanswered = 0
        self._device = device
        self._conversations = conversations
        self._ended = False

    @classmethod
    async def of(cls, devices: Devices, core: redis.Redis) -> _Probes:
        device = await bare_device(devices, PROBER, "bare")
        await device.go_online()
        owners = bucket_owners(core)
        found: dict[str, list[str]] = {"cut off": [], "served": []}
        for number in range(1000):
            conversation_id = direct_conversation_id(PROBER, f"peer{number}")
            bucket = ids.conversation_bucket(TENANT, conversation_id, devices.address.conversation_bucket_count)
            half = found["cut off" if owners[bucket] == CUT_OFF[0] else "served"]
            if len(half) < PROBES:
                half.append(conversation_id)
        assert all(len(half) == PROBES for half in found.values())
        return cls(device, found)

    async def go_on(self, cut_s: float) -> None:
        """A message to each half every PROBE_EVERY_S; answers are waited for beside each other."""
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while not self._ended:
                for half, conversations in self._conversations.items():
                    tasks.create_task(self._ask(half, conversations[number % PROBES], cut_s))
                number += 1
                await asyncio.sleep(PROBE_EVERY_S)
        await self._device.close()

    def end(self) -> None:
        self._ended = True

    async def _ask(self, half: str, conversation_id: str, cut_s: float) -> None:
        asked = time.monotonic()
        try:
            answer = await self._device.answer(self._device.say(conversation_id))
        except TimeoutError:
            self.unanswered += 1
            return
        took_s, is_error = time.monotonic() - asked, answer.opcode is Opcode.ERROR
        assert is_error or answer.opcode is Opcode.SEND_ACK, answer
        self.answers[half].append(
            Answer(
                conversation_id=conversation_id,
                sent_s=asked - cut_s,
                took_s=took_s,
                code=answer.body.code if is_error else 0,
                retry_after_ms=answer.body.retry_after_ms if is_error else 0,
                conversation_seq=0 if is_error else answer.body.conversation_seq,
            )
        )


@contextmanager
def _cut(node: OwnNode) -> Iterator[None]:
    """The cut-off half has no connection to the server of log, registry and commits, and gets none; the other half
    keeps those it has. The link to the mailbox server stays: it could go on writing there."""
    path = Path(urlsplit(node.address().core_address).path)
    with unreachable(path):
        for process in CUT_OFF:
            assert cut_now(node.pid(process), path) > 0
        yield


async def _sample(watch: Watch, started_s: float) -> list[dict[LeaseKind, tuple[float, float]]]:
    """Who holds how many ids, until the cut is over."""
    found = []
    while time.monotonic() - started_s < CUT_S:
        await watch.scrape()
        found.append(
            {
                kind: (watch.gauge(one, held(kind)), watch.gauge(other, held(kind)))
                for one, other, kind in zip(
                    CUT_OFF,
                    OTHERS,
                    (LeaseKind.CONVERSATION_BUCKET, LeaseKind.OUTBOX_PARTITION, LeaseKind.MAILBOX_SHARD),
                    strict=True,
                )
            }
        )
        await asyncio.sleep(SAMPLE_EVERY_S)
    return found


async def _share_back(core: redis.Redis) -> None:
    """Until both writers own buckets again."""
    async with asyncio.timeout(SHARE_BACK_S):
        while set(bucket_owners(core).values()) != {CUT_OFF[0], OTHERS[0]}:
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


def held(kind: LeaseKind) -> str:
    """The series of the ids a process holds."""
    return f'qim_registry_leases_held{{kind="{kind}"}}'


def bucket_owners(core: redis.Redis) -> dict[int, str]:
    """bucket -> owner, from the registry."""
    rows: Any = core.hgetall(keys.registry_leases(LeaseKind.CONVERSATION_BUCKET))
    return {int(bucket): row.decode().split()[1] for bucket, row in rows.items()}
