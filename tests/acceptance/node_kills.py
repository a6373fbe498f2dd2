"""The run of 26.8.1: workers of a node are killed at random while people write and others log in."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from qim.app.audit.command import audit_node
from qim.app.audit.report import AuditReport
from qim.app.own_node import OwnNode
from qim.app.replay.chaos import BacklogProbe, Chaos
from qim.app.replay.report import Kill
from qim.errors import ErrorCode
from qim.protocol.opcodes import Opcode
from qim.runtime.clock import SystemClock
from tests.acceptance.crowd import Crowd, crowd_of
from tests.acceptance.devices import Device
from tests.acceptance.watching import Watch, watched
from tests.support.node import APART, TENANT, Devices, devices_of, running_node

INTERVAL_S: Final = float(os.environ.get("QIM_NODE_KILL_INTERVAL_S", "8"))
"""Between two kills. 30 is the form of 24 minutes, by hand."""
KILLS: Final = 48
VICTIMS: Final = ("mailbox", "gateway", "writer")
SEED: Final = 2681
LINE_EVERY_S: Final = 0.1
LOGIN_EVERY_S: Final = 0.25
LOGIN_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 0.2
"""After a connection that ended without an answer."""
LOOK_FOR_TRAFFIC_S: Final = 1.0
"""A kill waits so long for a moment in which something is in flight."""
USERS: Final = [f"user{n}" for n in range(16)]
VISITORS: Final = [f"visitor{n}" for n in range(64)]
"""Who log in, one after another: mailboxes in every shard."""


@dataclass(slots=True)
class Logins:
    """Logins by bare connections, each one AUTH frame; a second one only when the answer said when to come back."""

    port: int
    tls: ssl.SSLContext
    tokens: dict[str, str]
    attempts: int = 0
    succeeded: int = 0
    failures: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    """From the first AUTH of a user to his AUTH_OK, however many it took."""
    _ended: bool = False

    async def go_on(self) -> None:
        """One after another, beside each other when they take long, until `end`."""
        number = 0
        async with asyncio.TaskGroup() as tasks:
            while not self._ended:
                tasks.create_task(self._visit(VISITORS[number % len(VISITORS)]))
                number += 1
                await asyncio.sleep(LOGIN_EVERY_S)

    def end(self) -> None:
        self._ended = True

    async def _visit(self, user: str) -> None:
        started = time.monotonic()
        while (wait_s := await self._attempt(user)) > 0:
            if time.monotonic() - started > LOGIN_TIMEOUT_S:
                return
            await asyncio.sleep(wait_s)
        self.took_s.append(time.monotonic() - started)

    async def _attempt(self, user: str) -> float:
        """0: logged in; else when to come back."""
        self.attempts += 1
        device = None
        try:
            async with asyncio.timeout(LOGIN_TIMEOUT_S):
                device = await Device.connect(self.port, self.tls, device_id="phone", access_token=self.tokens[user])
                request = asyncio.ensure_future(device.authenticate())
                closed = asyncio.ensure_future(device.until(lambda: device is not None and device.closed))
                await asyncio.wait((request, closed), return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    request.cancel()
                    self.failures.append("closed")
                    return RETRY_S
                closed.cancel()
                answer = request.result()
        except (OSError, TimeoutError) as error:
            self.failures.append(repr(error))
            return RETRY_S
        finally:
            if device is not None and not device.closed:
                await device.close()
        if answer.opcode is Opcode.AUTH_OK:
            self.succeeded += 1
            return 0.0
        assert answer.opcode is Opcode.ERROR, answer
        self.failures.append(ErrorCode(answer.body.code).name)
        return max(float(answer.body.retry_after_ms) / 1000, RETRY_S)

    @property
    def rate(self) -> float:
        return self.succeeded / self.attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKills:
    """What the run showed; everybody's screens and mailboxes were compared inside it."""

    kills: Sequence[Kill]
    logins: Logins
    watch: Watch
    audit: AuditReport
    messages: int
    entries: int


def victims() -> list[str]:
    """48 processes in random order, each of the six equally often."""
    names = [f"{role}-{index}" for role in VICTIMS for index in range(2)] * (KILLS // (2 * len(VICTIMS)))
    random.Random(SEED).shuffle(names)
    return names


def play_node_kills() -> NodeKills:
    """About KILLS * INTERVAL_S seconds."""
    with running_node(APART) as node:
        return asyncio.run(_play(node))


async def _play(node: OwnNode) -> NodeKills:
    address = node.address()
    async with devices_of(node) as devices, watched(address) as watch:
        crowd = await crowd_of(devices, USERS, {"few": USERS[:6], "all": USERS}, SEED)
        logins = await _logins(devices)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(crowd.talk(LINE_EVERY_S))
            tasks.create_task(logins.go_on())
            kills = await _kill(node, crowd)
            crowd.end()
            logins.end()
        await crowd.settled()
        await crowd.check_screens()
        entries = await crowd.check_mailboxes(devices)
        audit = await audit_node(address)
        return NodeKills(
            kills=kills, logins=logins, watch=watch, audit=audit, messages=len(crowd.lines), entries=entries
        )


async def _logins(devices: Devices) -> Logins:
    tokens = {user: await devices.admin.token(TENANT, user, "phone", 7200) for user in VISITORS}
    return Logins(devices.address.port, devices.address.client_tls(), tokens)


async def _kill(node: OwnNode, crowd: Crowd) -> list[Kill]:
    """One kill every INTERVAL_S, its recovery measured meanwhile."""
    clock, address = SystemClock(), node.address()
    probe = BacklogProbe(address.core_address, address.mailbox_address, address.mailbox_shard_count)
    chaos = Chaos(probe, crowd, clock, node.pid, started_ms=clock.monotonic_ms())
    kills: list[Kill] = []
    try:
        began_s = time.monotonic()
        for number, victim in enumerate(victims(), start=1):
            await asyncio.sleep(max(0.0, began_s + number * INTERVAL_S - time.monotonic()))
            kills.append(await chaos.kill(victim.partition("-")[0], victim, timeout_s=LOOK_FOR_TRAFFIC_S))
        await asyncio.sleep(1.0)
    finally:
        probe.close()
    return kills
