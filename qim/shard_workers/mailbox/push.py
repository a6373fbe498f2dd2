"""Pushes: sub-tasks covered by W become one PUSH_BATCH frame per gateway, priority and loop tick (§11.1).

Order per shard is the order in which W covered the items: a message whose body must be read first holds up the pushes
behind it, not the materialization. What cannot be pushed is made good by MAILBOX_DIRTY, never forgotten.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from qim.backplane.api import Backplane, Priority
from qim.errors import StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.internal import PushRow, encode_push_batch
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.crash_point import BEFORE_PUSH, crash_point
from qim.runtime.tasks import TaskSet
from qim.shard_workers.mailbox.bodies import BodyReader
from qim.shard_workers.mailbox.expand import Dispatch, Event
from qim.shard_workers.mailbox.lanes import Work
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex
from qim.stores.api import Recipient

log = get_logger(__name__)

FRAME_BYTES_MAX: Final = 256 << 10
"""A PUSH_BATCH frame is closed above it: four quanta of the link."""
WAITING_MAX: Final = 4096
"""Messages of a shard waiting for a body; beyond, the devices get MAILBOX_DIRTY instead."""
JOIN_ITEMS_MAX: Final = 64
"""Bodies read in one go."""
LARGE_GROUP_MEMBERS: Final = 1000
"""`large_group_member_threshold` (B.5)."""


class Covered(NamedTuple):
    """A dispatch that W has passed on some lanes (a mask), with the `mailbox_seq` of its entries."""

    work: Work
    lanes: int
    mailbox_seq: int


_Batches = dict[tuple[str, Event], list[PushRow]]
"""(gateway, event) -> its recipients."""


class _Frame:
    """Encoded batches of a PUSH_BATCH frame that is still open."""

    __slots__ = ("bytes", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.bytes = 0


class PushPump:
    """Pushes of all shards of a role."""

    def __init__(
        self,
        backplane: Backplane,
        index: OnlineIndex,
        bodies: BodyReader,
        tasks: TaskSet,
        *,
        mailbox_shard_count: int,
        on_missed: Callable[[Sequence[OnlineDevice]], None],
        on_gateway_missed: Callable[[str], None],
    ) -> None:
        """`on_missed` is told of connections, `on_gateway_missed` of gateways that lost a push: they need a mark."""
        self._backplane = backplane
        self._index = index
        self._bodies = bodies
        self._tasks = tasks
        self._mailbox_shard_count = mailbox_shard_count
        self._on_missed = on_missed
        self._on_gateway_missed = on_gateway_missed
        self._waiting: dict[int, deque[Sequence[Covered]]] = {}
        self._frames: dict[tuple[str, Priority], _Frame] = {}
        self._flushing = False

    def push(self, shard: int, items: Iterable[Covered]) -> None:
        """Push covered items of a shard, in order; returns at once."""
        waiting = self._waiting.get(shard)
        for message in _by_dispatch(items):
            batches = self._address(message)
            if not batches:
                continue
            if waiting is None:
                body = self._bodies.of_dispatch(message[0].work.dispatch.record)
                if body is not None:
                    self._send(message, batches, body.fragment)
                    continue
                waiting = self._waiting[shard] = deque((message,))
                self._tasks.start(f"push-{shard}", self._drain(shard, waiting))
            elif len(waiting) < WAITING_MAX:
                waiting.append(message)
            else:
                self._miss(message)

    async def _drain(self, shard: int, waiting: deque[Sequence[Covered]]) -> None:
        """Load the bodies of waiting messages, batch by batch, and push them."""
        while waiting:
            batch = [waiting[at] for at in range(min(len(waiting), JOIN_ITEMS_MAX))]
            records = {}
            for message in batch:
                dispatch = message[0].work.dispatch
                if self._bodies.of_dispatch(dispatch.record) is None:
                    records[dispatch.message_id] = dispatch.record
            try:
                bodies = {message_id: body.fragment for message_id, body in
                          (await self._bodies.load_for_push(records.values())).items()}  # fmt: skip
            except StoreError as error:
                log.warning("push_body_unreadable", shard=shard, count=len(records), error=error)
                bodies = {}
            for _ in batch:
                message = waiting.popleft()
                dispatch = message[0].work.dispatch
                fragment = bodies.get(dispatch.message_id)
                if fragment is None and (body := self._bodies.of_dispatch(dispatch.record)) is not None:
                    fragment = body.fragment
                if fragment is None:
                    self._miss(message)
                else:
                    self._send(message, self._address(message), fragment)
        del self._waiting[shard]

    def _address(self, message: Sequence[Covered]) -> _Batches:
        """Who is online for a message, by gateway and event."""
        batches: _Batches = {}
        users = self._index.users_of(message[0].work.dispatch.tenant_id)
        if not users:
            return batches
        for item in message:
            seq = item.mailbox_seq
            for (user_id, _, _, ref), event in _entries(item, users):
                for device in users[user_id]:
                    if event.origin_device_id and event.origin_device_id == device.device_id:
                        continue
                    row = (device.user_key, device.connection_id, device.session_epoch, seq, ref)
                    key = (device.gateway, event)
                    rows = batches.get(key)
                    if rows is None:
                        batches[key] = [row]
                    else:
                        rows.append(row)
        return batches

    def _send(self, message: Sequence[Covered], batches: _Batches, fragment: bytes) -> None:
        """Queue the push of a message."""
        dispatch = message[0].work.dispatch
        priority = self._priority(dispatch)
        metrics.BODY_ENCODE_COUNT.inc(len(batches))
        for (gateway, event), rows in batches.items():
            self._queue(gateway, priority, encode_push_batch(dispatch.tenant_id, event.reference + fragment, rows))

    def _miss(self, message: Sequence[Covered]) -> None:
        users = self._index.users_of(message[0].work.dispatch.tenant_id)
        members = (member for item in message for task in item.work.tasks for member in task.members_on(item.lanes))
        self._on_missed([device for _, user_id in members for device in users.get(user_id, ())])

    def _priority(self, dispatch: Dispatch) -> Priority:
        if dispatch.direct:
            return Priority.SINGLE_CHAT
        # members are spread evenly over the shards, so this shard's share tells the size of the group
        members = dispatch.frame.member_count * self._mailbox_shard_count
        return Priority.SMALL_GROUP if members <= LARGE_GROUP_MEMBERS else Priority.LARGE_GROUP

    def _queue(self, gateway: str, priority: Priority, encoded: bytes) -> None:
        key = (gateway, priority)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = _Frame()
        frame.parts.append(encoded)
        frame.bytes += len(encoded)
        if frame.bytes >= FRAME_BYTES_MAX:
            self._notify(key)
        elif not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        for key in list(self._frames):
            self._notify(key)

    def _notify(self, key: tuple[str, Priority]) -> None:
        gateway, priority = key
        frame = self._frames.pop(key)
        crash_point(BEFORE_PUSH)
        if not self._backplane.notify(gateway, InternalOpcode.PUSH_BATCH, b"".join(frame.parts), priority):
            # which of its connections the frame was for is not worth keeping: all of them look once
            self._on_gateway_missed(gateway)


def _by_dispatch(items: Iterable[Covered]) -> list[list[Covered]]:
    """Items of one dispatch together, dispatches in log order: what a user gets still ascends."""
    messages: dict[int, list[Covered]] = {}
    for item in items:
        messages.setdefault(item.work.offset, []).append(item)
    return [messages[offset] for offset in sorted(messages)] if len(messages) > 1 else list(messages.values())


def _entries(item: Covered, users: Collection[str]) -> Iterable[tuple[Recipient, Event]]:
    """The entries of some members of a covered item: those written, or made again after a replay."""
    dispatch = item.work.dispatch
    for task in item.work.tasks:
        lanes = task.mask & item.lanes
        if task.built is not None and lanes == task.mask:
            event = dispatch.events[0]
            yield from [(recipient, event) for recipient in task.built if recipient[0] in users]
        elif lanes:
            members = [member for member in task.members_on(lanes) if member[1] in users]
            yield from dispatch.recipients(item.mailbox_seq, members)
