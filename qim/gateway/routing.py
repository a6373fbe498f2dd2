"""Which role instance a request goes to: the map of owners is a local cache (§5.3.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from qim.core.ids import conversation_bucket, mailbox_shard_id
from qim.registry.api import LeaseKind, RouteMap


class Routes(Protocol):
    """The cached `RouteMap`, kept fresh by its owner."""

    def owner(self, kind: LeaseKind, shard_id: int) -> str | None: ...

    def refresh_soon(self) -> None:
        """An owner did not answer: look at the registry now instead of at the next poll."""
        ...

    def on_change(self, listener: Callable[[RouteMap], None]) -> None:
        """Called with every newer map."""
        ...


class Routing:
    """Addresses of conversations and users."""

    __slots__ = ("_bucket_count", "_mailboxes", "_routes", "_shard_count", "_writers")

    def __init__(self, routes: Routes, *, conversation_bucket_count: int, mailbox_shard_count: int) -> None:
        self._routes = routes
        self._bucket_count = conversation_bucket_count
        self._shard_count = mailbox_shard_count
        self._writers: list[str | None] = []
        self._mailboxes: list[str | None] = []
        self._learn()
        routes.on_change(lambda _: self._learn())

    def _learn(self) -> None:
        """Owners by number: a message looks up without hashing a kind."""
        owner = self._routes.owner
        self._writers = [owner(LeaseKind.CONVERSATION_BUCKET, bucket) for bucket in range(self._bucket_count)]
        self._mailboxes = [owner(LeaseKind.MAILBOX_SHARD, shard) for shard in range(self._shard_count)]

    def writer_of(self, tenant_id: str, conversation_id: str) -> str | None:
        """The writer that owns the bucket of a conversation; None while nobody does."""
        return self._writers[conversation_bucket(tenant_id, conversation_id, self._bucket_count)]

    def shard_of(self, tenant_id: str, user_id: str) -> int:
        """MailboxShard of a user."""
        return mailbox_shard_id(tenant_id, user_id, self._shard_count)

    def mailbox_of(self, shard: int) -> str | None:
        """The MailboxNode that owns a shard; None while nobody does."""
        return self._mailboxes[shard]

    def complete(self) -> bool:
        """Every bucket and every shard has an owner."""
        return None not in self._writers and None not in self._mailboxes

    def peer_failed(self) -> None:
        """A request was not answered: its owner may have changed."""
        self._routes.refresh_soon()
