"""People who write to each other all the time, at a steady pace, and devices that come and go.

Phones write and lose their connection now and then; tablets only read, and are closed or killed and opened again. One
person is added to a group and removed from it over and over by the admin plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Final

from qim.app.connect import AdminClient, AdminRefusal, NodeAddress
from qim.app.replay.checker import SentMessage
from qim.app.replay.crowd import Device, Ledger
from qim.app.replay.evidence import DeviceState, RunDir, RunFacts
from qim.app.replay.scan import scan_group, scan_records
from qim.client.aio import Client
from qim.client.events import ClientEvent, MessageReceived, MessageSent
from qim.client.link import ClientOptions
from qim.client.store import LocalStore
from qim.core.ids import direct_conversation_id, direct_members, group_conversation_id
from qim.core.visibility import FULL
from qim.runtime.clock import Clock
from tests.chaos.judge import Conversation, expected
from tests.support.node import TENANT

PEOPLE: Final = tuple(f"person{number:02}" for number in range(12))
TABLETS: Final = PEOPLE[:4]
"""Who has a second device, which only reads."""
GUEST: Final = "guest"
"""Comes into the small group and goes."""
SMALL_GROUP: Final = "small"
LARGE_GROUP: Final = "large"
SMALL_MEMBERS: Final = PEOPLE[:6]
SILENT_MEMBERS: Final = tuple(f"silent{number:03}" for number in range(788))
"""Members of the large group without a device: more entries of one message than an append call takes."""
PAIRS: Final = tuple((one, PEOPLE[(at + step) % len(PEOPLE)]) for at, one in enumerate(PEOPLE) for step in (1, 5))
MESSAGES_PER_S: Final = 30
GROUP_SHARE: Final = 0.25
LARGE_SHARE: Final = 0.03
AHEAD_MAX: Final = 400
"""Unacknowledged messages of all people at which they pause: a fault of a minute must not leave an hour's backlog."""
READY_TIMEOUT_MS: Final = 60_000
RESYNC_MIN_INTERVAL_MS: Final = 500
"""A tenth, like the leases: a device whose mailbox shard dies twice within this time pulls no sooner (§9.4.4)."""
OPTIONS: Final = ClientOptions(
    commit_interval_ms=100, reconnect_scale=0.1, resync_min_interval_ms=RESYNC_MIN_INTERVAL_MS
)
"""Reconnects ten times as fast as people's, like the leases."""
_RESTLESS_EVERY_S: Final = 0.7
_GUEST_EVERY_S: Final = 0.5
_ADMIN_RETRY_S: Final = 0.1
_POLL_S: Final = 0.01


class Load:
    """The people of one run."""

    def __init__(
        self, node: NodeAddress, admin: AdminClient, run_dir: RunDir, clock: Clock, tasks: asyncio.TaskGroup, seed: int
    ) -> None:
        self._node = node
        self._admin = admin
        self._run_dir = run_dir
        self._clock = clock
        self._tasks = tasks
        self._random = random.Random(seed)
        self._tls = node.client_tls()
        self._tokens: dict[tuple[str, str], str] = {}
        self._conversation_of: dict[str, str] = {}
        self._readers: dict[str, tuple[str, ...]] = {
            **{direct_conversation_id(*pair): pair for pair in PAIRS},
            group_conversation_id(SMALL_GROUP): SMALL_MEMBERS,
            group_conversation_id(LARGE_GROUP): PEOPLE,
        }
        self._working: list[asyncio.Task[None]] = []
        self._sent_at_ms: dict[str, float] = {}
        self._stopped = False
        self.devices: dict[tuple[str, str], Device] = {}
        self.ledger = Ledger()
        self.admin_call_since_ms = 0.0
        """When the admin call under way began, 0 when there is none."""

    # ------------------------------------------------------------------------------------------------------- begin

    async def begin(self) -> None:
        """Everybody is online, the groups exist, the messages flow."""
        for user in (*PEOPLE, GUEST):
            for name in ("phone", "tablet") if user in TABLETS else ("phone",):
                self._tokens[user, name] = await self._admin.token(TENANT, user, name, 24 * 3600)
                self._open(user, name)
        for device in self.devices.values():
            await device.client.wait_ready(READY_TIMEOUT_MS)
        creator = self._phone(PEOPLE[0])
        await creator.create_group(SMALL_GROUP, SMALL_MEMBERS)
        await creator.create_group(LARGE_GROUP, [*PEOPLE, *SILENT_MEMBERS])
        for work in (self._talk(), self._be_restless(), self._let_the_guest_in_and_out()):
            self._working.append(self._tasks.create_task(work))

    async def end(self) -> None:
        """Nobody writes any more; what they wrote may still be on its way."""
        self._stopped = True
        await asyncio.gather(*self._working)

    async def close(self) -> None:
        for device in self.devices.values():
            await device.client.close()

    def _open(self, user: str, name: str) -> None:
        store = LocalStore(self._run_dir.device_path(user, name))
        self._run_dir.log_cursor(user, name)
        client = Client(
            self._node.client_host,
            self._node.port,
            tenant_id=TENANT,
            user_id=user,
            device_id=name,
            token=self._tokens[user, name],
            store=store,
            ssl_context=self._tls,
            options=OPTIONS,
            on_event=lambda event: self._on_event(device, event),
        )
        device = Device(user, name, client)
        device.shown = {row.message_id for found in store.conversations() for row in store.messages(found)}
        if (before := self.devices.get((user, name))) is not None:
            device.shown_twice = before.shown_twice
        self.devices[user, name] = device
        client.start()

    def _on_event(self, device: Device, event: ClientEvent) -> None:
        if isinstance(event, MessageReceived):
            if event.row.message_id in device.shown:
                device.shown_twice.append(event.row.message_id.hex())
            device.shown.add(event.row.message_id)
        elif isinstance(event, MessageSent):
            result, now_ms = event.result, self._clock.monotonic_ms()
            self.ledger.acked(event.client_message_id, result.message_id, result.conversation_seq, now_ms)

    def _phone(self, user: str) -> Client:
        return self.devices[user, "phone"].client

    # -------------------------------------------------------------------------------------------------------- work

    async def _talk(self) -> None:
        while not self._stopped:
            await asyncio.sleep(1 / MESSAGES_PER_S)
            if len(self.ledger.unacknowledged()) >= AHEAD_MAX:
                continue
            chance = self._random.random()
            if chance < LARGE_SHARE:
                sender, conversation_id = self._random.choice(PEOPLE), group_conversation_id(LARGE_GROUP)
            elif chance < GROUP_SHARE:
                sender, conversation_id = self._random.choice(SMALL_MEMBERS), group_conversation_id(SMALL_GROUP)
            else:
                pair = self._random.choice(PAIRS)
                sender, conversation_id = self._random.choice(pair), direct_conversation_id(*pair)
            name = f"{sender}-{len(self.ledger.sent)}"
            self._conversation_of[name] = conversation_id
            now_ms = self._clock.monotonic_ms()
            self._sent_at_ms[name] = now_ms
            self.ledger.leaves(sender, "phone", name, f"line {name}", now_ms)
            await self._phone(sender).send(conversation_id, f"line {name}", client_message_id=name)

    async def _be_restless(self) -> None:
        """One device after another goes away and comes back."""
        while not self._stopped:
            await asyncio.sleep(_RESTLESS_EVERY_S)
            if self._random.random() < 0.5:
                self._phone(self._random.choice(PEOPLE)).cut()
                continue
            user = self._random.choice(TABLETS)
            client = self.devices[user, "tablet"].client
            await (client.abort() if self._random.random() < 0.5 else client.close())
            await asyncio.sleep(self._random.random())
            self._open(user, "tablet")

    async def _let_the_guest_in_and_out(self) -> None:
        """Each change is repeated until it is answered, which is harmless (DESIGN-data §8)."""
        inside = False
        while not self._stopped:
            await asyncio.sleep(_GUEST_EVERY_S)
            change = self._admin.remove_members if inside else self._admin.add_members
            self.admin_call_since_ms = self._clock.monotonic_ms()
            while True:
                try:
                    await change(TENANT, SMALL_GROUP, [GUEST])
                    break
                except AdminRefusal as refusal:
                    if refusal.status < 500 and refusal.status != 429:
                        raise
                await asyncio.sleep(_ADMIN_RETRY_S)
            self.admin_call_since_ms = 0.0
            inside = not inside

    # ------------------------------------------------------------------------------------------------------- state

    def unfinished(self, names: Iterable[str]) -> list[str]:
        """Of these messages, what is not acknowledged or not on the screen of a connected device that must show it."""
        found = []
        waiting = self.ledger.unacknowledged()
        for name in names:
            if name in waiting:
                found.append(name)
                continue
            line = self.ledger.sent[self._position(name)]
            message_id = bytes.fromhex(line.message_id)
            readers = self._readers[self._conversation_of[name]]
            if any(
                device.user in readers and device.user != line.user and device.client.live
                and message_id not in device.shown
                for device in self.devices.values()
            ):  # fmt: skip
                found.append(name)
        return found

    def _position(self, name: str) -> int:
        return int(name.rpartition("-")[2])

    def sent_at_ms(self, name: str) -> float:
        """When a message was handed to the SDK."""
        return self._sent_at_ms[name]

    def sent_between(self, from_ms: float, to_ms: float) -> list[str]:
        """client_message_ids handed to the SDK in this time."""
        return [name for name, at_ms in self._sent_at_ms.items() if from_ms <= at_ms <= to_ms]

    # --------------------------------------------------------------------------------------------------------- end

    def conversations(self) -> list[Conversation]:
        """What the store holds, with what was sent."""
        sent: dict[str, list[SentMessage]] = {conversation_id: [] for conversation_id in self._readers}
        for line in self.ledger.sent:
            sent[self._conversation_of[line.client_message_id]].append(line)
        found = []
        for conversation_id, lines in sent.items():
            if conversation_id.startswith("g:"):
                stored = scan_group(self._node, TENANT, conversation_id.removeprefix("g:"))
                records, intervals = stored.records, stored.intervals
            else:
                records = scan_records(self._node, TENANT, conversation_id)
                intervals = dict.fromkeys(direct_members(conversation_id), FULL)
            found.append(
                Conversation(conversation_id=conversation_id, sent=lines, records=records, intervals=intervals)
            )
        return found

    async def settle(self, timeout_s: float) -> tuple[list[Conversation], set[tuple[str, str]]]:
        """Wait until everything is acknowledged and every device shows what it must: the conversations and the devices
        that do. What is missing after `timeout_s` is for the judge to name."""
        deadline_ms = self._clock.monotonic_ms() + timeout_s * 1000
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.ledger.unacknowledged():
                    await asyncio.sleep(_POLL_S)
        conversations = await asyncio.to_thread(self.conversations)
        wanted = {user: expected(conversations, user) for user in (*PEOPLE, GUEST)}
        own = {line.message_id: line.user for line in self.ledger.sent}
        waiting, converged = dict(self.devices), set()
        while waiting and self._clock.monotonic_ms() < deadline_ms:
            for key, device in list(waiting.items()):
                missing = wanted[device.user] - {message_id.hex() for message_id in device.shown}
                # what a phone sent itself it shows by its SEND_ACK
                if device.client.live and all(
                    own.get(one) == device.user and device.name == "phone" for one in missing
                ):
                    converged.add(key)
                    del waiting[key]
            await asyncio.sleep(_POLL_S * 10)
        return conversations, converged

    def save(self, converged: set[tuple[str, str]], seed: int) -> None:
        """Leave what the judge reads, after `close`."""
        states = tuple(
            DeviceState(
                user=user, device=name, converged=(user, name) in converged, shown_twice=tuple(device.shown_twice)
            )
            for (user, name), device in self.devices.items()
        )
        facts = RunFacts(conversation_id="", plan="chaos", seed=seed, control_reaches_all=True, devices=states)
        self._run_dir.save(facts, self.ledger.sent, (), {})
