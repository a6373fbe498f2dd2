"""The people of a day: their devices, what they sent and when they saw what.

Each person is a lane that acts in the recorded order; lanes run beside each other. A sender runs up to 8 messages ahead
of its ACKs, a leave waits for the sender's own ACKs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qim.app.connect import AdminClient, AdminRefusal, NodeAddress
from qim.app.replay.checker import SentMessage
from qim.app.replay.evidence import RunDir
from qim.app.replay.plan import FIRST_DEVICE, Act, Person, Step
from qim.app.replay.relay import CuttingRelay
from qim.client.aio import Client
from qim.client.events import ClientEvent, MessageReceived, MessageSent, StateChanged
from qim.client.link import ClientOptions
from qim.client.store import LocalStore
from qim.core.ids import group_conversation_id
from qim.runtime.clock import Clock

AHEAD_MAX: Final = 8
"""Messages a sender runs ahead of its ACKs (`sends_in_flight_max`)."""
STEPS_QUEUED_MAX: Final = 8
"""Steps handed to a lane and not begun; the day waits beyond."""
_ADMIN_RETRY_S: Final = 0.2
_READY_TIMEOUT_MS: Final = 120_000
"""A login during a kill waits for restarts and takeovers."""
_OPTIONS: Final = ClientOptions(commit_interval_ms=250)
"""Hundreds of stores share one disk and one core here: a transaction covers a quarter of a second."""


class Sighting(NamedTuple):
    """A device showed a message at a time, while it was online."""

    message_id: bytes
    at_ms: float
    live_since_ms: float


class Delivery(NamedTuple):
    """A message that reached a device while it was online."""

    latency_ms: float
    client_message_id: str
    sent_at_ms: float


@dataclass(slots=True)
class Device:
    """One device of the run."""

    user: str
    name: str
    client: Client
    started: bool = False
    live_since_ms: float = 0.0
    seen: list[Sighting] = field(default_factory=list)
    shown: set[bytes] = field(default_factory=set)
    shown_twice: list[str] = field(default_factory=list)
    relay: CuttingRelay | None = None


class Ledger:
    """The senders' own log."""

    def __init__(self) -> None:
        self.sent: list[SentMessage] = []
        self._index: dict[str, int] = {}
        self._sent_at_ms: dict[str, float] = {}
        self._acked_at_ms: dict[str, float] = {}
        self._message_of: dict[bytes, str] = {}
        self._waiting: set[str] = set()

    def unacknowledged(self) -> frozenset[str]:
        return frozenset(self._waiting)

    def leaves(self, user: str, device: str, client_message_id: str, text: str, now_ms: float) -> None:
        """A message is handed to the SDK now."""
        self._index[client_message_id] = len(self.sent)
        self.sent.append(SentMessage(user=user, device=device, client_message_id=client_message_id, text=text))
        self._sent_at_ms[client_message_id] = now_ms
        self._waiting.add(client_message_id)

    def acked(self, client_message_id: str, message_id: bytes, conversation_seq: int, now_ms: float) -> None:
        """SEND_ACK, or the sender's own entry in its place."""
        index = self._index[client_message_id]
        line = self.sent[index]
        self.sent[index] = SentMessage(
            user=line.user,
            device=line.device,
            client_message_id=client_message_id,
            text=line.text,
            conversation_seq=conversation_seq,
            message_id=message_id.hex(),
        )
        self._acked_at_ms.setdefault(client_message_id, now_ms)
        self._message_of[message_id] = client_message_id
        self._waiting.discard(client_message_id)

    def ack_latencies_ms(self) -> list[float]:
        return [at_ms - self._sent_at_ms[client_message_id] for client_message_id, at_ms in self._acked_at_ms.items()]

    def delivery_of(self, user: str, sighting: Sighting) -> Delivery | None:
        """None for the sender's own devices and for what was sent before the device was online."""
        client_message_id = self._message_of.get(sighting.message_id)
        if client_message_id is None or self.sent[self._index[client_message_id]].user == user:
            return None
        sent_at_ms = self._sent_at_ms[client_message_id]
        if sent_at_ms <= sighting.live_since_ms:
            return None
        return Delivery(sighting.at_ms - sent_at_ms, client_message_id, sent_at_ms)


class Crowd:
    """All people of one run."""

    def __init__(
        self,
        *,
        node: NodeAddress,
        admin: AdminClient,
        tenant_id: str,
        group_id: str,
        run_dir: RunDir,
        clock: Clock,
        user_id_of: Callable[[str], str],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._node = node
        self._admin = admin
        self._tenant_id = tenant_id
        self._group_id = group_id
        self._conversation_id = group_conversation_id(group_id)
        self._run_dir = run_dir
        self._clock = clock
        self.user_id_of = user_id_of
        """Name in the day file -> user of this run."""
        self._tls: ssl.SSLContext = node.client_tls()
        self.devices: dict[tuple[str, str], Device] = {}
        self.ledger = Ledger()
        self._lanes: dict[str, asyncio.Queue[Step | None]] = {}
        self._lane_tasks: list[asyncio.Task[None]] = []
        self._ahead: dict[str, asyncio.Semaphore] = {}
        self._tasks = tasks

    # --------------------------------------------------------------------------------------------------- people

    async def add_person(self, person: Person, *, cut: bool) -> None:
        """Make the person's devices; nobody is logged in yet. `cut`: the first device will be cut off."""
        user = self.user_id_of(person.user)
        for name in person.devices:
            relay = None
            if cut and name == FIRST_DEVICE:
                relay = CuttingRelay(self._node.client_host, self._node.port)
                await relay.start()
            token = await self._admin.token(self._tenant_id, user, name, 24 * 3600)
            self.devices[user, name] = self._device(user, name, token, relay)
        self._lanes[user] = asyncio.Queue(STEPS_QUEUED_MAX)
        self._ahead[user] = asyncio.Semaphore(AHEAD_MAX)
        self._lane_tasks.append(self._tasks.create_task(self._act(user), name=f"lane of {user}"))

    def login(self, user: str, device: str) -> Device:
        """Start the device; it connects by itself."""
        found = self.devices[user, device]
        found.client.start()
        found.started = True
        return found

    async def wait_ready(self) -> None:
        """Until every started device is online."""
        for device in self.devices.values():
            if device.started:
                await device.client.wait_ready(_READY_TIMEOUT_MS)

    def _device(self, user: str, name: str, token: str, relay: CuttingRelay | None) -> Device:
        store = LocalStore(self._run_dir.device_path(user, name), synchronous="off")
        self._run_dir.log_cursor(user, name)
        client = Client(
            "127.0.0.1" if relay else self._node.client_host,
            relay.port if relay else self._node.port,
            tenant_id=self._tenant_id,
            user_id=user,
            device_id=name,
            token=token,
            store=store,
            ssl_context=self._tls,
            options=_OPTIONS,
            on_event=lambda event: self._on_event(device, event),
        )
        device = Device(user, name, client, relay=relay)
        return device

    def _on_event(self, device: Device, event: ClientEvent) -> None:
        if isinstance(event, MessageReceived):
            message_id = event.row.message_id
            if message_id in device.shown:
                device.shown_twice.append(message_id.hex())
            device.shown.add(message_id)
            if device.client.live:
                device.seen.append(Sighting(message_id, self._clock.monotonic_ms(), device.live_since_ms))
        elif isinstance(event, MessageSent):
            now_ms = self._clock.monotonic_ms()
            self.ledger.acked(event.client_message_id, event.result.message_id, event.result.conversation_seq, now_ms)
            self._ahead[device.user].release()
        elif isinstance(event, StateChanged) and event.state == "online":
            device.live_since_ms = self._clock.monotonic_ms()

    # ---------------------------------------------------------------------------------------------------- steps

    async def do(self, step: Step) -> None:
        """Hand a step to its person; waits while that person is busy with many."""
        await self._lanes[self.user_id_of(step.user)].put(step)

    async def finish(self) -> None:
        """Until every lane has done its steps and every message is acknowledged."""
        for lane in self._lanes.values():
            await lane.put(None)
        await asyncio.gather(*self._lane_tasks)
        for device in self.devices.values():
            await device.client.wait_sent(_READY_TIMEOUT_MS)

    async def close(self) -> None:
        for device in self.devices.values():
            await device.client.close()
        for device in self.devices.values():
            if device.relay is not None:
                await device.relay.close()

    async def _act(self, user: str) -> None:
        lane = self._lanes[user]
        while (step := await lane.get()) is not None:
            if step.act is Act.SEND:
                await self._send(user, step)
            elif step.act is Act.ADD:
                await self._join(user)
            elif step.act is Act.LEAVE:
                client = self.devices[user, FIRST_DEVICE].client
                await client.wait_sent(_READY_TIMEOUT_MS)
                await client.leave_group(self._group_id)
            elif step.act is Act.LOGIN:
                self.login(user, step.device)
            else:
                relay = self.devices[user, step.device].relay
                if relay is not None:
                    relay.cut()

    async def _send(self, user: str, step: Step) -> None:
        await self._ahead[user].acquire()
        client = self.devices[user, step.device].client
        client_message_id = f"{user}-{len(self.ledger.sent)}"
        self.ledger.leaves(user, step.device, client_message_id, step.text, self._clock.monotonic_ms())
        await client.send(self._conversation_id, step.text, client_message_id=client_message_id)

    async def _join(self, user: str) -> None:
        """GroupAdd; repeated until answered, which is harmless (DESIGN-data §8)."""
        while True:
            try:
                await self._admin.add_members(self._tenant_id, self._group_id, [user])
                return
            except AdminRefusal as refusal:
                if refusal.status < 500 and refusal.status != 429:
                    raise
            await asyncio.sleep(_ADMIN_RETRY_S)
