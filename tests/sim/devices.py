"""Clients of the simulation: the real SDK on a pipe that is slow and breaks, and the gateway's end of that pipe.

`qim.gateway.node` gets `SimListener` and `SimPresence` instead of a socket and a mapped file, `qim.client.link` gets
`connect` below instead of TLS. Everything above bytes is the product's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from qim.client.aio import Client
from qim.client.events import ClientEvent
from qim.client.link import ClientOptions
from qim.client.store import LocalStore
from qim.client.wire import ALPN, OnClosed, OnFrame, WireConnection
from qim.gateway.connection import ClientConnection
from qim.presence.layout import PresenceEntry
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from qim.protocol.reader import Frame
from tests.sim.loop import SimLoop, SimProcess, this_process

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

READ_BYTES_MAX: Final = 16 << 10


class _Alpn:
    def selected_alpn_protocol(self) -> str:
        return ALPN


class Pipe:
    """Both directions of one client connection."""

    def __init__(self, loop: SimLoop, seed: str) -> None:
        self.loop = loop
        self.ends: list[End] = []
        self.broken = False
        self.held_until_s = 0.0
        """Nothing arrives before this time: a network that is gone for a while."""
        self._rng = random.Random(seed)

    def join(self, process: SimProcess, protocol: Any) -> End:
        end = End(self, process, protocol)
        self.ends.append(end)
        return end

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def latency_s(self) -> float:
        latency_s = 0.001 + 0.004 * self._rng.random()
        return latency_s + (0.1 * self._rng.random() if self._rng.random() < 0.03 else 0.0)

    def reset(self) -> None:
        """Both ends learn that the connection is gone."""
        if self.broken:
            return
        self.broken = True
        for end in self.ends:
            self.loop.world_later(self.latency_s(), end.lost)


class End:
    """A transport: what asyncio and aiofastnet give a protocol."""

    def __init__(self, pipe: Pipe, process: SimProcess, protocol: Any) -> None:
        self.pipe = pipe
        self.process = process
        self.protocol = protocol
        self._last_s = 0.0
        self._closed = False

    def write(self, data: bytes) -> None:
        pipe = self.pipe
        if self._closed or pipe.broken:
            return
        self._last_s = max(pipe.loop.time() + pipe.latency_s(), self._last_s, pipe.held_until_s)
        pipe.loop.world_at(self._last_s, self._arrive, bytes(data))

    write_nocheck = write

    def _arrive(self, data: bytes) -> None:
        pipe = self.pipe
        other = pipe.other(self)
        if not pipe.broken and other.process.alive:
            other.process.soon(other.take, data)

    def take(self, data: bytes) -> None:
        """Bytes are here; runs as this end's process."""
        protocol = self.protocol
        for at in range(0, len(data), READ_BYTES_MAX):
            if self._closed:
                return
            part = data[at : at + READ_BYTES_MAX]
            buffer = memoryview(protocol.get_buffer(-1))
            buffer[: len(part)] = part
            protocol.buffer_updated(len(part))

    def close(self) -> None:
        """What was written arrives, then both ends are told."""
        if self._closed or self.pipe.broken:
            return
        self._closed = True
        pipe = self.pipe
        pipe.loop.world_at(max(self._last_s, pipe.loop.time()), pipe.reset)

    def abort(self) -> None:
        self._closed = True
        self.pipe.reset()

    def lost(self) -> None:
        if self.process.alive:
            self.process.soon(self._lose)

    def _lose(self) -> None:
        self._closed = True
        self.protocol.connection_lost(None)

    def get_extra_info(self, name: str) -> Any:
        return _Alpn() if name == "ssl_object" else None

    def pause_reading(self) -> None:
        """Nobody in a simulated run stops reading for flow control."""

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self._closed


class SimListener:
    """`qim.gateway.listen.Listener`: connections are handed to it by `connect`."""

    def __init__(self, listener: object, *, new_connection: Callable[[str], ClientConnection], **_: object) -> None:
        self.process = this_process()
        self.new_connection = new_connection
        self.open = True
        cluster_of(self.process).listeners.append(self)

    port = 1

    def close(self) -> None:
        self.open = False

    def forget(self, connection: ClientConnection) -> None: ...


class SimPresence:
    """`qim.presence.shm.PresenceTable`: a file in shared memory, it outlives its writer."""

    def __init__(self, gateway: str, process: SimProcess) -> None:
        self.gateway = gateway
        self.beat_unix_ms = process.unix_ms()
        self.entries: dict[int, PresenceEntry] = {}
        self._next = 0
        cluster_of(process).presence[gateway] = self

    def insert(self, entry: PresenceEntry) -> int:
        self._next += 1
        self.entries[self._next] = entry
        return self._next

    def remove(self, slot: int) -> None:
        del self.entries[slot]

    def beat(self, now_unix_ms: int) -> None:
        self.beat_unix_ms = now_unix_ms

    def close(self) -> None:
        self.beat_unix_ms = 0


def live_connections(
    tables: dict[str, SimPresence], *, now_unix_ms: int, lease_ttl_ms: int
) -> Iterator[tuple[str, PresenceEntry]]:
    """As `qim.presence.shm.live_connections`."""
    for gateway in sorted(tables):
        if now_unix_ms - tables[gateway].beat_unix_ms < lease_ttl_ms:
            for entry in list(tables[gateway].entries.values()):
                yield gateway, entry


def opened(name: str, _settings: object, _parameters: object, _now_unix_ms: int) -> tuple[object, SimPresence]:
    """Instead of `qim.gateway.node._opened`."""
    return object(), SimPresence(name, this_process())


def cluster_of(process: SimProcess) -> Cluster:
    cluster: Cluster = process.cluster  # type: ignore[attr-defined]
    return cluster


async def connect(
    host: str, port: int, *, on_frame: OnFrame, on_closed: OnClosed, timeout_ms: int, **_: object
) -> WireConnection:
    """Instead of `qim.client.wire.connect`: any gateway that listens, as the kernel would choose one."""
    process = this_process()
    cluster = cluster_of(process)
    rng = cluster.rng_of(f"connect/{process.name}")
    await asyncio.sleep(0.001 + 0.004 * rng.random())
    listeners = [found for found in cluster.listeners if found.open and found.process.alive]
    if not listeners or cluster.network_down(process.name):
        raise ConnectionRefusedError("nobody listens")
    listener = listeners[rng.randrange(len(listeners))]
    pipe = Pipe(cluster.loop, f"{cluster.seed}/pipe/{process.name}/{len(cluster.pipes)}")
    cluster.pipes.append(pipe)
    wire = WatchedWire(on_frame, on_closed, cluster)
    end = pipe.join(process, wire)
    wire.connection_made(end)  # type: ignore[arg-type]
    accepted = asyncio.get_running_loop().create_future()
    listener.process.soon(_accept, listener, pipe, accepted)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await accepted
    except TimeoutError:
        pipe.broken = True
        raise
    return wire


def _accept(listener: SimListener, pipe: Pipe, accepted: asyncio.Future[None]) -> None:
    """As the gateway's process."""
    if accepted.done():
        return
    connection = listener.new_connection("10.0.0.1")
    end = pipe.join(listener.process, connection)
    connection.connection_made(end)  # type: ignore[arg-type]
    accepted.set_result(None)


class WatchedWire(WireConnection):
    """Tells the oracle which watermarks a device was told, and what it knew when it asked."""

    __slots__ = ("_asked", "_cluster", "_device", "_told")

    def __init__(self, on_frame: OnFrame, on_closed: OnClosed, cluster: Cluster) -> None:
        super().__init__(self._watch, on_closed)
        self._cluster = cluster
        self._device = this_process().name
        self._asked: dict[int, int] = {}
        self._told = on_frame

    def send(self, opcode: int, body: bytes, request_id: int = 0) -> None:
        if opcode in (Opcode.AUTH, Opcode.PULL_MAILBOX):
            self._asked[request_id] = self._cluster.oracle.watermark_floor(self._device)
        super().send(opcode, body, request_id)

    def _watch(self, frame: Frame) -> None:
        floor = self._asked.pop(frame.request_id, None)
        if floor is not None and frame.opcode in (Opcode.AUTH_OK, Opcode.MAILBOX_BATCH):
            told = pb.AuthOk.FromString(frame.body) if frame.opcode == Opcode.AUTH_OK else None
            watermark = told.lane_watermark if told else pb.MailboxBatch.FromString(frame.body).lane_watermark
            self._cluster.oracle.watermark_told(self._device, watermark, floor)
        self._told(frame)


class SimStore(LocalStore):
    """A device's database: a killed process loses its open transaction, nothing else."""

    def close(self) -> None:
        self.commit()

    def abandon(self) -> None:
        self._dedup.clear()
        self._touched.clear()
        if self.writing:
            self._db.execute("ROLLBACK")
            self.writing = False

    def really_close(self) -> None:
        self._db.close()


class Device:
    """One device of a user: a process, its store and the SDK in it."""

    def __init__(self, cluster: Cluster, user: str, name: str) -> None:
        self.cluster = cluster
        self.user = user
        self.name = name
        self.store = SimStore(":memory:", synchronous="off")
        self.process: SimProcess | None = None
        self.client: Client | None = None
        self.starts = 0

    def start(self) -> None:
        process = self.process = self.cluster.process(f"{self.name}")
        self.starts += 1
        process.soon(self._run)

    def _run(self) -> None:
        cluster = self.cluster
        process = this_process()
        rng = cluster.rng_of(f"device/{self.name}/{self.starts}")
        self.client = Client(
            "gateways",
            1,
            tenant_id=cluster.tenant,
            user_id=self.user,
            device_id=self.name,
            token=cluster.token(self.user, self.name),
            store=self.store,
            ssl_context=None,  # type: ignore[arg-type]
            options=ClientOptions(reconnect_scale=0.2, history_spacing_ms=20, commit_interval_ms=20),
            on_event=self._event,
            unix_ms=process.unix_ms,
            monotonic_ms=process.monotonic_ms,
            random_unit=rng.random,
        )
        self.client.start()

    def _event(self, event: ClientEvent) -> None:
        self.cluster.oracle.client_event(self, event)

    def send(self, conversation_id: str, client_message_id: str) -> None:
        """Queue a message; the device is told now, the message may leave at any time."""
        if self.process is None or not self.process.alive or self.client is None:
            return
        self.process.soon(self._send, conversation_id, client_message_id)

    def _send(self, conversation_id: str, client_message_id: str) -> None:
        assert self.process is not None
        self.process.start(self._sending(conversation_id, client_message_id))

    async def _sending(self, conversation_id: str, client_message_id: str) -> None:
        assert self.client is not None
        await self.client.send(conversation_id, client_message_id, client_message_id=client_message_id)
        self.cluster.oracle.queued(self, conversation_id, client_message_id)

    def do(self, make: Callable[[Client], Any]) -> None:
        """Run a coroutine of the SDK, its refusals ignored."""
        if self.process is not None and self.process.alive and self.client is not None:
            self.process.soon(lambda: self._do(make))

    def _do(self, make: Callable[[Client], Any]) -> None:
        assert self.process is not None and self.client is not None
        self.process.start(_ignoring(make(self.client)))

    def kill(self) -> None:
        """The app is killed: its open transaction is lost."""
        if self.process is None or not self.process.alive:
            return
        self.process.kill()
        self.cluster.drop_pipes(self.process)
        self.store.abandon()
        self.client = None

    def go_offline(self) -> None:
        """The app is closed."""
        self.kill()

    @property
    def live(self) -> bool:
        return self.client is not None and self.client.live

    def unsettled(self) -> int:
        """Messages that are neither sent nor failed."""
        return self.client.state.sends.total() if self.client else len(self.store.pending())


async def _ignoring(work: Any) -> None:
    try:
        await work
    except Exception:  # noqa: BLE001  a refusal is an answer
        pass
