"""States of one client connection and what each frame means in them (§9.3, §15.1, §15.3.1); pure.

Times are milliseconds of one monotonic clock. The driver asks `on_frame` what to do with a frame, reports the outcome
of what it started through `on_event`, and asks `due` when the heartbeat wheel reaches `next_check_ms`.
"""

from __future__ import annotations

from enum import Enum, IntEnum, auto
from typing import Final

from qim.protocol.opcodes import UPSTREAM, Opcode


class State(IntEnum):
    UNAUTHENTICATED = auto()
    """TLS is up, no valid AUTH yet: bounded by `unauth_connection_timeout`."""
    AUTHENTICATING = auto()
    """An AUTH is being judged by the registry and the MailboxNode."""
    SYNCING = auto()
    """AUTH_OK is out, the login barrier stands."""
    READY = auto()
    """ONLINE_READY is out: pushes flow."""
    CLOSING = auto()
    """Nothing is read or answered any more."""


class Frame(IntEnum):
    """Kinds of upstream frames that differ in treatment."""

    AUTH = auto()
    PING = auto()
    PULL_MAILBOX = auto()
    SYNC_COMPLETE = auto()
    PULL_HISTORY = auto()
    PULL_SESSION_LIST = auto()
    SEND_MESSAGE = auto()
    CHANGE_GROUP = auto()
    UNSERVED = auto()
    """In Appendix A, not served by this node."""
    UNKNOWN = auto()
    """Not in Appendix A, or with another version than the session's (§27.1.2)."""


class Event(Enum):
    """Outcomes the driver reports."""

    SESSION_OPENED = auto()
    SESSION_REFUSED = auto()
    BARRIER_LIFTED = auto()
    CLOSE = auto()


class Step(IntEnum):
    """What the driver does with a frame."""

    AUTHENTICATE = auto()
    RENEW = auto()
    PONG = auto()
    PULL_MAILBOX = auto()
    COMPLETE_SYNC = auto()
    REPEAT_READY = auto()
    PULL_HISTORY = auto()
    PULL_SESSION_LIST = auto()
    SUBMIT_SEND = auto()
    SUBMIT_GROUP = auto()
    REFUSE_UNSERVED = auto()
    """UPGRADE_REQUIRED when the frame has a request_id; the connection stays (§27.1.2)."""
    REFUSE_BUSY = auto()
    """A second AUTH while the first is being judged: PERMISSION_DENIED, the connection stays."""
    REFUSE_UNAUTHENTICATED = auto()
    """PERMISSION_DENIED `not_authenticated`, then close."""
    REFUSE_EXPIRED = auto()
    """TOKEN_EXPIRED: a write during the read-only grace (§15.3.1)."""
    CLOSE_EXPIRED = auto()
    """TOKEN_EXPIRED, then close."""
    IGNORE = auto()


class Expiry(Enum):
    """Why a connection must be closed now."""

    UNAUTHENTICATED = auto()
    IDLE = auto()
    TOKEN = auto()


FRAME_OF: Final[dict[int, Frame]] = {
    **dict.fromkeys(UPSTREAM, Frame.UNSERVED),
    Opcode.AUTH: Frame.AUTH,
    Opcode.PING: Frame.PING,
    Opcode.PULL_MAILBOX: Frame.PULL_MAILBOX,
    Opcode.SYNC_COMPLETE: Frame.SYNC_COMPLETE,
    Opcode.PULL_HISTORY: Frame.PULL_HISTORY,
    Opcode.PULL_SESSION_LIST: Frame.PULL_SESSION_LIST,
    Opcode.SEND_MESSAGE: Frame.SEND_MESSAGE,
    Opcode.CREATE_GROUP: Frame.CHANGE_GROUP,
    Opcode.LEAVE_GROUP: Frame.CHANGE_GROUP,
}
"""Anything else, downstream and internal opcodes included, is UNKNOWN from a client."""

_SERVED: Final = {
    Frame.AUTH: Step.RENEW,
    Frame.PING: Step.PONG,
    Frame.PULL_MAILBOX: Step.PULL_MAILBOX,
    Frame.SYNC_COMPLETE: Step.COMPLETE_SYNC,
    Frame.PULL_HISTORY: Step.PULL_HISTORY,
    Frame.PULL_SESSION_LIST: Step.PULL_SESSION_LIST,
    Frame.SEND_MESSAGE: Step.SUBMIT_SEND,
    Frame.CHANGE_GROUP: Step.SUBMIT_GROUP,
    Frame.UNSERVED: Step.REFUSE_UNSERVED,
    Frame.UNKNOWN: Step.REFUSE_UNSERVED,
}
_NOT_YET: Final = dict.fromkeys(Frame, Step.REFUSE_UNAUTHENTICATED) | {Frame.UNKNOWN: Step.REFUSE_UNSERVED}

ON_FRAME: Final[dict[State, dict[Frame, Step]]] = {
    State.UNAUTHENTICATED: _NOT_YET | {Frame.AUTH: Step.AUTHENTICATE},
    State.AUTHENTICATING: _NOT_YET | {Frame.AUTH: Step.REFUSE_BUSY, Frame.PING: Step.PONG},
    State.SYNCING: _SERVED,
    State.READY: _SERVED | {Frame.SYNC_COMPLETE: Step.REPEAT_READY},
    State.CLOSING: dict.fromkeys(Frame, Step.IGNORE),
}
"""Complete: every frame has a step in every state."""

TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.AUTHENTICATING, Event.SESSION_OPENED): State.SYNCING,
    (State.AUTHENTICATING, Event.SESSION_REFUSED): State.UNAUTHENTICATED,
    (State.SYNCING, Event.BARRIER_LIFTED): State.READY,
    **{(state, Event.CLOSE): State.CLOSING for state in State},
}
"""A pair that is missing is a defect of the driver."""

_AUTHENTICATE: Final = Step.AUTHENTICATE
_GRACE_STEPS: Final = frozenset(
    {
        Step.RENEW,
        Step.PONG,
        Step.PULL_MAILBOX,
        Step.COMPLETE_SYNC,
        Step.REPEAT_READY,
        Step.PULL_HISTORY,
        Step.PULL_SESSION_LIST,
    }
)
"""What the read-only grace allows; SYNC_COMPLETE writes nothing and belongs to the pulls (§15.3.1)."""


class ConnectionMachine:
    """State, deadlines and token of one connection; slotted because a worker holds tens of thousands."""

    __slots__ = (
        "state",
        "last_active_ms",
        "_unauthenticated_until_ms",
        "_idle_timeout_ms",
        "_grace_ms",
        "_token_expires_ms",
    )

    def __init__(
        self, *, now_ms: float, unauthenticated_timeout_ms: int, idle_timeout_ms: int, token_grace_ms: int
    ) -> None:
        self.state = State.UNAUTHENTICATED
        self.last_active_ms = now_ms
        self._unauthenticated_until_ms = now_ms + unauthenticated_timeout_ms
        self._idle_timeout_ms = idle_timeout_ms
        self._grace_ms = token_grace_ms
        self._token_expires_ms = 0.0

    def on_frame(self, frame: Frame, now_ms: float) -> Step:
        """What to do with a header-valid frame. AUTHENTICATE moves to AUTHENTICATING by itself."""
        self.last_active_ms = now_ms
        step = ON_FRAME[self.state][frame]
        if step is _AUTHENTICATE:
            self.state = State.AUTHENTICATING
        elif self._token_expires_ms <= now_ms and self.online and step is not Step.RENEW:
            if now_ms >= self._token_expires_ms + self._grace_ms:
                return Step.CLOSE_EXPIRED
            if step not in _GRACE_STEPS and step is not Step.REFUSE_UNSERVED:
                return Step.REFUSE_EXPIRED
        return step

    def on_event(self, event: Event) -> None:
        """KeyError when the driver reports what cannot happen in this state."""
        self.state = TRANSITIONS[self.state, event]

    def token_valid_until(self, expires_ms: float) -> None:
        """A token was accepted, at login or by silent renewal."""
        self._token_expires_ms = expires_ms

    @property
    def online(self) -> bool:
        """A session is open: AUTH_OK is out and the connection is not closing."""
        return self.state is State.SYNCING or self.state is State.READY

    def due(self, now_ms: float) -> Expiry | None:
        """Why the connection must be closed at `now_ms`, None when it may live on."""
        if self.state is State.CLOSING:
            return None
        if not self.online:
            return Expiry.UNAUTHENTICATED if now_ms >= self._unauthenticated_until_ms else None
        if now_ms >= self._token_expires_ms + self._grace_ms:
            return Expiry.TOKEN
        return Expiry.IDLE if now_ms - self.last_active_ms >= self._idle_timeout_ms else None

    def next_check_ms(self) -> float:
        """The earliest time at which `due` may answer, as far as is known now (§15.1.5)."""
        if not self.online:
            return self._unauthenticated_until_ms
        return min(self.last_active_ms + self._idle_timeout_ms, self._token_expires_ms + self._grace_ms)
