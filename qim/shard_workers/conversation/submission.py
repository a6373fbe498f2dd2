"""What waits in a writer: sends and group operations, from their arrival to their answer."""

from __future__ import annotations

from typing import Any, Final

from qim.protocol.qim_pb2 import SendMessage
from qim.stores.api import MembershipRewrite

MEMBERSHIP_CUSTOM_TYPE: Final = "qim.membership.v1"
"""`custom_type` of the control message that announces who joined and left (ADR-0021)."""


class Submission:
    """One request. `ticket` is the runner's and means nothing here; times are monotonic ms."""

    __slots__ = (
        "attempts", "client_message_id", "conversation_id", "expires_at_ms", "member_count", "membership_version",
        "message_id", "request_digest", "sender_id", "tenant_id", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        tenant_id: str,
        conversation_id: str,
        sender_id: str,
        client_message_id: str,
        request_digest: bytes,
        *,
        expires_at_ms: float,
        ticket: Any = None,
    ) -> None:
        self.tenant_id = tenant_id
        self.conversation_id = conversation_id
        self.sender_id = sender_id
        self.client_message_id = client_message_id
        self.request_digest = request_digest
        self.expires_at_ms = expires_at_ms
        """From then on nobody waits for the answer: what was not tried yet is dropped."""
        self.ticket = ticket
        self.message_id = b""
        """Allocated anew for every commit call."""
        self.membership_version = 0
        """Frozen when it is put into a commit call; 0 = single chat."""
        self.member_count = 2
        self.attempts = 0


class Send(Submission):
    """SEND_MESSAGE."""

    __slots__ = ("admitted", "device_id", "limits_lifted", "message", "reply_to_user_id")

    def __init__(
        self,
        tenant_id: str,
        sender_id: str,
        device_id: str,
        message: SendMessage,
        request_digest: bytes,
        *,
        expires_at_ms: float,
        limits_lifted: bool = False,
        ticket: Any = None,
    ) -> None:
        super().__init__(
            tenant_id, message.conversation_id, sender_id, message.client_message_id, request_digest,
            expires_at_ms=expires_at_ms, ticket=ticket,
        )  # fmt: skip
        self.device_id = device_id
        self.message = message
        self.limits_lifted = limits_lifted
        self.admitted = False
        self.reply_to_user_id: str | None = None if message.reply_to_conversation_seq else ""
        """Who sent the message this one replies to; None until it was looked up."""


class Change(Submission):
    """Users join a group (GroupAdd) or leave it (LEAVE_GROUP, GroupRemove): one control message."""

    __slots__ = ("by_subject", "joining", "rewrite", "user_ids")

    def __init__(
        self,
        tenant_id: str,
        conversation_id: str,
        sender_id: str,
        client_message_id: str,
        request_digest: bytes,
        *,
        joining: bool,
        user_ids: tuple[str, ...],
        by_subject: bool,
        expires_at_ms: float,
        ticket: Any = None,
    ) -> None:
        super().__init__(
            tenant_id, conversation_id, sender_id, client_message_id, request_digest,
            expires_at_ms=expires_at_ms, ticket=ticket,
        )  # fmt: skip
        self.joining = joining
        self.user_ids = user_ids
        self.by_subject = by_subject
        """LEAVE_GROUP: not being a member is an error, not "nothing to do"."""
        self.rewrite: MembershipRewrite | None = None
        """Planned for `membership_version`."""


class Create(Submission):
    """CREATE_GROUP: `member_ids` are sorted, distinct and include the creator, who is `sender_id`."""

    __slots__ = ("member_ids",)

    def __init__(
        self,
        tenant_id: str,
        conversation_id: str,
        creator_id: str,
        member_ids: list[str],
        *,
        expires_at_ms: float,
        ticket: Any = None,
    ) -> None:
        super().__init__(tenant_id, conversation_id, creator_id, "", b"", expires_at_ms=expires_at_ms, ticket=ticket)
        self.member_ids = member_ids
