"""The whole client as one pure machine: frames, time and wishes in, actions out. It knows no loop, socket or clock.

`now_ms` is unix time that never goes back: the driver anchors a monotonic clock at the wall clock of its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError, Message

from qim.client.actions import Action, Cursor, Disconnect, Reply, RequestIds, Transmit
from qim.client.dedup import DedupWindow
from qim.client.heartbeat import Heartbeat, HeartbeatOptions
from qim.client.pending import Pending, SendOptions, SendQueue
from qim.client.sync import Phase, SyncCounters, SyncOptions, SyncState
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode

_FATAL_KICKS: Final = {
    pb.REPLACED: "replaced",
    pb.ADMIN_REVOKED: "admin",
    pb.BANNED: "banned",
    pb.KICKED_TOKEN_REVOKED: "token_revoked",
}
_REPLIES: Final[dict[int, type[Message]]] = {
    Opcode.HISTORY_BATCH: pb.HistoryBatch,
    Opcode.MEMBER_LIST_BATCH: pb.MemberListBatch,
    Opcode.SESSION_LIST_BATCH: pb.SessionListBatch,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Parameters of the three machines."""

    sync: SyncOptions
    send: SendOptions = field(default_factory=SendOptions)
    heartbeat: HeartbeatOptions = field(default_factory=HeartbeatOptions)


class ClientState:
    """Composition of sync, send queue and heartbeat over one list of actions and one series of request ids.

    Every method returns the actions it caused, to be done in order before the next call.
    """

    __slots__ = ("sync", "sends", "heartbeat", "_out", "_ids")

    def __init__(
        self, options: StateOptions, cursor: Cursor, dedup: DedupWindow, random_unit: Callable[[], float]
    ) -> None:
        self._out: list[Action] = []
        self._ids = RequestIds()
        self.sends = SendQueue(options.send, self._out, self._ids, random_unit)
        self.heartbeat = Heartbeat(options.heartbeat, self._out, self._ids)
        self.sync = SyncState(options.sync, cursor, dedup, self._out, self._ids, random_unit, self.sends.own_entry)

    @property
    def counters(self) -> SyncCounters:
        return self.sync.counters

    @property
    def live(self) -> bool:
        """Synchronised, pushes apply."""
        return self.sync.phase is Phase.LIVE

    # ------------------------------------------------------------------ wishes of the driver

    def connected(self, access_token: str, now_ms: int) -> list[Action]:
        """The transport is up."""
        self.sync.connected(access_token, now_ms)
        return self._drain()

    def disconnected(self) -> list[Action]:
        """The transport is gone."""
        self.sync.disconnected()
        self.sends.offline()
        self.heartbeat.stop()
        return self._drain()

    def renew(self, access_token: str, now_ms: int) -> list[Action]:
        """A fresh token for the live connection."""
        self.sync.renew(access_token, now_ms)
        return self._drain()

    def send(self, pending: Pending, now_ms: int) -> list[Action]:
        """A message the driver has stored."""
        self.sends.add(pending, now_ms)
        return self._drain()

    def resync(self, now_ms: int) -> list[Action]:
        """The user asks for the newest state."""
        self.sync.resync(now_ms)
        return self._drain()

    def looked_through(
        self, conversation_id: str, own: dict[str, tuple[bytes, int]] | None, now_ms: int
    ) -> list[Action]:
        """Answer to LookThrough."""
        self.sends.looked_through(conversation_id, own, now_ms)
        return self._drain()

    def request(self, opcode: Opcode, message: Message) -> tuple[int, list[Action]]:
        """A request whose answer comes back as Reply with the returned id."""
        request_id = self._ids.next()
        self._out.append(Transmit(opcode=opcode, message=message, request_id=request_id))
        return request_id, self._drain()

    def tick(self, now_ms: int, last_received_ms: int) -> list[Action]:
        """Time has passed; `last_received_ms` is when the newest downstream frame came."""
        position = self.sync.cursor.last_applied_mailbox_seq
        self.sync.tick(now_ms)
        if self.sends.tick(now_ms):
            self.heartbeat.probe(now_ms, position)
        self.heartbeat.tick(now_ms, last_received_ms, position)
        return self._drain()

    def next_deadline_ms(self) -> int:
        """When `tick` has something to do."""
        return min(self.sync.next_deadline_ms(), self.sends.next_deadline_ms(), self.heartbeat.next_deadline_ms())

    # ------------------------------------------------------------------ frames

    def receive(self, opcode: int, request_id: int, body: bytes, now_ms: int) -> list[Action]:
        """One downstream frame; an unknown opcode is skipped and counted (§27.1.2)."""
        try:
            if opcode == Opcode.PUSH_EVENTS:
                self.sync.on_push(pb.PushEvents.FromString(body), now_ms)
            elif opcode == Opcode.SEND_ACK:
                self.sends.on_ack(pb.SendAck.FromString(body), now_ms)
            elif opcode == Opcode.MAILBOX_BATCH:
                self.sync.on_batch(pb.MailboxBatch.FromString(body), request_id, now_ms)
            elif opcode == Opcode.PONG:
                pong = pb.Pong.FromString(body)
                self.heartbeat.on_pong(pong, now_ms)
                self.sync.on_pong(pong, now_ms)
            elif opcode == Opcode.ERROR:
                error = pb.Error.FromString(body)
                self._on_error(error, request_id or error.request_id, now_ms)
            elif opcode in _REPLIES:
                self._out.append(Reply(request_id=request_id, message=_REPLIES[opcode].FromString(body)))
            else:
                self._session_frame(opcode, request_id, body, now_ms)
        except DecodeError:
            self._out.append(Disconnect(reason="undecodable"))
        return self._drain()

    def _session_frame(self, opcode: int, request_id: int, body: bytes, now_ms: int) -> None:
        if opcode == Opcode.AUTH_OK:
            ok = pb.AuthOk.FromString(body)
            if not self.live:
                self.heartbeat.start(ok.next_ping_interval_ms, now_ms)
            self.sync.on_auth_ok(ok, request_id, now_ms)
        elif opcode == Opcode.ONLINE_READY:
            self.sync.on_ready(now_ms)
            if self.live:
                self.sends.online(now_ms)
        elif opcode == Opcode.KICKED:
            kicked = pb.Kicked.FromString(body)
            reason = _FATAL_KICKS.get(kicked.reason, "kicked")
            wipe = kicked.reason == pb.KICKED_TOKEN_REVOKED
            self._out.append(Disconnect(reason=reason, final=True, wipe=wipe))
        elif opcode == Opcode.REDIRECT:
            redirect = pb.Redirect.FromString(body)
            self._out.append(Disconnect(reason="redirect", retry_after_ms=0, endpoint=redirect.endpoint_hint))
        else:
            self.counters.unknown_opcode_dropped += 1

    def _on_error(self, error: pb.Error, request_id: int, now_ms: int) -> None:
        if self.sends.on_error(error, request_id, now_ms):
            if int(error.code) == ErrorCode.TOKEN_EXPIRED:
                self._out.append(Disconnect(reason="token_expired", refresh_token=True))
        elif not self.sync.on_error(error, request_id, now_ms):
            self._out.append(Reply(request_id=request_id, error=error))

    def _drain(self) -> list[Action]:
        out = self._out
        if not out:
            return []
        drained = out.copy()
        out.clear()
        return drained
