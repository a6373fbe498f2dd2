"""What the pure client machines ask their driver to do, in the order it must be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import Message

from qim.client.timeline import MessageRow
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode


class Cursor(NamedTuple):
    """Signed token and the plaintext position: everything up to it is parsed and persisted (§6.8)."""

    token: bytes = b""
    last_applied_mailbox_seq: int = 0
    lane_id: int = 0


class RequestIds:
    """Request ids of one connection: 1 … 2^32-1, never 0 (A.1)."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last = self._last % 0xFFFF_FFFF + 1
        return self._last


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmit:
    """Write one frame."""

    opcode: Opcode
    message: Message
    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Store rows and, with `cursor`, the position that covers them: one transaction (§27.3.1).

    `durable`: the transaction ends before anything later is sent; pushes may share one with their neighbours.
    """

    rows: list[MessageRow]
    dedup: list[tuple[int, int, int, bytes]]
    cursor: Cursor | None = None
    durable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """ONLINE_READY: synchronised and live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferEndpoint:
    """Connect there next time (§5.3.2)."""

    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFinished:
    """A pull of the live connection reached the watermark; the cursor stands at `covered_through_seq`."""

    covered_through_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A pending message is committed: the bubble turns to sent, the pending row goes."""

    request: pb.SendMessage
    message_id: bytes
    conversation_seq: int
    room_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A pending message will not be sent again by itself; `resendable` keeps its id (§19.2.4)."""

    client_message_id: str
    code: int
    detail: str
    resendable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LookThrough:
    """Search the newest history page of a conversation for own messages before sending old ones again (ADR-0008)."""

    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Read these messages again by PULL_HISTORY: body missing, or recalled or edited since (§9.3.3, §13.4.2)."""

    conversation_id: str
    conversation_seqs: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """The old cursor is beyond retention: once live, fill the conversations by PULL_HISTORY (§9.6.3). Remembered by the
    driver together with the empty cursor that follows, so that the end of the process forgets neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a request the driver made itself; exactly one of the two is set."""

    request_id: int
    message: Message | None = None
    error: pb.Error | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Close the connection. `retry_after_ms` is the server's order for the next attempt, None = ordinary back-off.

    `final`: do not connect again. `wipe`: local messages and cursor must go (revoked). `refresh_token`: ask the token
    provider before the next attempt. `endpoint`: where a REDIRECT points.
    """

    reason: str
    retry_after_ms: int | None = None
    final: bool = False
    wipe: bool = False
    refresh_token: bool = False
    endpoint: str = ""


Action = (
    Transmit
    | Apply
    | Ready
    | PreferEndpoint
    | PullFinished
    | Sent
    | SendFailed
    | LookThrough
    | Refresh
    | Rebuild
    | Reply
    | Disconnect
)
