"""Who is meant by a dispatch, per lane: the record itself, or the stored snapshot of the group (§10.1 step 8).

Snapshots and slot maps are immutable per (group, snapshot version, shard), so what is loaded once is right for ever.
A read that fails is tried again: there is no empty expansion (DESIGN-data §1).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Final

from pyroaring import BitMap

from qim.core import ids
from qim.errors import StoreError
from qim.obs import metrics
from qim.shard_workers.mailbox.expand import (
    Dispatch,
    LaneMembers,
    Member,
    check_members,
    direct_by_lane,
    subjects_by_lane,
)
from qim.stores.api import GroupMembership

MEMBER_BYTES: Final = 200
"""Measured: tuple, slot, name and their share of the lists."""
CACHE_BYTES: Final = 64 << 20
"""About 330,000 members; the snapshots of a 100,000-member group need 20 MB."""

_HITS: Final = metrics.MEMBER_BITMAP_CACHE_TOTAL.labels(result="hit")
_MISSES: Final = metrics.MEMBER_BITMAP_CACHE_TOTAL.labels(result="miss")

_Key = tuple[str, str, int, int]


class MemberDirectory:
    """Members per (dispatch, lane), ascending by slot."""

    def __init__(
        self, membership: GroupMembership, *, lane_count: int, mailbox_shard_count: int, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._membership = membership
        self._lane_count = lane_count
        self._mailbox_shard_count = mailbox_shard_count
        self._cache: OrderedDict[_Key, LaneMembers] = OrderedDict()
        self._room_bytes = cache_bytes
        self._sizes: dict[_Key, int] = {}
        self._loading: dict[_Key, asyncio.Future[LaneMembers]] = {}

    def known(self, dispatch: Dispatch) -> LaneMembers | None:
        """Without I/O, or None when the snapshot must be loaded. StoreError when the members do not fit the mask.

        A dispatch is for everybody or for named users, never for both (fanout/dispatch.py).
        """
        if not dispatch.events[0].audience_all:
            return _checked(dispatch, subjects_by_lane(dispatch, self._lane_count))
        if dispatch.direct:
            where = (dispatch.tenant_id, dispatch.conversation_id, dispatch.frame.target_mailbox_shard)
            members = direct_by_lane(*where, self._lane_count, self._mailbox_shard_count)
            return _checked(dispatch, members)
        key = self._key(dispatch)
        snapshot = self._cache.get(key)
        if snapshot is None:
            _MISSES.inc()
            return None
        _HITS.inc()
        self._cache.move_to_end(key)
        return _checked(dispatch, snapshot)

    async def load(self, dispatch: Dispatch) -> LaneMembers:
        """Members of a dispatch whose snapshot is not in memory; one read per snapshot however many wait for it."""
        key = self._key(dispatch)
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.get_running_loop().create_future()
            try:
                snapshot = await self._read(key)
            except BaseException as error:
                del self._loading[key]
                if isinstance(error, StoreError):
                    loading.set_exception(error)
                    loading.exception()  # those who wait get it; nobody may
                else:
                    loading.cancel()
                raise
            del self._loading[key]
            loading.set_result(snapshot)
            self._remember(key, snapshot)
        else:
            snapshot = await _shared(loading)
        return _checked(dispatch, snapshot)

    def _key(self, dispatch: Dispatch) -> _Key:
        group_id = ids.group_id_of(dispatch.conversation_id)
        return dispatch.tenant_id, group_id, dispatch.frame.snapshot_version, dispatch.frame.target_mailbox_shard

    async def _read(self, key: _Key) -> LaneMembers:
        tenant_id, group_id, version, shard = key
        stored, users = await asyncio.gather(
            self._membership.shard_snapshot(tenant_id, group_id, shard, version),
            self._membership.slot_users(tenant_id, group_id, shard),
        )
        by_lane: dict[int, list[Member]] = {}
        for slot in BitMap.deserialize(stored.bitmap):
            user_id = users.get(slot)
            if user_id is None:
                raise StoreError(f"group {group_id} version {version}: slot {slot} of shard {shard} has no user")
            lane = ids.lane_id(tenant_id, user_id, self._lane_count)
            by_lane.setdefault(lane, []).append((slot, user_id))
        return LaneMembers(by_lane)

    def _remember(self, key: _Key, snapshot: LaneMembers) -> None:
        size_bytes = MEMBER_BYTES * sum(map(len, snapshot.values()))
        self._cache[key] = snapshot
        self._sizes[key] = size_bytes
        self._room_bytes -= size_bytes
        while self._room_bytes < 0 and len(self._cache) > 1:
            oldest, _ = self._cache.popitem(last=False)
            self._room_bytes += self._sizes.pop(oldest)


async def _shared(loading: Awaitable[LaneMembers]) -> LaneMembers:
    """Wait for somebody else's read without cancelling it."""
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        if isinstance(loading, asyncio.Future) and loading.cancelled():
            raise StoreError("the read of the members was given up") from None
        raise


def _checked(dispatch: Dispatch, members: LaneMembers) -> LaneMembers:
    try:
        check_members(dispatch, members)
    except ValueError as error:
        shard = dispatch.frame.target_mailbox_shard
        raise StoreError(f"dispatch at offset {dispatch.offset} of shard {shard}: {error}") from None
    return members
