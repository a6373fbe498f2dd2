"""MessageStore on Redis: one script call commits a batch of one conversation bucket (DESIGN-data §3)."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Final

from qim.core.ids import GROUP_PREFIX, conversation_bucket
from qim.errors import StoreError
from qim.stores.api import (
    FORGET_RECORDS_MAX,
    BucketCommit,
    BucketState,
    CommitOutcome,
    CommitRequest,
    CommitStatus,
    ConversationHead,
    MembershipRewrite,
    ShardSnapshot,
    SnapshotRef,
    StoredName,
)
from qim.stores.redis import keys
from qim.stores.redis.resp import Argument, RespClient, RespError
from qim.stores.redis.scripts import Script

CLIENT_DEDUP_TTL_S: Final = 7_200
"""`client_dedup_ttl_seconds` (§8.2)."""

_ZERO_ID: Final = bytes(16)
_OPEN: Final = Script("message_open")
_COMMIT: Final = Script("message_commit")
_FORGET: Final = Script("history_forget")
_SCAN_KEYS: Final = 500
"""Keys a step of a walk looks at: about 0.2 ms of the server."""
_POSITION: Final = struct.Struct(">H")
"""Packed position of a walk: instance, then the server's cursor."""
_DEDUP_SEQ: Final = struct.Struct(">Q")
_SNAPSHOT_HEAD: Final = struct.Struct(">IQ")
_INDEX_ROW: Final = struct.Struct(">IQIQ")
_HEAD: Final = struct.Struct(">QIB")
"""Packed head: created_at (ms), fencing_epoch, bytes of the sender; then sender and preview."""
_HEAD_FIELDS: Final = ("seq", "id", "head", "dek", "wdek", "earliest")
_SIMPLE_REFUSALS: Final = {
    b"O": CommitOutcome(status=CommitStatus.OUT_OF_ORDER),
    b"U": CommitOutcome(status=CommitStatus.UNJUDGED),
}


class MessageInstances:
    """Which connection serves a conversation bucket: bucket -> instance_id -> client."""

    __slots__ = ("_clients", "bucket_count", "distinct")

    def __init__(self, clients: Mapping[str, RespClient], message_of_bucket: Sequence[str]) -> None:
        self._clients = [clients[instance_id] for instance_id in message_of_bucket]
        self.distinct = [clients[instance_id] for instance_id in dict.fromkeys(message_of_bucket)]
        """Each instance once."""
        self.bucket_count = len(message_of_bucket)

    def client(self, bucket: int) -> RespClient:
        return self._clients[bucket]

    def bucket(self, tenant_id: str, conversation_id: str) -> int:
        return conversation_bucket(tenant_id, conversation_id, self.bucket_count)


class RedisMessageStore:
    """stores.api.MessageStore."""

    def __init__(self, instances: MessageInstances, *, dedup_ttl_s: int = CLIENT_DEDUP_TTL_S) -> None:
        self._instances = instances
        self._dedup_ttl_s = dedup_ttl_s

    async def open_bucket(self, bucket: int, fencing_epoch: int, grant_id: str) -> BucketState:
        reply = await run_fenced(
            _OPEN,
            self._instances.client(bucket),
            (keys.fence(bucket), keys.hlc(bucket), keys.outbox_next(bucket)),
            (fencing_epoch, grant_id),
        )
        return BucketState(last_message_id=reply[0] or _ZERO_ID, next_outbox_offset=int(reply[1] or 0))

    async def commit(self, bucket: int, fencing_epoch: int, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        (result,) = await self.commit_each((BucketCommit(bucket, fencing_epoch, requests),))
        if isinstance(result, StoreError):
            raise result
        return result

    async def commit_each(self, calls: Sequence[BucketCommit]) -> list[list[CommitOutcome] | StoreError]:
        names: list[Argument] = []
        args: list[Argument] = [self._dedup_ttl_s]
        for bucket, fencing_epoch, requests in calls:
            names += _bucket_keys(bucket)
            args += (keys.bucket_tag(bucket), fencing_epoch, len(requests))
            for request in requests:
                _append_request(args, bucket, fencing_epoch, request)
        client = self._instances.client(calls[0].bucket)
        reply = await _COMMIT(client, names, args)
        return [
            found.refusal(f"{client.name}: bucket {call.bucket}")
            if isinstance(found, RespError)
            else _outcomes(found, call.requests)
            for call, found in zip(calls, reply, strict=True)
        ]

    def instance_of(self, bucket: int) -> str:
        return self._instances.client(bucket).name

    async def lookup_dedup(
        self, bucket: int, tenant_id: str, sender_id: str, client_message_id: str, request_digest: bytes
    ) -> CommitOutcome | None:
        name = keys.dedup(bucket, tenant_id, sender_id, client_message_id)
        value = await self._instances.client(bucket).call("GET", name)
        return None if value is None else _judge_dedup(value, request_digest)

    async def head(self, tenant_id: str, conversation_id: str) -> ConversationHead:
        bucket = self._instances.bucket(tenant_id, conversation_id)
        client = self._instances.client(bucket)
        row_reply = client.call("HMGET", keys.conversation(bucket, tenant_id, conversation_id), *_HEAD_FIELDS)
        member_count = 2
        if conversation_id.startswith(GROUP_PREFIX):
            group_id = conversation_id[len(GROUP_PREFIX) :]
            member_count = int(await client.call("HGET", keys.group(bucket, tenant_id, group_id), "count") or 0)
        row = await row_reply
        if row[0] is None:
            return ConversationHead(member_count=member_count)
        updated_at_ms, fencing_epoch, sender_bytes = _HEAD.unpack_from(row[2])
        preview_at = _HEAD.size + sender_bytes
        return ConversationHead(
            latest_conversation_seq=int(row[0]),
            earliest_available_conversation_seq=int(row[5] or 1),
            last_message_id=row[1],
            last_sender_id=row[2][_HEAD.size : preview_at].decode(),
            preview_ciphertext=row[2][preview_at:],
            member_count=member_count,
            fencing_epoch=fencing_epoch,
            head_version=int(row[0]),
            updated_at_ms=updated_at_ms,
            dek_id=row[3].decode(),
            wrapped_dek=row[4],
        )

    async def records(
        self, tenant_id: str, conversation_id: str, seq_bucket: int, seqs: Sequence[int]
    ) -> list[bytes | None]:
        if not seqs:
            return []
        bucket = self._instances.bucket(tenant_id, conversation_id)
        key = keys.records(bucket, tenant_id, conversation_id, seq_bucket)
        reply: list[bytes | None] = await self._instances.client(bucket).call("HMGET", key, *seqs)
        return reply

    async def scan_conversations(self, buckets: Collection[int], position: bytes) -> tuple[bytes, list[StoredName]]:
        number, cursor = (_POSITION.unpack_from(position)[0], position[_POSITION.size :]) if position else (0, b"0")
        instances = self._instances.distinct
        cursor, names = await instances[number].call(
            "SCAN", cursor, "MATCH", keys.CONVERSATIONS, "COUNT", _SCAN_KEYS, "TYPE", "hash"
        )
        found = [StoredName(*keys.split_conversation(name)) for name in names]
        if cursor == b"0":
            number += 1
        following = _POSITION.pack(number) + cursor if number < len(instances) else b""
        return following, [name for name in found if name.bucket in buckets]

    async def forget_history(
        self, bucket: int, fencing_epoch: int, tenant_id: str, conversation_id: str, earliest_seq: int
    ) -> int:
        reply = await run_fenced(
            _FORGET,
            self._instances.client(bucket),
            (keys.fence(bucket), keys.conversation(bucket, tenant_id, conversation_id)),
            (
                fencing_epoch,
                keys.records_prefix(bucket, tenant_id, conversation_id),
                earliest_seq,
                FORGET_RECORDS_MAX,
            ),
        )
        return int(reply)


async def run_fenced(script: Script, client: RespClient, names: Sequence[str], args: Sequence[Argument]) -> Any:
    """Run a script of an owner: Fenced for its FENCED error, StoreError for every other one (nothing written)."""
    try:
        return await script(client, names, args)
    except RespError as error:
        raise error.refusal(f"{client.name}: {names[0]}") from None


@cache
def _bucket_keys(bucket: int) -> tuple[str, ...]:
    """KEYS of a bucket in a commit call."""
    return keys.fence(bucket), keys.hlc(bucket), keys.outbox_next(bucket), keys.outbox(bucket)


def pack_snapshot(snapshot: ShardSnapshot) -> bytes:
    return _SNAPSHOT_HEAD.pack(snapshot.member_count, snapshot.lane_mask) + snapshot.bitmap


def unpack_snapshot(packed: bytes) -> ShardSnapshot:
    member_count, lane_mask = _SNAPSHOT_HEAD.unpack_from(packed)
    return ShardSnapshot(packed[_SNAPSHOT_HEAD.size :], member_count, lane_mask)


def pack_index(index: Mapping[int, SnapshotRef]) -> bytes:
    return b"".join(_INDEX_ROW.pack(mailbox_shard, *index[mailbox_shard]) for mailbox_shard in sorted(index))


def unpack_index(packed: bytes) -> dict[int, SnapshotRef]:
    return {row[0]: SnapshotRef(*row[1:]) for row in _INDEX_ROW.iter_unpack(packed)}


def _append_request(args: list[Argument], bucket: int, fencing_epoch: int, request: CommitRequest) -> None:
    if not request.dek_id:
        raise ValueError("a message is stored encrypted: dek_id is empty")
    tenant_id, conversation_id, sender_id = request.tenant_id, request.conversation_id, request.sender_id
    after = request.after_client_message_id
    sender = sender_id.encode()
    group = f"{tenant_id}:{conversation_id[2:]}" if conversation_id.startswith(GROUP_PREFIX) else ""
    rewrite = _rewrite_arguments(request) if request.membership is not None else ()
    args += (
        keys.dedup(bucket, tenant_id, sender_id, request.client_message_id),
        keys.dedup(bucket, tenant_id, sender_id, after) if after else "",
        f"{tenant_id}:{conversation_id}",
        group,
        request.membership_version,
        request.request_digest,
        request.message_id,
        request.record,
        request.outbox,
        request.dek_id,
        request.wrapped_dek,
        _HEAD.pack(request.created_at_ms, fencing_epoch, len(sender)) + sender + request.preview_ciphertext,
        len(rewrite),
        *rewrite,
    )


def _rewrite_arguments(request: CommitRequest) -> list[Argument]:
    rewrite = request.membership
    assert rewrite is not None
    _check_rewrite(request, rewrite)
    args: list[Argument] = [rewrite.new_version, rewrite.member_count, rewrite.next_slot, pack_index(rewrite.index)]
    args.append(len(rewrite.snapshots))
    for mailbox_shard, snapshot in rewrite.snapshots.items():
        args += (mailbox_shard, pack_snapshot(snapshot))
    args.append(len(rewrite.joining))
    for user_id, slot in rewrite.joining.items():
        args += (user_id, slot, rewrite.joining_shards[user_id])
    return [*args, len(rewrite.leaving), *rewrite.leaving]


def _check_rewrite(request: CommitRequest, rewrite: MembershipRewrite) -> None:
    if request.conversation_id != GROUP_PREFIX + rewrite.group_id:
        raise ValueError(f"rewrite of {rewrite.group_id} in {request.conversation_id}")
    if rewrite.new_version <= request.membership_version:
        raise ValueError(f"membership version {request.membership_version} -> {rewrite.new_version}")


def _outcomes(reply: list[Any], requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
    offset = reply[0]
    outcomes = []
    for request, verdict in zip(requests, reply[1:], strict=True):
        if verdict.__class__ is int:
            outcomes.append(
                CommitOutcome(
                    status=CommitStatus.COMMITTED,
                    message_id=request.message_id,
                    conversation_seq=verdict,
                    outbox_offset=offset,
                )
            )
            offset += 1
        else:
            outcomes.append(_refused(verdict, request))
    return outcomes


def _refused(verdict: bytes, request: CommitRequest) -> CommitOutcome:
    kind, value = verdict[:1], verdict[1:]
    if kind == b"D":
        if value[40:].decode() != f"{request.tenant_id}:{request.conversation_id}":
            return CommitOutcome(status=CommitStatus.REUSED)
        return _judge_dedup(value, request.request_digest)
    if kind == b"V":
        return CommitOutcome(status=CommitStatus.STALE_VERSION, membership_version=int(value))
    if kind == b"I":
        return CommitOutcome(status=CommitStatus.ID_NOT_GREATER, message_id=value)
    if kind == b"K":
        dek_id, _, wrapped_dek = value.partition(b"\x00")
        return CommitOutcome(status=CommitStatus.DEK_MISMATCH, dek_id=dek_id.decode(), wrapped_dek=wrapped_dek)
    if (outcome := _SIMPLE_REFUSALS.get(verdict)) is None:
        raise StoreError(f"message_commit answered {verdict!r}")
    return outcome


def _judge_dedup(value: bytes, request_digest: bytes) -> CommitOutcome:
    """The stored value of a ClientDedup key, against what is asked under the same key (DESIGN-data §3.2)."""
    if value[:16] != request_digest:
        return CommitOutcome(status=CommitStatus.REUSED)
    (conversation_seq,) = _DEDUP_SEQ.unpack_from(value, 32)
    return CommitOutcome(status=CommitStatus.DUPLICATE, message_id=value[16:32], conversation_seq=conversation_seq)
