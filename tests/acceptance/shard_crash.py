"""Instruments of 26.3.3: one dispatch on one shard of a node of processes, watched while it expands and looked at in
the moment its MailboxNode is dead."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, cast

import redis

from qim.core.seq import LaneVector, log_offset_of
from qim.stores.redis import keys
from tests.support.supervised import is_alive
from tests.support.waiting import wait_for

SHARD: Final = 0
_BLOCK_OFFSETS: Final = 1024
_DAY_MS: Final = 86_400_000
_ROW: Final = struct.Struct(">III")
_OFFSET_ROW: Final = struct.Struct(">IQQ")
_LOOK: Final = """
-- KEYS: 1 progress block, then mailboxes. ARGV: first and last prefix of the entries, then the rows' fields
local counts = {}
for i = 2, #KEYS do
  counts[i - 1] = string.char(redis.call('ZLEXCOUNT', KEYS[i], '[' .. ARGV[1], '(' .. ARGV[2]))
end
return {table.concat(counts), redis.call('HMGET', KEYS[1], unpack(ARGV, 3))}
"""
_TIMEOUT_S: Final = 600.0
"""`shard_rto_target`."""


class Found(NamedTuple):
    """What the store holds of a dispatch, read in one step."""

    done: int
    """Chunks whose bit is set."""
    total: int
    entries: int
    differing: int
    """Chunks whose bit and whose entries tell different things: some, but not all of them, included."""
    most: int
    """Entries of the dispatch the user with the most of them has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    at_kill: Found
    after: Found
    rto_s: float
    """From the kill until W of every lane has passed the dispatch."""


class Expansion:
    """A dispatch at `offset`, to the members of a group, by lane and ascending by slot."""

    def __init__(
        self,
        server: redis.Redis,
        members: Mapping[int, Sequence[str]],
        *,
        tenant: str,
        offset: int,
        chunk_members: int,
    ) -> None:
        self.offset = offset
        self._server = server
        self._members = members
        self._tenant = tenant
        self._chunk_members = chunk_members
        self._block = f"{keys.progress_prefix(SHARD)}{offset // _BLOCK_OFFSETS}"
        self._fields = [offset.to_bytes(6, "big") + bytes((lane,)) for lane in members] + [offset.to_bytes(6, "big")]
        self._script = server.register_script(_LOOK)
        self.total = sum(-(-len(users) // chunk_members) for users in members.values())

    def kill_at(self, fraction: float, pid: int) -> float:
        """SIGKILL once this part of the chunks is done; when that was, monotonic seconds. The process is gone then."""
        deadline_s = time.monotonic() + 60
        while self._chunks_done() < fraction * self.total:
            assert time.monotonic() < deadline_s, "the dispatch was not expanded"
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        wait_for(lambda: not is_alive(pid), every_s=0.001)
        return killed_s

    def look(self, mailbox_seq: int, created_at_ms: int) -> Found:
        """Bits and entries of the dispatch, as they are in one moment."""
        users = list(chain.from_iterable(self._members.values()))
        day = created_at_ms // _DAY_MS
        names = [f"{keys.mailbox_prefix(self._tenant, user)}{day}" for user in users]
        prefixes = (mailbox_seq.to_bytes(8, "big"), (mailbox_seq + 1).to_bytes(8, "big"))
        counts, rows = self._script(keys=[self._block, *names], args=[*prefixes, *self._fields])
        done = differing = at = 0
        whole = _lanes_done(rows.pop())
        for (lane, lane_users), row in zip(self._members.items(), rows, strict=True):
            bits = whole >> lane & 1
            done += bits
            if row is not None:
                assert not bits, "one chunk, or several"
                size, count, stored = _ROW.unpack_from(row)
                assert (size, count) == (self._chunk_members, -(-len(lane_users) // size))
                bits = int.from_bytes(row[_ROW.size :], "little")
                assert stored == bits.bit_count() <= count
                done += stored
            for chunk, first in enumerate(range(0, len(lane_users), self._chunk_members)):
                written = counts[at + first : at + min(first + self._chunk_members, len(lane_users))]
                differing += written != (b"\1" if bits >> chunk & 1 else b"\0") * len(written)
            at += len(lane_users)
        return Found(done, self.total, sum(counts), differing, max(counts))

    def covered(self, since_s: float) -> float:
        """Seconds from `since_s` until W of every lane has passed the dispatch."""

        def passed() -> bool:
            packed = cast(bytes, self._server.hget(keys.shard(SHARD), keys.WATERMARKS_FIELD))
            return all(seq and log_offset_of(seq) >= self.offset for seq in LaneVector.unpack(packed).values)

        wait_for(passed, timeout_s=_TIMEOUT_S, every_s=0.002)
        return time.monotonic() - since_s

    def _chunks_done(self) -> int:
        rows = cast(list[bytes | None], self._server.hmget(self._block, self._fields))
        several: int = sum(_ROW.unpack_from(row)[2] for row in rows[:-1] if row is not None)
        return _lanes_done(rows[-1]).bit_count() + several


def _lanes_done(row: bytes | None) -> int:
    """Mask of the lanes whose only chunk is done."""
    if row is None:
        return 0
    done: int = _OFFSET_ROW.unpack(row)[1]
    return done
