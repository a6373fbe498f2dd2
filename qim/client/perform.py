"""Does what the machines ask: rows and cursor into the store, frames onto the wire, answers to whoever waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from google.protobuf.message import Message

from qim.client.actions import (
    Action,
    Apply,
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
from qim.client.events import (
    ClientEvent,
    MessageFailed,
    MessageReceived,
    MessageSent,
    RequestFailed,
    SendRefused,
    SendResult,
    StateChanged,
)
from qim.client.history import HistoryReader
from qim.client.store import LocalStore
from qim.client.timeline import row_from_ack
from qim.client.wire import WireConnection

PREFERRED_ENDPOINT: Final = "preferred_endpoint"
"""Key of `local_meta`: where the server wants the next connection (§5.3.2)."""
REBUILD: Final = "rebuild"
"""Key of `local_meta`: not empty while conversations wait to be filled after CURSOR_EXPIRED."""
_DEDUP_TRIM_EVERY: Final = 1024


class Performer:
    """Carries out actions in order. `wire` is the connection in use, None between two.

    The store's transaction ends with a `durable` action, at the latest `commit_interval_ms` after it began.
    """

    __slots__ = (
        "wire", "handles", "replies", "finished_pulls", "logins", "_user_id", "_store", "_dedup", "_history", "_emit",
        "_commit_interval_ms", "_commit_timer", "_untrimmed",
    )  # fmt: skip

    def __init__(
        self,
        user_id: str,
        store: LocalStore,
        dedup: DedupWindow,
        history: HistoryReader,
        emit: Callable[[ClientEvent], None],
        commit_interval_ms: int,
    ) -> None:
        self.wire: WireConnection | None = None
        self.handles: dict[str, asyncio.Future[SendResult]] = {}
        """By client_message_id."""
        self.replies: dict[int, asyncio.Future[Message]] = {}
        """By request id, of this connection."""
        self.finished_pulls = 0
        self.logins = 0
        self._user_id = user_id
        self._store = store
        self._dedup = dedup
        self._history = history
        self._emit = emit
        self._commit_interval_ms = commit_interval_ms
        self._commit_timer: asyncio.TimerHandle | None = None
        self._untrimmed = 0

    def do(self, actions: list[Action]) -> Disconnect | None:
        """All of them; the last Disconnect among them, which the caller acts on."""
        durable = False
        disconnect: Disconnect | None = None
        for action in actions:
            if isinstance(action, Apply):
                self._apply(action)
                durable = durable or action.durable
            elif isinstance(action, Transmit):
                if self.wire is not None:
                    self.wire.request(action.opcode, action.message, action.request_id)
            elif isinstance(action, Disconnect):
                disconnect = action
            else:
                self._settle(action)
        if durable:
            self.commit()
        else:
            self.commit_soon()
        return disconnect

    def commit(self) -> None:
        """End the store's transaction now."""
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None
        if not self._store.closed:
            self._store.commit()

    def commit_soon(self) -> None:
        """End the store's transaction within the interval, if one is open."""
        if not self._store.writing or self._commit_timer is not None:
            return
        if self._commit_interval_ms:
            loop = asyncio.get_running_loop()
            self._commit_timer = loop.call_later(self._commit_interval_ms / 1000, self.commit)
        else:
            self._store.commit()

    def set_preferred_endpoint(self, endpoint: str) -> None:
        """Remember it over restarts; empty forgets it, for it did not answer."""
        if self._store.meta(PREFERRED_ENDPOINT) != endpoint:
            self._store.set_meta(PREFERRED_ENDPOINT, endpoint)
            self.commit_soon()

    def fail_replies(self) -> None:
        """The connection is gone: its requests have no answer."""
        replies, self.replies = self.replies, {}
        for future in replies.values():
            if not future.done():
                future.set_exception(RequestFailed(0, "connection lost"))

    def _apply(self, action: Apply) -> None:
        fresh = self._store.apply(action.rows, action.dedup, action.cursor)
        self._untrimmed += len(action.dedup)
        if self._untrimmed >= _DEDUP_TRIM_EVERY:
            self._untrimmed = 0
            self._store.forget_dedup_below(self._dedup.floor_seq())
        for row in fresh:
            self._emit(MessageReceived(row=row))

    def _settle(self, action: Action) -> None:
        if isinstance(action, Sent):
            self._sent(action)
        elif isinstance(action, SendFailed):
            self._failed(action)
        elif isinstance(action, Reply):
            self._reply(action)
        elif isinstance(action, PullFinished):
            self.finished_pulls += 1
        elif isinstance(action, Ready):
            self.logins += 1
            self._history.resume()
            if self._store.meta(REBUILD):
                self._history.rebuild()
            self._emit(StateChanged(state="online"))
        elif isinstance(action, PreferEndpoint):
            self.set_preferred_endpoint(action.endpoint)
        elif isinstance(action, Refresh):
            self._history.refresh(action.conversation_id, action.conversation_seqs)
        elif isinstance(action, LookThrough):
            self._history.look_through(action.conversation_id)
        elif isinstance(action, Rebuild):
            self._store.set_meta(REBUILD, "wanted")

    def _sent(self, action: Sent) -> None:
        request = action.request
        row = None
        if not action.room_seq:
            row = row_from_ack(request, self._user_id, action.message_id, action.conversation_seq)
        self._store.settle_pending(request.client_message_id, row)
        result = SendResult(action.message_id, action.conversation_seq, action.room_seq)
        future = self.handles.pop(request.client_message_id, None)
        if future is not None and not future.done():
            future.set_result(result)
        self._emit(
            MessageSent(
                conversation_id=request.conversation_id, client_message_id=request.client_message_id, result=result
            )
        )

    def _failed(self, action: SendFailed) -> None:
        self._store.fail_pending(action.client_message_id, action.code, action.detail)
        future = self.handles.pop(action.client_message_id, None)
        if future is not None and not future.done():
            future.set_exception(SendRefused(action.code, action.detail))
        self._emit(
            MessageFailed(
                client_message_id=action.client_message_id,
                code=action.code,
                detail=action.detail,
                resendable=action.resendable,
            )
        )

    def _reply(self, action: Reply) -> None:
        future = self.replies.pop(action.request_id, None)
        if future is None or future.done():
            return
        if action.error is not None:
            error = action.error
            future.set_exception(RequestFailed(int(error.code), error.detail, error.retry_after_ms))
        elif action.message is not None:
            future.set_result(action.message)
