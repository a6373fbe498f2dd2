"""CommitLog and CheckpointStore on Redis streams, for hosts without a broker (DESIGN-data §4).

Offset n of a partition is the stream entry (n+1)-0, so a stream is dense by construction and every read proves it. A
counter beside the stream holds the next offset: it outlives trimming, and a stream that came back shorter is noticed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from qim.commit_log.api import AppendRun, Fence, LogIdentity, LogRecord, Watermarks
from qim.errors import StoreError
from qim.stores.redis import keys
from qim.stores.redis.resp import Argument, RespClient, RespError
from qim.stores.redis.scripts import Script

_APPEND: Final = Script("log_append")
_CHECKPOINT_OPEN: Final = Script("checkpoint_open")
_CHECKPOINT_SAVE: Final = Script("checkpoint_save")
_RECORDS_PER_READ: Final = 128
"""Records of one XRANGE: its reply is built in one piece, and `max_bytes` is judged between two."""
_SAMPLED_NODES: Final = 8


class Partition(NamedTuple):
    """Where a partition is kept."""

    client: RespClient
    stream: str
    next_offset: str
    """Key of the counter."""


class EmbeddedCommitLog:
    """See `qim.commit_log.api.CommitLog`.

    `partition_of` tells where each partition is; `fence_of` the checkpoint key of a producer's source partition, which
    must be on the instance of the partitions it appends to.
    """

    ends_together: Final = True

    def __init__(
        self,
        topic: str,
        cluster_id: str,
        partition_count: int,
        partition_of: Callable[[int], Partition],
        *,
        fence_of: Callable[[int], str] = keys.fanout_checkpoint,
    ) -> None:
        self._topic = topic
        self._cluster_id = cluster_id
        self._partitions = [partition_of(partition) for partition in range(partition_count)]
        self._clients = list({id(found.client): found.client for found in self._partitions}.values())
        self._fence_of = fence_of

    async def append(self, records: Sequence[tuple[int, bytes]], fence: Fence | None = None) -> list[int]:
        (offsets,) = await self.append_each((AppendRun(fence, records),))
        if isinstance(offsets, StoreError):
            raise offsets
        return offsets

    async def append_each(self, runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        if len(self._clients) == 1:
            return await self._append_to(self._clients[0], runs)
        results: list[list[int] | StoreError] = [[-1] * len(run.records) for run in runs]
        for client in self._clients:
            places = [
                [i for i, (partition, _) in enumerate(run.records) if self._partitions[partition].client is client]
                for run in runs
            ]
            shares = [
                AppendRun(run.fence, [run.records[i] for i in own]) for run, own in zip(runs, places, strict=True)
            ]
            for number, appended in enumerate(await self._append_to(client, shares)):
                known = results[number]
                if isinstance(appended, StoreError) or isinstance(known, StoreError):
                    results[number] = known if isinstance(known, StoreError) else appended
                    continue
                for i, offset in zip(places[number], appended, strict=True):
                    known[i] = offset
        return results

    async def _append_to(self, client: RespClient, runs: Sequence[AppendRun]) -> list[list[int] | StoreError]:
        """Append records whose partitions are all on one instance."""
        index: dict[int, int] = {}
        names: list[Argument] = []
        arguments: list[Argument] = [keys.STREAM_FIELD, len(runs)]
        for fence, records in runs:
            names.append(self._fence_of(fence.source_partition) if fence else "")
            arguments += (fence.epoch if fence else "", len(records))
            for partition, value in records:
                if partition not in index:
                    index[partition] = len(index)
                arguments += (index[partition], value)
        for partition in index:
            names += self._partitions[partition][1:]
        if not index:
            return [[] for _ in runs]
        reply = await _APPEND(client, names, arguments)
        return [found.refusal(f"append to {self._topic}") if isinstance(found, RespError) else found for found in reply]

    async def read(
        self, partition: int, offset: int, *, max_records: int = 500, max_bytes: int = 4 << 20
    ) -> list[LogRecord]:
        client, stream, counter = self._partitions[partition]
        found: list[LogRecord] = []
        taken_bytes = 0
        while len(found) < max_records and taken_bytes < max_bytes:
            at = offset + len(found)
            want = min(_RECORDS_PER_READ, max_records - len(found))
            # The counter first: what is appended between the two is then read, never taken for a loss.
            high_reply, entries = await asyncio.gather(
                client.call("GET", counter), client.call("XRANGE", stream, f"{at + 1}-0", "+", "COUNT", want)
            )
            high = int(high_reply or 0)
            if at > high or (not entries and at != high):
                raise StoreError(self._out_of_range(partition, at, f"next offset is {high}"))
            for entry_id, (_, value) in entries:
                if entry_id != b"%d-0" % (at + 1):
                    raise StoreError(self._out_of_range(partition, at, f"found {entry_id.decode()}"))
                found.append(LogRecord(at, value))
                taken_bytes += len(value)
                at += 1
                if taken_bytes >= max_bytes:
                    break
            if len(entries) < want:
                break
        return found

    async def watermarks(self, partition: int) -> Watermarks:
        client, stream, counter = self._partitions[partition]
        high_reply, first = await asyncio.gather(
            client.call("GET", counter), client.call("XRANGE", stream, "-", "+", "COUNT", 1)
        )
        high = int(high_reply or 0)
        return Watermarks(int(first[0][0].partition(b"-")[0]) - 1 if first else high, high)

    async def identity(self) -> LogIdentity:
        """Stored at first use; StoreError when what is stored is another cluster's or has other partitions."""
        client, name = self._partitions[0].client, keys.log_identity(self._topic)
        mine = {"cluster_id": self._cluster_id, "partition_count": str(len(self._partitions))}
        for field, value in (*mine.items(), ("topic_id", secrets.token_hex(16))):
            await client.call("HSETNX", name, field, value)
        stored = [value.decode() for value in await client.call("HMGET", name, *mine, "topic_id")]
        if stored[:2] != list(mine.values()):
            raise StoreError(f"log {self._topic}: stored identity is {stored[:2]}, not {list(mine.values())}")
        return LogIdentity(cluster_id=stored[0], topic_id=stored[2], partition_count=int(stored[1]))

    async def trim(self, partition: int, safe_offset: int) -> int:
        """Drop records below `safe_offset`, which the caller took as the minimum of everything that may still be read
        (DESIGN-data §4); how many went. StoreError above the high watermark: such a floor is not of this log."""
        client, stream, counter = self._partitions[partition]
        high = int(await client.call("GET", counter) or 0)
        if safe_offset > high:
            raise StoreError(self._out_of_range(partition, safe_offset, f"next offset is {high}"))
        dropped: int = await client.call("XTRIM", stream, "MINID", "=", f"{safe_offset + 1}-0")
        return dropped

    async def stored_bytes(self, partition: int) -> int:
        """Memory the partition takes, within some 10 %: the server looks at a few nodes of the stream."""
        client, stream, _ = self._partitions[partition]
        return int(await client.call("MEMORY", "USAGE", stream, "SAMPLES", _SAMPLED_NODES) or 0)

    def _out_of_range(self, partition: int, offset: int, found: str) -> str:
        return f"log {self._topic}/{partition}: no record at offset {offset}, {found}"


class RedisCheckpointStore:
    """See `qim.commit_log.api.CheckpointStore`. A position is bound to the identity of the topic it counts in."""

    def __init__(self, client: RespClient, identity: LogIdentity) -> None:
        self._client = client
        self._identity = f"{identity.cluster_id} {identity.topic_id} {identity.partition_count}"

    async def open_partition(self, partition: int, fanout_epoch: int, grant_id: str) -> int:
        call = _CHECKPOINT_OPEN(
            self._client, (keys.fanout_checkpoint(partition),), (fanout_epoch, grant_id, self._identity)
        )
        return int(await _fenced(call, f"checkpoint {partition}"))

    async def save(self, partition: int, fanout_epoch: int, next_offset: int) -> None:
        call = _CHECKPOINT_SAVE(self._client, (keys.fanout_checkpoint(partition),), (fanout_epoch, next_offset))
        await _fenced(call, f"checkpoint {partition}")

    async def position(self, partition: int) -> int:
        return int(await self._client.call("HGET", keys.fanout_checkpoint(partition), "next") or 0)


async def _fenced(call: Any, what: str) -> Any:
    """The reply, or Fenced for the scripts' error of that name."""
    try:
        return await call
    except RespError as error:
        raise error.refusal(what) from None
