"""Drives part `push`: receives what gateway and floor write, plays the MailboxNode, and reads both CPU accounts."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.admin.tokens import TokenIssuer
from qim.app.bench.child import ChildFailed, Pipe, serve
from qim.app.bench.cpu import cpu_ns
from qim.app.bench.people import Person, Samples
from qim.app.bench.push_server import DRIVER, FLOOR, FLOOR_WRITE, GATEWAY, MAILBOX, WRITER, backplane
from qim.app.tls import client_context
from qim.backplane.unix import UnixBackplane
from qim.client.wire import WireConnection, connect
from qim.core.ids import event_id
from qim.protocol.entry import FLAGS_ORDINARY, ORDINAL_MESSAGE, encode_ref, push_frame_parts
from qim.protocol.internal import PushRecipient, encode_push_batch, user_key
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.protocol.qim_pb2 import EVENT_MESSAGE, MESSAGE_TYPE_TEXT, Entry, OpenSession, OpenSessionReply
from qim.protocol.reader import Frame
from qim.runtime.affinity import usable_cpus
from qim.runtime.clock import SystemClock

TENANT: Final = "bench"
WATERMARK: Final = 1 << 48
PAYLOAD_BYTES: Final = 300
ROUNDS_PER_BLOCK: Final = 10
"""Rounds between two readings of a CPU account."""
PING_EVERY_S: Final = 25.0
_CONNECTS_AT_ONCE: Final = 32
_ROUND_TIMEOUT_S: Final = 30.0
_RETRY_S: Final = 0.1
_TOKEN_TTL_S: Final = 6 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """Connect `receivers` people to the gateway and as many bare sockets to the floor."""

    run_dir: Path
    ca_path: Path
    token_key: bytes
    gateway_port: int
    gateway_pid: int
    floor_port: int
    floor_pid: int
    receivers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Blocks of both for `seconds`; each round brings `frames` frames to every receiver in one tick."""

    frames: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """µs of CPU per frame of two adjacent blocks."""

    gateway_us: float
    floor_us: float


async def drive(pipe: Pipe) -> None:
    """Main of the driver's process: `Drive`, answered when everybody is connected, then any number of `Rounds`."""
    cpus = usable_cpus()
    if len(cpus) > 1:
        os.sched_setaffinity(0, set(cpus[1:]))
    driver = _Driver()

    async def handle(command: object) -> object:
        if isinstance(command, Drive):
            return await driver.connect(command)
        if isinstance(command, Rounds):
            return await driver.rounds(command)
        raise ChildFailed(f"unknown command {type(command).__name__}")

    try:
        await serve(pipe, handle)
    finally:
        await driver.close()


class _Counter:
    """Frames that arrived, and who waits for a number of them."""

    __slots__ = ("_reached", "_wanted", "frames")

    def __init__(self) -> None:
        self.frames = 0
        self._wanted = 0
        self._reached: asyncio.Future[None] | None = None

    def on_frame(self, frame: Frame) -> None:
        if frame.opcode == Opcode.PUSH_EVENTS:
            self.frames += 1
            if self.frames == self._wanted and self._reached is not None:
                self._reached.set_result(None)

    async def expect(self, more: int) -> None:
        """Until `more` frames have come from now on."""
        self._wanted = self.frames + more
        self._reached = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(_ROUND_TIMEOUT_S):
            await self._reached


class _Receiver(Person):
    """A person whose pushes are counted, not timed."""

    __slots__ = ("_counter",)

    def __init__(self, number: int, counter: _Counter, samples: Samples) -> None:
        super().__init__(number, f"receiver{number:04d}", samples)
        self._counter = counter

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode == Opcode.PUSH_EVENTS:
            self._counter.on_frame(frame)
        else:
            super()._on_frame(frame)


class _Driver:
    def __init__(self) -> None:
        self._command: Drive
        self._links: UnixBackplane | None = None
        self._failures: list[str] = []
        self._opened: list[OpenSession] = []
        self._pushed = _Counter()
        self._written = _Counter()
        self._receivers: list[_Receiver] = []
        self._bare: list[WireConnection] = []
        self._pinged_s = 0.0
        self._frame = b""
        self._batch = b""

    async def connect(self, command: Drive) -> int:
        """Log every receiver in at the gateway, open as many bare connections to the floor."""
        self._command = command
        links = self._links = backplane(command.run_dir, DRIVER, (MAILBOX, WRITER), self._failures)
        links.on_request(InternalOpcode.OPEN_SESSION, self._open_session)
        for opcode in (InternalOpcode.CLOSE_SESSION, InternalOpcode.PRESENCE_STALE):
            links.on_notice(opcode, _ignore)
        await links.start()
        for peer in (GATEWAY, FLOOR):
            links.connect(peer)
        await self._connect_receivers(command)
        self._encode()
        gc.collect()
        gc.freeze()
        return len(self._receivers)

    async def rounds(self, command: Rounds) -> list[Block]:
        """Alternating blocks until the time is over; the first of each warms up and does not count."""
        blocks: list[Block] = []
        per_block = ROUNDS_PER_BLOCK * command.frames * self._command.receivers
        end_s = time.monotonic() + command.seconds
        while time.monotonic() < end_s or len(blocks) < 2:
            used = []
            for pid, counter, peer, opcode, body in (
                (self._command.gateway_pid, self._pushed, GATEWAY, int(InternalOpcode.PUSH_BATCH),
                 self._batch * command.frames),
                (self._command.floor_pid, self._written, FLOOR, FLOOR_WRITE, bytes((command.frames,)) + self._frame),
            ):  # fmt: skip
                before = cpu_ns(pid)
                for _ in range(ROUNDS_PER_BLOCK):
                    await self._round(counter, peer, opcode, body, command.frames)
                used.append((cpu_ns(pid) - before) / 1000 / per_block)
            blocks.append(Block(gateway_us=used[0], floor_us=used[1]))
            self._keep_alive()
        return blocks[1:]

    async def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        for bare in self._bare:
            bare.abort()
        if self._links is not None:
            await self._links.close()

    async def _round(self, counter: _Counter, peer: str, opcode: int, body: bytes, frames: int) -> None:
        assert self._links is not None
        if not self._links.notify(peer, opcode, body):
            raise ChildFailed(f"no link to {peer}: {self._failures}")
        await counter.expect(frames * self._command.receivers)

    async def _connect_receivers(self, command: Drive) -> None:
        tls = client_context(command.ca_path)
        limit = asyncio.Semaphore(_CONNECTS_AT_ONCE)
        await self._wait_for_links(command, tls)

        async def arrive(number: int) -> None:
            async with limit:
                receiver = await self._log_in(command, number, tls)
                bare = await connect(
                    "127.0.0.1", command.floor_port, ssl_context=tls, server_name="localhost",
                    on_frame=self._written.on_frame, on_closed=lambda _: None,
                    timeout_ms=int(_ROUND_TIMEOUT_S * 1000),
                )  # fmt: skip
            self._receivers.append(receiver)
            self._bare.append(bare)

        await asyncio.gather(*map(arrive, range(command.receivers)))

    async def _log_in(self, command: Drive, number: int, tls: ssl.SSLContext) -> _Receiver:
        receiver = _Receiver(number, self._pushed, Samples())
        token = self._issuer(command).issue(
            tenant_id=TENANT,
            user_id=receiver.user_id,
            device_id="bench",
            now_ms=SystemClock().unix_ms(),
            ttl_s=_TOKEN_TTL_S,
        )
        await receiver.log_in("127.0.0.1", command.gateway_port, TENANT, token, tls)
        return receiver

    async def _wait_for_links(self, command: Drive, tls: ssl.SSLContext) -> None:
        """Until the gateway reaches us: it refuses logins before, and they are tried again."""
        async with asyncio.timeout(_ROUND_TIMEOUT_S):
            while True:
                try:
                    first = await self._log_in(command, command.receivers, tls)
                except ChildFailed:
                    await asyncio.sleep(_RETRY_S)
                    continue
                first.close()
                self._opened.clear()
                return

    @staticmethod
    def _issuer(command: Drive) -> TokenIssuer:
        return TokenIssuer(Ed25519PrivateKey.from_private_bytes(command.token_key))

    async def _open_session(self, _peer: str, body: bytes) -> bytes:
        self._opened.append(OpenSession.FromString(body))
        return OpenSessionReply(lane_watermark=WATERMARK, lane_id=1, shard_epoch=1).SerializeToString()

    def _encode(self) -> None:
        """One message for everybody: the PushBatch a MailboxNode makes of it and the frame each socket gets."""
        common = Entry(
            event_type=EVENT_MESSAGE,
            message_id=bytes(range(16)),
            conversation_id="g:bench",
            conversation_seq=1000,
            last_activity_id=bytes(range(16)),
            sender_id="sender",
            created_at=SystemClock().unix_ms(),
            body_included=True,
            message_type=MESSAGE_TYPE_TEXT,
            payload_or_ciphertext=bytes(PAYLOAD_BYTES),
        ).SerializeToString()
        seq = WATERMARK + 1
        recipients = []
        for opened in self._opened:
            device = opened.device
            key = user_key(device.tenant_id, device.user_id)
            ref = encode_ref(seq, event_id(b"bench", device.user_id, ORDINAL_MESSAGE), ORDINAL_MESSAGE,
                             FLAGS_ORDINARY, 0)  # fmt: skip
            recipients.append(PushRecipient(key, device.connection_id, device.session_epoch, seq, ref))
        self._batch = encode_push_batch(TENANT, common, recipients)
        self._frame = b"".join(push_frame_parts(seq, recipients[0].ref, common))

    def _keep_alive(self) -> None:
        now_s = time.monotonic()
        if now_s - self._pinged_s > PING_EVERY_S:
            self._pinged_s = now_s
            for receiver in self._receivers:
                receiver.ping()


def _ignore(_peer: str, _body: bytes) -> None:
    """Sessions end with the run."""
