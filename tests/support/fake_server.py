"""A scripted server on real TLS: one mailbox per user, honest by default, and every frame can be answered otherwise.

`server.script[opcode]` replaces the honest answer to one frame of that opcode: callables are used up in order; one that
returns True has dealt with the frame.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from google.protobuf.message import Message

from qim.app.tls import client_context, ensure_certificates, server_context
from qim.core.coverage import cut_page
from qim.core.seq import MESSAGE_EPOCH_UNIX_MS, compose_message_id
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.entry import FLAGS_ORDINARY
from qim.protocol.header import MAX_FRAME_BYTES, encode_frame
from qim.protocol.opcodes import STREAM_OF, Opcode
from qim.protocol.reader import Frame, FrameLimits, FrameReader

NOW_MS = 1_790_000_000_000
EPOCH = 1 << 48
_BODIES: dict[int, type[Message]] = {
    Opcode.AUTH: pb.Auth,
    Opcode.PING: pb.Ping,
    Opcode.PULL_MAILBOX: pb.PullMailbox,
    Opcode.SYNC_COMPLETE: pb.SyncComplete,
    Opcode.SEND_MESSAGE: pb.SendMessage,
    Opcode.PULL_HISTORY: pb.PullHistory,
    Opcode.PULL_SESSION_LIST: pb.PullSessionList,
    Opcode.CREATE_GROUP: pb.CreateGroup,
    Opcode.LEAVE_GROUP: pb.LeaveGroup,
}


class Peer:
    """The server's side of one connection. `seen` holds (opcode, request_id, body message) in order."""

    def __init__(self, server: FakeServer, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.seen: list[tuple[Opcode, int, Any]] = []
        self.live = False
        self.last_pushed = 0
        self._writer = writer

    def send(self, opcode: Opcode, message: Message, request_id: int = 0) -> None:
        self._writer.write(
            encode_frame(opcode, message.SerializeToString(), request_id=request_id, stream_id=STREAM_OF[opcode])
        )

    def error(self, code: ErrorCode, request_id: int = 0, **fields: Any) -> None:
        self.send(Opcode.ERROR, pb.Error(code=int(code), request_id=request_id, **fields), request_id)  # type: ignore[arg-type]

    def push(self, *entries: pb.Entry) -> None:
        self.last_pushed = max([self.last_pushed, *(e.mailbox_seq for e in entries)])
        self.send(Opcode.PUSH_EVENTS, pb.PushEvents(last_pushed_user_seq=self.last_pushed, events=entries))

    def bodies(self, opcode: Opcode) -> list[Any]:
        return [body for op, _, body in self.seen if op == opcode]

    def reset(self) -> None:
        """End with a TCP reset, as a killed process does."""
        self.live = False
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self.live = False
        self._writer.close()


Script = Callable[[Peer, int, Any], bool]


class FakeServer:
    """One user's mailbox, one conversation log per conversation, any number of devices."""

    def __init__(self, directory: Path, *, user_id: str = "alice", ping_interval_ms: int = 60_000) -> None:
        self.files = ensure_certificates(directory / "tls", "127.0.0.1", NOW_MS)
        self.client_context: ssl.SSLContext = client_context(self.files.ca_path)
        self.user_id = user_id
        self.ping_interval_ms = ping_interval_ms
        self.mailbox: list[pb.Entry] = []
        self.watermark = EPOCH
        self.hint: int | None = None
        self.peers: list[Peer] = []
        self.script: dict[Opcode, list[Script]] = defaultdict(list)
        self.committed: dict[str, pb.SendAck] = {}
        self.logs: dict[str, list[pb.Entry]] = defaultdict(list)
        self.muted = False
        """Read everything, answer nothing: a dead path."""
        self.changed = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, ssl=server_context(self.files), ssl_shutdown_timeout=0.2
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in self.peers:
            peer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def peer(self) -> Peer:
        return self.peers[-1]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until a frame made `condition` true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    # ------------------------------------------------------------------ content

    def entry(
        self, conversation_id: str, text: str, *, sender: str = "bob", own_id: str = "", **fields: Any
    ) -> pb.Entry:
        """Commit one message and materialise it; not pushed."""
        log = self.logs[conversation_id]
        self.watermark += 1
        seq = len(log) + 1
        message_id = compose_message_id(NOW_MS - MESSAGE_EPOCH_UNIX_MS, 0, 1, self.watermark & 0xFFFFFF)
        entry = pb.Entry(
            mailbox_seq=self.watermark, event_id=self.watermark * 7919, event_ordinal=0, flags=FLAGS_ORDINARY,
            mention_type=0, visibility_floor_conversation_seq=0, target_mention_type=0, event_type=pb.EVENT_MESSAGE,
            message_id=message_id, conversation_id=conversation_id, conversation_seq=seq, last_activity_id=message_id,
            sender_id=sender, created_at=NOW_MS, body_included=True, message_type=pb.MESSAGE_TYPE_TEXT,
            payload_or_ciphertext=text.encode(),
        )  # fmt: skip
        if own_id:
            entry.client_message_id = own_id
        for name, value in fields.items():
            setattr(entry, name, value)
        log.append(entry)
        self.mailbox.append(entry)
        return entry

    def push_new(self, conversation_id: str, text: str, **fields: Any) -> pb.Entry:
        """Commit, materialise and push to every live connection."""
        entry = self.entry(conversation_id, text, **fields)
        for peer in self.peers:
            if peer.live:
                peer.push(entry)
        return entry

    def commit(self, request: pb.SendMessage) -> pb.SendAck:
        """The commit of one SEND_MESSAGE: dedup first."""
        ack = self.committed.get(request.client_message_id)
        if ack is None:
            entry = self.push_new(
                request.conversation_id, request.payload.decode(), sender=self.user_id, own_id=request.client_message_id
            )
            ack = pb.SendAck(
                client_message_id=request.client_message_id, message_id=entry.message_id,
                conversation_seq=entry.conversation_seq, last_activity_id=entry.message_id,
            )  # fmt: skip
            self.committed[request.client_message_id] = ack
        return ack

    # ------------------------------------------------------------------ frames

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = Peer(self, writer)
        self.peers.append(peer)
        self.changed.set()
        frames = FrameReader(FrameLimits(default_bytes=MAX_FRAME_BYTES))
        try:
            while data := await reader.read(1 << 16):
                for frame in frames.feed(data):
                    self._frame(peer, frame)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            peer.live = False
            writer.close()
            self._tasks.discard(task)
            self.changed.set()

    def _frame(self, peer: Peer, frame: Frame) -> None:
        opcode = Opcode(frame.opcode)
        body = _BODIES[opcode].FromString(frame.body)
        peer.seen.append((opcode, frame.request_id, body))
        if not self.muted:
            scripted = self.script[opcode]
            if not (scripted and scripted.pop(0)(peer, frame.request_id, body)):
                getattr(self, f"_on_{opcode.name.lower()}")(peer, frame.request_id, body)
        self.changed.set()

    def _on_auth(self, peer: Peer, request_id: int, auth: pb.Auth) -> None:
        position = auth.mailbox_cursor.last_applied_mailbox_seq
        unread = [e for e in self.mailbox if e.mailbox_seq > position]
        peer.last_pushed = self.watermark
        peer.send(
            Opcode.AUTH_OK,
            pb.AuthOk(
                session_epoch=len(self.peers), lane_id=3, lane_watermark=self.watermark, sync_to_seq=self.watermark,
                has_offline=bool(unread), pending_entry_count_hint=len(unread) if self.hint is None else self.hint,
                next_ping_interval_ms=self.ping_interval_ms,
                mailbox_cursor=pb.MailboxCursorToken(token=b"signed", last_applied_mailbox_seq=position),
            ),
            request_id,
        )  # fmt: skip

    def _on_pull_mailbox(self, peer: Peer, request_id: int, pull: pb.PullMailbox) -> None:
        peer.send(Opcode.MAILBOX_BATCH, self.page(pull), request_id)

    def page(self, pull: pb.PullMailbox) -> pb.MailboxBatch:
        """The honest answer to a pull."""
        up_to = pull.up_to_seq or self.watermark
        found = [e for e in self.mailbox if pull.after_seq < e.mailbox_seq <= up_to]
        cut = cut_page(
            [e.mailbox_seq for e in found], [e.ByteSize() for e in found], up_to_seq=up_to,
            max_items=pull.max_items, max_bytes=pull.max_bytes, exhausted=True,
        )  # fmt: skip
        return pb.MailboxBatch(
            entries=found[: cut.count], covered_through_seq=cut.covered_through_seq,
            lane_watermark=self.watermark, has_more=cut.has_more,
        )  # fmt: skip

    def _on_sync_complete(self, peer: Peer, request_id: int, complete: pb.SyncComplete) -> None:
        peer.live = True
        peer.send(Opcode.ONLINE_READY, pb.OnlineReady())
        missed = [e for e in self.mailbox if e.mailbox_seq > complete.sync_to_seq]
        if missed:
            peer.push(*missed)

    def _on_ping(self, peer: Peer, request_id: int, ping: pb.Ping) -> None:
        self.pong(peer, request_id, ping)

    def pong(self, peer: Peer, request_id: int, ping: pb.Ping, *, dirty: bool = False) -> None:
        peer.send(
            Opcode.PONG,
            pb.Pong(
                ping_id=ping.ping_id, last_pushed_user_seq=peer.last_pushed, mailbox_dirty=dirty,
                next_ping_interval_ms=self.ping_interval_ms,
            ),
            request_id,
        )  # fmt: skip

    def _on_send_message(self, peer: Peer, request_id: int, request: pb.SendMessage) -> None:
        after = request.after_client_message_id
        if after and after not in self.committed and request.client_message_id not in self.committed:
            peer.error(
                ErrorCode.RATE_LIMITED, request_id, detail="out_of_order", retry_after_ms=20,
                client_message_id=request.client_message_id,
            )  # fmt: skip
            return
        ack = pb.SendAck()
        ack.CopyFrom(self.commit(request))
        ack.request_id = request_id
        peer.send(Opcode.SEND_ACK, ack, request_id)

    def _on_pull_history(self, peer: Peer, request_id: int, pull: pb.PullHistory) -> None:
        log = self.logs[pull.conversation_id]
        limit = pull.limit or 50
        if pull.direction == pb.NEWER:
            found = [e for e in log if e.conversation_seq > pull.anchor_conversation_seq]
            page, more = found[:limit], len(found) > limit
        else:
            found = [e for e in log if e.conversation_seq <= (pull.anchor_conversation_seq or len(log))]
            page, more = found[-limit:], len(found) > limit
        messages = [
            pb.HistoryMessage(
                conversation_seq=e.conversation_seq, message_id=e.message_id, last_activity_id=e.last_activity_id,
                sender_id=e.sender_id, client_message_id=e.client_message_id, message_type=e.message_type,
                payload_or_ciphertext=e.payload_or_ciphertext, created_at=e.created_at, event_type=e.event_type,
                body_included=True,
            )
            for e in page
        ]  # fmt: skip
        batch = pb.HistoryBatch(
            messages=messages, latest_conversation_seq=len(log), has_more=more, conversation_id=pull.conversation_id,
            earliest_available_conversation_seq=1,
        )  # fmt: skip
        peer.send(Opcode.HISTORY_BATCH, batch, request_id)

    def _on_pull_session_list(self, peer: Peer, request_id: int, pull: pb.PullSessionList) -> None:
        sessions = [
            pb.Session(
                conversation_id=conversation_id, latest_conversation_seq=len(log), unread_count=len(log),
                last_activity_id=log[-1].last_activity_id, last_message_id=log[-1].message_id,
                preview_or_placeholder=log[-1].payload_or_ciphertext.decode(),
            )
            for conversation_id, log in self.logs.items()
        ]  # fmt: skip
        batch = pb.SessionListBatch(
            sessions=sessions, snapshot_revision=pull.snapshot_revision + 1, projection_complete=True
        )
        peer.send(Opcode.SESSION_LIST_BATCH, batch, request_id)

    def _on_create_group(self, peer: Peer, request_id: int, create: pb.CreateGroup) -> None:
        members = [pb.Member(user_id=user) for user in (self.user_id, *create.member_ids)]
        peer.send(Opcode.MEMBER_LIST_BATCH, pb.MemberListBatch(members=members, total_hint=len(members)), request_id)

    def _on_leave_group(self, peer: Peer, request_id: int, leave: pb.LeaveGroup) -> None:
        peer.send(Opcode.MEMBER_LIST_BATCH, pb.MemberListBatch(total_hint=1), request_id)
