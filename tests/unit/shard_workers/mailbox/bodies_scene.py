"""A store of messages whose reads are counted, for tests of bodies, pulls and history."""

from __future__ import annotations

from collections.abc import Sequence

from qim.core import ids
from qim.core.hlc import HybridClock
from qim.core.secret import Secret
from qim.protocol.entry import FLAGS_ORDINARY, encode_ref
from qim.protocol.qim_pb2 import (
    EVENT_MESSAGE,
    MESSAGE_TYPE_TEXT,
    DispatchEvent,
    Entry,
    InlineBody,
    MediaMetadata,
    MessageRecord,
    OutboxRecord,
)
from qim.shard_workers.mailbox.bodies import BodyReader
from qim.shard_workers.mailbox.expand import encode_body_at_rest, encode_reference
from qim.stores.api import CommitRequest, ConversationHead
from qim.stores.crypto import KeyRing, NewDek
from qim.stores.memory_message import MemoryMessageStore

TENANT = "t"
START_MS = 1_800_000_000_000


class FixedClock:
    """Both clocks; tests move them."""

    def __init__(self) -> None:
        self.now_ms = float(START_MS)

    def unix_ms(self) -> int:
        return int(self.now_ms)

    def monotonic_ms(self) -> float:
        return self.now_ms


class Scene(MemoryMessageStore):
    """Messages of many conversations; `range_reads` and `head_reads` count what was asked."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.clock = FixedClock()
        self.keys = KeyRing(Secret(bytes(32)), clock=self.clock)
        self.reader = BodyReader(self, self.keys, self.clock, **options)
        self.range_reads: list[tuple[str, int, int]] = []
        self.head_reads = 0
        self.failing: Exception | None = None
        self.outboxes: dict[tuple[str, int], OutboxRecord] = {}
        self._deks: dict[str, NewDek] = {}
        self._ids = HybridClock(writer_id=0, regression_reject_ms=5000)

    async def head(self, tenant_id: str, conversation_id: str) -> ConversationHead:
        self.head_reads += 1
        return await super().head(tenant_id, conversation_id)

    async def records(
        self, tenant_id: str, conversation_id: str, seq_bucket: int, seqs: Sequence[int]
    ) -> list[bytes | None]:
        self.range_reads.append((conversation_id, seq_bucket, len(seqs)))
        if self.failing:
            raise self.failing
        return await super().records(tenant_id, conversation_id, seq_bucket, seqs)

    async def commit_one(
        self,
        conversation_id: str,
        text: str,
        *,
        sender: str = "alice",
        inline: bool = False,
        media: MediaMetadata | None = None,
        **record_fields: object,
    ) -> int:
        """Its conversation_seq."""
        await self.open_bucket(0, 1, "g")
        message_id = self._ids.allocate(self.clock.unix_ms())
        dek = self._deks.setdefault(conversation_id, self.keys.new_dek(TENANT))
        where = (TENANT, conversation_id, message_id)
        record = MessageRecord(
            message_id=message_id, sender_id=sender, client_message_id=text[:60], message_type=MESSAGE_TYPE_TEXT,
            payload_ciphertext=self.keys.encrypt(dek.dek, text.encode(), *where), created_at=self.clock.unix_ms(),
            dek_id=dek.dek_id, event_type=EVENT_MESSAGE, **record_fields,  # type: ignore[arg-type]
        )  # fmt: skip
        if media is not None:
            record.media_ciphertext = self.keys.encrypt(dek.dek, media.SerializeToString(), *where)
        body = InlineBody(payload=text.encode(), media_metadata=media).SerializeToString()
        request = CommitRequest(
            tenant_id=TENANT, conversation_id=conversation_id, sender_id=sender, client_message_id=message_id.hex(),
            request_digest=bytes(16), after_client_message_id="", membership_version=0, message_id=message_id,
            record=record.SerializeToString(), outbox=b"", dek_id=dek.dek_id, wrapped_dek=dek.wrapped,
            preview_ciphertext=self.keys.encrypt(dek.dek, f"preview {text}".encode(), *where),
            created_at_ms=self.clock.unix_ms(),
        )  # fmt: skip
        (outcome,) = await self.commit(0, 1, [request])
        self.outboxes[conversation_id, outcome.conversation_seq] = OutboxRecord(
            conversation_seq=outcome.conversation_seq, tenant_id=TENANT, conversation_id=conversation_id,
            message_id=message_id, sender_id=sender, created_at=self.clock.unix_ms(), inline_body=inline,
            inline_ciphertext=self.keys.encrypt(dek.dek, body, *where) if inline else b"", dek_id=dek.dek_id,
            message_type=MESSAGE_TYPE_TEXT,
        )  # fmt: skip
        return outcome.conversation_seq

    def entry(self, conversation_id: str, seq: int, *, user: str = "bob", mailbox_seq: int = 1 << 48) -> bytes:
        """The stored entry of a message."""
        record = self.outboxes[conversation_id, seq]
        event = DispatchEvent(event_type=EVENT_MESSAGE, audience_all=True)
        ref = encode_ref(mailbox_seq, ids.event_id(b"", user, 0), 0, FLAGS_ORDINARY, 0)
        at_rest = encode_body_at_rest(record) if record.inline_body else b""
        return ref + encode_reference(event, record) + at_rest

    async def wire(self, entries: Sequence[bytes]) -> list[Entry]:
        """The entries as a client parses them."""
        bodies = await self.reader.of_entries(TENANT, entries)
        return [
            Entry.FromString(entry[: len(entry) - body.at_rest_bytes] + body.fragment)
            for entry, body in zip(entries, bodies, strict=True)
        ]
