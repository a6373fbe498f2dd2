"""Entries and a player for the client machines: a step in, the actions it caused out, in short words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qim.client.actions import (
    Action,
    Apply,
    Cursor,
    Disconnect,
    LookThrough,
    PreferEndpoint,
    PullFinished,
    Ready,
    Rebuild,
    Refresh,
    Reply,
    SendFailed,
    Sent,
    Transmit,
)
from qim.client.dedup import DedupWindow
from qim.client.state import ClientState, StateOptions
from qim.client.sync import SyncOptions
from qim.core.seq import compose_message_id
from qim.errors import ErrorCode
from qim.protocol import qim_pb2 as pb
from qim.protocol.entry import FLAGS_ORDINARY
from qim.protocol.opcodes import Opcode

NOW_MS = 1_790_000_000_000
DM = "dm:alice:bob"


def entry(seq: int, *, conversation_seq: int | None = None, own: str = "", **fields: Any) -> pb.Entry:
    """An entry at `mailbox_seq` seq whose text is its number."""
    number = conversation_seq if conversation_seq is not None else seq
    message_id = compose_message_id(10_000 + number, 0, 1, 0)
    made = pb.Entry(
        mailbox_seq=seq, event_id=seq * 7919, event_ordinal=0, flags=FLAGS_ORDINARY, mention_type=0,
        event_type=pb.EVENT_MESSAGE, message_id=message_id, last_activity_id=message_id, conversation_id=DM,
        conversation_seq=number, sender_id="bob", created_at=NOW_MS, body_included=True,
        message_type=pb.MESSAGE_TYPE_TEXT, payload_or_ciphertext=str(number).encode(),
    )  # fmt: skip
    if own:
        made.client_message_id = own
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def batch(entries: Iterable[pb.Entry], covered: int, *, more: bool = False, watermark: int = 0) -> pb.MailboxBatch:
    return pb.MailboxBatch(
        entries=entries, covered_through_seq=covered, has_more=more, lane_watermark=watermark or covered
    )


def push(*entries: pb.Entry) -> pb.PushEvents:
    return pb.PushEvents(events=entries, last_pushed_user_seq=max(e.mailbox_seq for e in entries))


class Player:
    """A ClientState on a hand-moved clock. `does` names the actions of the last step; `rows` is what was stored."""

    def __init__(
        self, cursor: Cursor | None = None, *, options: StateOptions | None = None, jitter: float = 0.5
    ) -> None:
        self.now_ms = NOW_MS
        self.stored_cursor = cursor or Cursor()
        self.state = ClientState(
            options or StateOptions(sync=SyncOptions(device_id="d1", client_version="test")),
            self.stored_cursor,
            DedupWindow(),
            lambda: jitter,
        )
        self.rows: list[int] = []
        self.cursors: list[int] = [self.stored_cursor.last_applied_mailbox_seq]
        self.did: list[Action] = []
        self.ids: dict[str, list[int]] = {}
        """Request ids of what was sent, by opcode name."""

    def play(self, actions: list[Action]) -> list[Any]:
        """Carry them out on paper; short words for each."""
        self.did = actions
        return [self._word(action) for action in actions]

    def receive(self, opcode: Opcode, message: Any, request_id: int = 0) -> list[Any]:
        return self.play(self.state.receive(opcode, request_id, message.SerializeToString(), self.now_ms))

    def error(self, code: ErrorCode, request_id: int = 0, **fields: Any) -> list[Any]:
        return self.receive(Opcode.ERROR, pb.Error(code=int(code), **fields), request_id)  # type: ignore[arg-type]

    def wait(self, ms: int, *, heard: bool = True) -> list[Any]:
        """Time passes; `heard`: frames came meanwhile."""
        self.now_ms += ms
        return self.play(self.state.tick(self.now_ms, self.now_ms if heard else self.now_ms - ms))

    def last_id(self, opcode: str) -> int:
        return self.ids[opcode][-1]

    def login(self, *, sync_to: int = 0, offline: bool = False, hint: int = 0, **fields: Any) -> list[Any]:
        """Connect and get AUTH_OK."""
        self.play(self.state.connected("token", self.now_ms))
        ok = pb.AuthOk(
            session_epoch=1, sync_to_seq=sync_to, has_offline=offline, pending_entry_count_hint=hint,
            mailbox_cursor=pb.MailboxCursorToken(token=b"signed"), **fields,
        )  # fmt: skip
        return self.receive(Opcode.AUTH_OK, ok, self.last_id("AUTH"))

    def go_live(self, *, sync_to: int = 0) -> Player:
        """A login without backlog, all the way."""
        self.login(sync_to=sync_to)
        self.receive(Opcode.ONLINE_READY, pb.OnlineReady())
        return self

    def batch(self, answer: pb.MailboxBatch, which: int = -1) -> list[Any]:
        return self.receive(Opcode.MAILBOX_BATCH, answer, self.ids["PULL_MAILBOX"][which])

    def push(self, *entries: pb.Entry) -> list[Any]:
        return self.receive(Opcode.PUSH_EVENTS, push(*entries))

    def pong(self, **fields: Any) -> list[Any]:
        return self.receive(Opcode.PONG, pb.Pong(**fields))

    def _word(self, action: Action) -> Any:
        if isinstance(action, Transmit):
            name = action.opcode.name
            self.ids.setdefault(name, []).append(action.request_id)
            message: Any = action.message
            if name == "PULL_MAILBOX":
                return name, message.after_seq, message.up_to_seq
            if name == "SEND_MESSAGE":
                return name, message.client_message_id, message.after_client_message_id
            return name
        if isinstance(action, Apply):
            rows = [row.conversation_seq for row in action.rows]
            self.rows += rows
            if action.cursor is None:
                return "ROWS", rows
            self.stored_cursor = action.cursor
            self.cursors.append(action.cursor.last_applied_mailbox_seq)
            return "ROWS", rows, action.cursor.last_applied_mailbox_seq
        return self._quiet_word(action)

    def _quiet_word(self, action: Action) -> Any:
        if isinstance(action, Disconnect):
            return "DISCONNECT", action.reason
        if isinstance(action, Sent):
            return "SENT", action.request.client_message_id, action.conversation_seq
        if isinstance(action, SendFailed):
            return "FAILED", action.client_message_id
        if isinstance(action, LookThrough):
            return "LOOK", action.conversation_id
        if isinstance(action, Refresh):
            return "REFRESH", action.conversation_seqs
        if isinstance(action, PullFinished):
            return "PULLED", action.covered_through_seq
        names = {Ready: "READY", Rebuild: "REBUILD", Reply: "REPLY", PreferEndpoint: "ENDPOINT"}
        return names[type(action)]
