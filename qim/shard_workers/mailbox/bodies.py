"""Bodies of entries: decrypted and encoded once per message, joined per (conversation, seq_bucket) (§18.3.1, §21.3.4).

A body on the wire is a fragment of Entry (fields 32 to 37) that follows the reference part. Inline bodies come out of
the entry or dispatch itself, all others from MessageStore: one range read per bucket, never one per message. A read
that fails is an error of the whole request; `body_included=false` has the contract's causes only (A.4.1).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from qim.errors import StoreError
from qim.obs import metrics
from qim.obs.logs import get_logger
from qim.protocol.qim_pb2 import (
    DELETED,
    EPHEMERAL_24H,
    RETENTION_CLASS_UNSPECIFIED,
    Entry,
    InlineBody,
    MediaMetadata,
    MessageRecord,
    OutboxRecord,
)
from qim.runtime.clock import Clock
from qim.shard_workers.mailbox.expand import encode_body_at_rest, split_entry
from qim.stores.api import ConversationHead, MessageStore

log = get_logger(__name__)

SEQ_BUCKET_WIDTH: Final = 4096
"""`message_seq_bucket_width` (§7.1), immutable."""
CACHE_BYTES: Final = 64 << 20
_ENTRY_OVERHEAD_BYTES: Final = 250
"""Key, tuple and dictionary slot of a cached body, measured."""
DEK_CACHE_TTL_MS: Final = 300_000
DEK_CACHE_ENTRIES: Final = 1 << 16
DAY_MS: Final = 86_400_000
DEFAULT_HISTORY_RETENTION_DAYS: Final = 30


class BodyCipher(Protocol):
    """The tenant keys and AES-256-GCM (qim/stores/crypto.py)."""

    def unwrap(self, dek_id: str, wrapped: bytes) -> bytes: ...

    def decrypt(self, dek: bytes, ciphertext: bytes, tenant_id: str, conversation_id: str, message_id: bytes) -> bytes:
        """StoreError when the ciphertext does not belong to these coordinates."""
        ...


class Body(NamedTuple):
    """Wire fragment of a message's body, and how many bytes of the stored entry it replaces (its body at rest)."""

    fragment: bytes
    at_rest_bytes: int


NOT_INCLUDED: Final = Body(b"", 0)
"""`body_included=false` on the wire: proto3 leaves a false out."""


class RecordKey(NamedTuple):
    """A message to be joined."""

    conversation_id: str
    conversation_seq: int
    message_id: bytes


def body_fragment(
    message_type: int, custom_type: str, schema_version: int, payload: bytes, media: MediaMetadata | None
) -> bytes:
    """Fields 32 to 37 of Entry."""
    return Entry(
        body_included=True,
        message_type=message_type,  # type: ignore[arg-type]  # the stub wants the enum, the field takes any int
        custom_type=custom_type,
        schema_version=schema_version,
        payload_or_ciphertext=payload,
        media_metadata=media,
    ).SerializeToString()


class BodyReader:
    """Bodies of one process, cached by message_id within a byte bound; wrapped DEKs cached `dek_cache_ttl` (5 min)."""

    def __init__(
        self,
        store: MessageStore,
        cipher: BodyCipher,
        clock: Clock,
        *,
        cache_bytes: int = CACHE_BYTES,
        retention_days: int = DEFAULT_HISTORY_RETENTION_DAYS,
    ) -> None:
        self._store = store
        self._cipher = cipher
        self._clock = clock
        self._retention_ms = retention_days * DAY_MS
        self._cache_bytes = cache_bytes
        self._room_bytes = cache_bytes
        self._bodies: OrderedDict[bytes, Body] = OrderedDict()
        self._wrapped: OrderedDict[tuple[str, str], tuple[bytes, float]] = OrderedDict()
        self._loading: dict[bytes, asyncio.Future[dict[bytes, Body]]] = {}
        """Bodies on their way, by message_id."""

    def clear(self) -> None:
        """Forget all bodies."""
        self._bodies.clear()
        self._room_bytes = self._cache_bytes

    # ----------------------------------------------------------------------------------------------------------- push

    def of_dispatch(self, record: OutboxRecord) -> Body | None:
        """Body of a message being pushed, None when its key or record must be loaded first (`load_for_push`)."""
        body = self._cached(record.message_id)
        if body is not None:
            return body
        if not record.conversation_seq:
            return self._announcement(record.message_type, record.custom_type, record.schema_version)
        if not record.inline_body:
            return None
        dek = self._dek(record.tenant_id, record.dek_id)
        return None if dek is None else self._open_inline_record(record, dek)

    async def load_for_push(self, records: Iterable[OutboxRecord]) -> dict[bytes, Body]:
        """Bodies by message_id of what `of_dispatch` was missing. StoreError when that fails.

        A body is loaded once however many shards ask for it at the same time: a group's message has all of them ask.
        """
        wanted = {record.message_id: record for record in records}
        waited = [self._loading[message_id] for message_id in wanted if message_id in self._loading]
        own = [record for message_id, record in wanted.items() if message_id not in self._loading]
        bodies = await self._load_alone(own) if own else {}
        for loading in waited:
            bodies.update(await asyncio.shield(loading))
        return bodies

    async def _load_alone(self, records: Sequence[OutboxRecord]) -> dict[bytes, Body]:
        """Load, and let others wait for the same."""
        loading: asyncio.Future[dict[bytes, Body]] = asyncio.get_running_loop().create_future()
        self._loading.update((record.message_id, loading) for record in records)
        try:
            bodies = await self._load(records)
            loading.set_result(bodies)
        except StoreError as error:
            loading.set_exception(error)
            loading.exception()  # nobody may be waiting
            raise
        finally:
            loading.cancel()
            for record in records:
                del self._loading[record.message_id]
        return bodies

    async def _load(self, records: Iterable[OutboxRecord]) -> dict[bytes, Body]:
        inline: dict[str, list[OutboxRecord]] = {}
        joins: dict[str, dict[bytes, RecordKey]] = {}
        for record in records:
            if record.inline_body:
                inline.setdefault(record.tenant_id, []).append(record)
            else:
                key = RecordKey(record.conversation_id, record.conversation_seq, record.message_id)
                joins.setdefault(record.tenant_id, {})[record.message_id] = key
        bodies: dict[bytes, Body] = {}
        for tenant_id, found in inline.items():
            await self._load_deks(tenant_id, {(record.conversation_id, record.dek_id) for record in found})
            for record in found:
                bodies[record.message_id] = self._open_inline_record(record, self._loaded_dek(tenant_id, record.dek_id))
        for tenant_id, keys in joins.items():
            bodies.update(await self._join(tenant_id, list(keys.values())))
        return bodies

    def _open_inline_record(self, record: OutboxRecord, dek: bytes) -> Body:
        fragment = self._open_inline(
            record.tenant_id, record.conversation_id, record.message_id, dek, record.inline_ciphertext,
            record.message_type, record.custom_type, record.schema_version,
        )  # fmt: skip
        return self._remember(record.message_id, Body(fragment, len(encode_body_at_rest(record))))

    # ----------------------------------------------------------------------------------------------------------- pull

    async def of_entries(self, tenant_id: str, entries: Sequence[bytes]) -> list[Body]:
        """Bodies of stored entries, in their order. StoreError when one cannot be read."""
        found: dict[bytes, Body] = {}
        inline: dict[bytes, Entry] = {}
        joins: dict[bytes, RecordKey] = {}
        order: list[bytes] = []
        for stored in entries:
            ref_bytes, message_id = split_entry(stored)
            order.append(message_id)
            if message_id in found or message_id in inline or message_id in joins:
                continue
            body = self._cached(message_id)
            metrics.BODY_CACHE_TOTAL.labels(result="miss" if body is None else "hit").inc()
            if body is not None:
                found[message_id] = body
                continue
            entry = Entry.FromString(stored[ref_bytes:])
            if entry.inline_ciphertext:
                inline[message_id] = entry
            elif not entry.conversation_seq:
                found[message_id] = self._announcement(entry.message_type, entry.custom_type, entry.schema_version)
            else:
                joins[message_id] = RecordKey(entry.conversation_id, entry.conversation_seq, message_id)
        if inline:
            found.update(await self._open_entries(tenant_id, inline))
        if joins:
            found.update(await self._join(tenant_id, list(joins.values())))
        return [found[message_id] for message_id in order]

    async def _open_entries(self, tenant_id: str, inline: dict[bytes, Entry]) -> dict[bytes, Body]:
        wanted = {(entry.conversation_id, entry.dek_id) for entry in inline.values()}
        await self._load_deks(tenant_id, wanted)
        opened = {}
        for message_id, entry in inline.items():
            fragment = self._open_inline(
                tenant_id, entry.conversation_id, message_id, self._loaded_dek(tenant_id, entry.dek_id),
                entry.inline_ciphertext, entry.message_type, entry.custom_type, entry.schema_version,
            )  # fmt: skip
            opened[message_id] = self._remember(message_id, Body(fragment, len(encode_body_at_rest(entry))))
        return opened

    # -------------------------------------------------------------------------------------------------------- records

    async def records(
        self, tenant_id: str, conversation_id: str, seqs: Collection[int]
    ) -> dict[int, MessageRecord | None]:
        """Records of a conversation, one range read per seq_bucket, in parallel."""
        buckets: dict[int, list[int]] = {}
        for seq in sorted(seqs):
            buckets.setdefault(seq // SEQ_BUCKET_WIDTH, []).append(seq)
        metrics.BODY_JOIN_COUNT.inc(len(buckets))
        pages = await asyncio.gather(
            *(self._store.records(tenant_id, conversation_id, bucket, found) for bucket, found in buckets.items())
        )
        records: dict[int, MessageRecord | None] = {}
        for found, page in zip(buckets.values(), pages, strict=True):
            for seq, packed in zip(found, page, strict=True):
                records[seq] = None if packed is None else MessageRecord.FromString(packed)
        return records

    async def open_records(
        self, tenant_id: str, conversation_id: str, records: Collection[MessageRecord]
    ) -> dict[bytes, tuple[bytes, MediaMetadata | None] | None]:
        """message_id -> (payload, media) of records of one conversation; None when the body may not be shown."""
        shown = [record for record in records if self._may_show(record)]
        await self._load_deks(tenant_id, {(conversation_id, record.dek_id) for record in shown})
        opened: dict[bytes, tuple[bytes, MediaMetadata | None] | None] = {}
        for record in records:
            opened[record.message_id] = None
        for record in shown:
            dek = self._loaded_dek(tenant_id, record.dek_id)
            where = (tenant_id, conversation_id, record.message_id)
            payload = self._cipher.decrypt(dek, record.payload_ciphertext, *where) if record.payload_ciphertext else b""
            media = None
            if record.media_ciphertext:
                media = MediaMetadata.FromString(self._cipher.decrypt(dek, record.media_ciphertext, *where))
            opened[record.message_id] = payload, media
        return opened

    def open_preview(self, tenant_id: str, conversation_id: str, head: ConversationHead) -> str:
        """Text of a head's preview; empty past its retention. StoreError when it does not belong to the head."""
        age_ms = self._clock.unix_ms() - head.updated_at_ms
        if not head.preview_ciphertext or age_ms >= self._retention_ms:
            return ""
        dek = self._cipher.unwrap(head.dek_id, head.wrapped_dek)
        return self._cipher.decrypt(
            dek, head.preview_ciphertext, tenant_id, conversation_id, head.last_message_id
        ).decode(errors="replace")

    async def _join(self, tenant_id: str, keys: Sequence[RecordKey]) -> dict[bytes, Body]:
        """Bodies by message_id; conversations in parallel."""
        by_conversation: dict[str, list[RecordKey]] = {}
        for key in keys:
            by_conversation.setdefault(key.conversation_id, []).append(key)
        found: dict[bytes, Body] = {}
        parts = await asyncio.gather(
            *(self._join_conversation(tenant_id, name, wanted) for name, wanted in by_conversation.items())
        )
        for part in parts:
            found.update(part)
        return found

    async def _join_conversation(
        self, tenant_id: str, conversation_id: str, keys: Sequence[RecordKey]
    ) -> dict[bytes, Body]:
        records = await self.records(tenant_id, conversation_id, {key.conversation_seq for key in keys})
        kept = [record for record in records.values() if record is not None]
        opened = await self.open_records(tenant_id, conversation_id, kept)
        bodies: dict[bytes, Body] = {}
        for key in keys:
            record = records[key.conversation_seq]
            body = opened.get(key.message_id)
            if record is None or body is None or record.message_id != key.message_id:
                if record is None or record.message_id != key.message_id:
                    log.error("record_missing", tenant_id=tenant_id, conversation_id=conversation_id,
                              conversation_seq=key.conversation_seq, message_id=key.message_id)  # fmt: skip
                bodies[key.message_id] = NOT_INCLUDED
                continue
            fragment = body_fragment(record.message_type, record.custom_type, record.schema_version, *body)
            bodies[key.message_id] = self._remember(key.message_id, Body(fragment, 0))
        return bodies

    def _may_show(self, record: MessageRecord) -> bool:
        """Not removed by moderation and not past its retention (causes 1 and 2 of `body_included=false`)."""
        if record.state == DELETED:
            return False
        age_ms = self._clock.unix_ms() - record.created_at
        if record.retention_class == EPHEMERAL_24H:
            return age_ms < DAY_MS
        return record.retention_class != RETENTION_CLASS_UNSPECIFIED or age_ms < self._retention_ms

    # ----------------------------------------------------------------------------------------------------------- keys

    async def _load_deks(self, tenant_id: str, wanted: Iterable[tuple[str, str]]) -> None:
        """Fetch the wrapped DEKs of (conversation, dek_id) pairs that are not in memory."""
        missing = [pair for pair in wanted if self._dek(tenant_id, pair[1]) is None]
        heads = await asyncio.gather(*(self._store.head(tenant_id, conversation_id) for conversation_id, _ in missing))
        for (conversation_id, dek_id), head in zip(missing, heads, strict=True):
            if head.dek_id != dek_id:
                raise StoreError(f"conversation {conversation_id} has key {head.dek_id}, a body needs {dek_id}")
            self._wrapped[tenant_id, dek_id] = head.wrapped_dek, self._clock.monotonic_ms() + DEK_CACHE_TTL_MS
            if len(self._wrapped) > DEK_CACHE_ENTRIES:
                self._wrapped.popitem(last=False)

    def _dek(self, tenant_id: str, dek_id: str) -> bytes | None:
        known = self._wrapped.get((tenant_id, dek_id))
        if known is None or known[1] < self._clock.monotonic_ms():
            return None
        return self._cipher.unwrap(dek_id, known[0])

    def _loaded_dek(self, tenant_id: str, dek_id: str) -> bytes:
        return self._cipher.unwrap(dek_id, self._wrapped[tenant_id, dek_id][0])

    # -------------------------------------------------------------------------------------------------------- encoding

    def _open_inline(
        self, tenant_id: str, conversation_id: str, message_id: bytes, dek: bytes, ciphertext: bytes,
        message_type: int, custom_type: str, schema_version: int,
    ) -> bytes:  # fmt: skip
        plain = InlineBody.FromString(self._cipher.decrypt(dek, ciphertext, tenant_id, conversation_id, message_id))
        media = plain.media_metadata if plain.HasField("media_metadata") else None
        return body_fragment(message_type, custom_type, schema_version, plain.payload, media)

    def _announcement(self, message_type: int, custom_type: str, schema_version: int) -> Body:
        """A group's announcement has no record: an empty body that is included (DESIGN-data §8)."""
        return Body(body_fragment(message_type, custom_type, schema_version, b"", None), 0)

    def _cached(self, message_id: bytes) -> Body | None:
        body = self._bodies.get(message_id)
        if body is not None:
            self._bodies.move_to_end(message_id)
        return body

    def _remember(self, message_id: bytes, body: Body) -> Body:
        if message_id in self._bodies:
            return body
        self._bodies[message_id] = body
        self._room_bytes -= len(body.fragment) + _ENTRY_OVERHEAD_BYTES
        while self._room_bytes < 0:
            _, oldest = self._bodies.popitem(last=False)
            self._room_bytes += len(oldest.fragment) + _ENTRY_OVERHEAD_BYTES
        return body
