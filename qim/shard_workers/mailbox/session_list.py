"""PULL_SESSION_LIST: every conversation of a user with its head, one snapshot a request, not paged (§3.7, §9.6.3).

The set of conversations is `user_conversation_state`, everything else is read from the heads at the time of the
request: nothing is kept, so nothing can be out of date. Unread counts are an upper bound and say so (`unread_exact`
false): what was read is not stored yet. A leaver's conversation is frozen at the last message he may see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from qim.core.ids import conversation_kind, direct_members, group_id_of
from qim.core.visibility import FULL, Interval, visible_upper_bound
from qim.errors import StoreError
from qim.obs.logs import get_logger
from qim.protocol.header import MAX_FRAME_BYTES
from qim.protocol.qim_pb2 import PullSessionList, Session, SessionListBatch
from qim.shard_workers.mailbox.bodies import BodyReader
from qim.stores.api import ConversationHead, GroupMembership, MailboxStore, MessageStore

log = get_logger(__name__)

READS_AT_ONCE: Final = 64
"""Conversations read at the same time: two commands each."""
LIST_BYTES_MAX: Final = MAX_FRAME_BYTES - 4096
"""Beyond it the least recently active conversations are left out and `projection_complete` is false: about 15,000."""


class SessionListReader:
    """Answers PULL_SESSION_LIST from the stores; holds nothing."""

    def __init__(
        self, mailboxes: MailboxStore, messages: MessageStore, membership: GroupMembership, bodies: BodyReader
    ) -> None:
        self._mailboxes = mailboxes
        self._messages = messages
        self._membership = membership
        self._bodies = bodies

    async def pull(self, tenant_id: str, user_id: str, pull: PullSessionList) -> SessionListBatch:
        """The snapshot; its revision is the one after the client's. StoreError when something cannot be read."""
        seen = await self._mailboxes.conversations(tenant_id, user_id)
        sessions: list[Session] = []
        for at in range(0, len(seen), READS_AT_ONCE):
            names = [row.conversation_id for row in seen[at : at + READS_AT_ONCE]]
            found = await asyncio.gather(*(self._session(tenant_id, user_id, name) for name in names))
            sessions += [session for session in found if session is not None]
        sessions.sort(key=lambda session: session.conversation_id)
        sessions.sort(key=lambda session: session.last_activity_id, reverse=True)
        kept = _within_frame(sessions)
        if len(kept) < len(sessions):
            log.error("session_list_cut", tenant_id=tenant_id, user_id=user_id, count=len(sessions), items=len(kept))
        return SessionListBatch(
            sessions=kept,
            snapshot_revision=pull.snapshot_revision + 1,
            projection_complete=len(kept) == len(sessions),
        )

    async def _session(self, tenant_id: str, user_id: str, conversation_id: str) -> Session | None:
        """None for a conversation the user may not see any more of."""
        head, intervals = await asyncio.gather(
            self._messages.head(tenant_id, conversation_id), self._intervals(tenant_id, user_id, conversation_id)
        )
        if not intervals:
            return None
        latest = visible_upper_bound(intervals, head.latest_conversation_seq)
        first = max(head.earliest_available_conversation_seq, intervals[-1].joined_at + 1)
        session = Session(
            conversation_id=conversation_id,
            latest_conversation_seq=latest,
            unread_count=max(0, latest + 1 - first),
            unread_exact=latest < first,
        )
        if latest == head.latest_conversation_seq:
            session.last_activity_id = session.last_message_id = head.last_message_id
            session.preview_or_placeholder = self._preview(tenant_id, conversation_id, head)
        elif latest:
            (record,) = (await self._bodies.records(tenant_id, conversation_id, (latest,))).values()
            if record is not None:
                session.last_activity_id = session.last_message_id = record.message_id
        return session

    async def _intervals(self, tenant_id: str, user_id: str, conversation_id: str) -> tuple[Interval, ...]:
        kind = conversation_kind(conversation_id)
        if kind == "direct":
            return FULL if user_id in direct_members(conversation_id) else ()
        return await self._membership.intervals(tenant_id, group_id_of(conversation_id), user_id)

    def _preview(self, tenant_id: str, conversation_id: str, head: ConversationHead) -> str:
        """Empty, the placeholder, when the message may not be shown any more or cannot be read."""
        try:
            return self._bodies.open_preview(tenant_id, conversation_id, head)
        except StoreError as error:
            log.error("preview_unreadable", tenant_id=tenant_id, conversation_id=conversation_id, error=error)
            return ""


def _within_frame(sessions: Sequence[Session]) -> Sequence[Session]:
    total = 0
    for at, session in enumerate(sessions):
        total += session.ByteSize() + 4
        if total > LIST_BYTES_MAX:
            return sessions[:at]
    return sessions
