"""MailboxStore: one suite for the model and for the scripts on a real server; tests are named after the failure that
each rule of DESIGN-data §5 closes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from qim.core.coverage import cut_page
from qim.core.seq import LaneVector, mailbox_seq
from qim.errors import Fenced, StaleInstance, StoreError
from qim.stores.api import AppendStatus, ConversationSeen, MailboxStore, ProgressRow
from qim.stores.memory_mailbox import MemoryMailboxStore
from qim.stores.redis.mailbox import RedisMailboxStore
from qim.stores.redis.resp import RespClient
from tests.contract.mailbox_calls import (
    DAY_MS,
    DM,
    EPOCH,
    EVERYTHING,
    GRANT,
    LANE,
    LANES,
    REF,
    SHARD,
    TENANT,
    append,
    chunk,
    identities,
    moved,
    offsets,
    seqs,
    span,
    unix_ms,
    zero,
)

SHARDS = 16


class MailboxStoreContract:
    """Subclasses give `store`, with the shard opened under EPOCH."""

    store: MailboxStore

    # ------------------------------------------------------------------------------------------ opening and fencing

    async def test_a_new_shard_starts_empty(self) -> None:
        state = await self.store.load_shard(SHARD, EPOCH)
        assert (state.watermarks, state.fold, state.fold_offset, state.stored_epoch) == (zero(), b"", -1, EPOCH)

    async def test_the_same_grant_opens_again_and_another_one_does_not(self) -> None:
        await self.store.append(append(chunk(0, ["ann"]), new=moved(zero(), 0)))
        state = await self.store.open_shard(SHARD, EPOCH, GRANT, LANES)
        assert state.watermarks == moved(zero(), 0)
        with pytest.raises(Fenced):
            await self.store.open_shard(SHARD, EPOCH, "grant-b", LANES)
        with pytest.raises(Fenced):
            await self.store.open_shard(SHARD, EPOCH - 1, GRANT, LANES)

    async def test_a_replaced_owner_is_fenced_everywhere_and_writes_nothing(self) -> None:
        await self.store.open_shard(SHARD, EPOCH + 1, "grant-b", LANES)
        with pytest.raises(Fenced):
            await self.store.append(append(chunk(0, ["ann"]), new=moved(zero(), 0)))
        with pytest.raises(Fenced):
            await self.store.range_scan(span("ann"))
        with pytest.raises(Fenced):
            await self.store.user_status(span("ann"))
        with pytest.raises(Fenced):
            await self.store.truncate_before(SHARD, EPOCH, TENANT, "ann", 1)
        with pytest.raises(Fenced):
            await self.store.load_shard(SHARD, EPOCH)
        assert await self.store.progress(SHARD, 0, 10) == {}
        assert (await self.store.range_scan(span("ann", epoch=EPOCH + 1))).rows == []

    async def test_another_lane_count_is_refused(self) -> None:
        with pytest.raises(StoreError, match="lanes"):
            await self.store.open_shard(SHARD, EPOCH + 1, "grant-b", LANES // 2)

    async def test_a_shard_opened_by_nobody_is_stale(self) -> None:
        state = await self.store.load_shard(SHARD + 1, EPOCH)
        assert state.stored_epoch == 0
        assert state.watermarks == zero()

    # ------------------------------------------------------------------------------------------------------ append

    async def test_entries_bits_and_w_appear_together(self) -> None:
        w1 = moved(zero(), 4)
        result = await self.store.append(append(chunk(4, ["ann", "bob"]), new=w1, required=[(4, LANE, 1)]))
        assert (result.status, result.applied, result.nondeterministic) == (AppendStatus.OK, 1, 0)
        page = await self.store.range_scan(span("ann"))
        (row,) = page.rows
        assert (row.mailbox_seq, row.event_ordinal, row.entry) == (mailbox_seq(EPOCH, 4), 0, REF + b"common")
        assert row.event_id == (4).to_bytes(7, "big") + b"\0"
        assert await offsets(self.store, "bob") == [4]
        assert await self.store.progress(SHARD, 0, 4) == {(4, LANE): ProgressRow(chunk_size=100, chunk_count=1, done=1)}
        assert (await self.store.load_shard(SHARD, EPOCH)).watermarks == w1

    async def test_commons_of_their_own(self) -> None:
        await self.store.append(append(chunk(1, ["ann", "bob"], common=[b"for ann", b"for bob"])))
        for user in ("ann", "bob"):
            (row,) = (await self.store.range_scan(span(user))).rows
            assert row.entry == REF + b"for " + user.encode()

    async def test_a_replay_writes_nothing(self) -> None:
        call = append(chunk(1, ["ann"]))
        await self.store.append(call)
        again = await self.store.append(call)
        assert (again.status, again.applied) == (AppendStatus.OK, 0)
        assert await offsets(self.store, "ann") == [1]

    async def test_a_chunk_twice_in_one_call_counts_once(self) -> None:
        result = await self.store.append(append(chunk(1, ["ann"]), chunk(1, ["ann"])))
        assert result.applied == 1
        assert await offsets(self.store, "ann") == [1]

    async def test_an_older_call_that_timed_out_moved_w_and_the_next_one_jumped_over_its_chunk(self) -> None:
        """Two calls in flight: the first moved W though its answer was lost; the second was made without knowing."""
        w1 = moved(zero(), 1)
        await self.store.append(append(chunk(1, ["ann"]), new=w1, required=[(1, LANE, 1)]))
        # what the caller still believes: W is zero, so its next call names zero again
        blind = await self.store.append(append(chunk(2, ["ann"]), new=moved(zero(), 2), required=[(2, LANE, 1)]))
        assert blind.status is AppendStatus.W_MOVED
        assert await offsets(self.store, "ann") == [1]
        # and a call whose predecessor was never carried out finds the bit of that chunk missing
        w3 = moved(w1, 3)
        jump = await self.store.append(
            append(chunk(3, ["ann"]), previous=w1, new=w3, required=[(2, LANE, 1), (3, LANE, 1)])
        )
        assert jump.status is AppendStatus.W_MOVED
        assert await offsets(self.store, "ann") == [1]
        assert (await self.store.load_shard(SHARD, EPOCH)).watermarks == w1

    async def test_w_past_an_unfinished_chunk_is_refused(self) -> None:
        first = chunk(9, ["ann"], index=0, count=2, size=1)
        refused = await self.store.append(append(first, new=moved(zero(), 9), required=[(9, LANE, 2)]))
        assert refused.status is AppendStatus.W_MOVED
        assert await self.store.progress(SHARD, 9, 9) == {}
        await self.store.append(append(first))
        second = chunk(9, ["bob"], index=1, count=2, size=1)
        done = await self.store.append(append(second, new=moved(zero(), 9), required=[(9, LANE, 2)]))
        assert (done.status, done.applied) == (AppendStatus.OK, 1)
        assert (await self.store.progress(SHARD, 9, 9))[9, LANE].done == 0b11

    async def test_w_over_rows_of_earlier_calls_and_other_blocks(self) -> None:
        for offset in (1, 1023, 1024, 5000):
            await self.store.append(append(chunk(offset, ["ann"])))
        required = [(offset, LANE, 1) for offset in (1, 1023, 1024, 5000)]
        ok = await self.store.append(append(new=moved(zero(), 5000), required=required))
        assert ok.status is AppendStatus.OK
        rows = await self.store.progress(SHARD, 1, 5000)
        assert sorted(offset for offset, _ in rows) == [1, 1023, 1024, 5000]

    async def test_w_over_thousands_of_rows_at_once(self) -> None:
        """A lane that was held up for long."""
        for first in range(0, 2500, 500):
            await self.store.append(append(*(chunk(offset, ["ann"]) for offset in range(first, first + 500))))
        required = [(offset, LANE, 1) for offset in range(2500)]
        missing = await self.store.append(append(new=moved(zero(), 2500), required=[*required, (2500, LANE, 1)]))
        assert missing.status is AppendStatus.W_MOVED
        assert (await self.store.append(append(new=moved(zero(), 2499), required=required))).status is AppendStatus.OK

    async def test_the_largest_chunk_of_the_contract_fits(self) -> None:
        users = [f"u{i}" for i in range(2000)]
        result = await self.store.append(append(chunk(1, users, size=2000, ordinals=range(4))))
        assert result.applied == 1
        assert await offsets(self.store, "u1999") == [1] * 4

    async def test_a_required_row_with_another_chunk_count_is_not_complete(self) -> None:
        await self.store.append(append(chunk(1, ["ann"])))
        result = await self.store.append(append(new=moved(zero(), 1), required=[(1, LANE, 2)]))
        assert result.status is AppendStatus.W_MOVED

    async def test_w_moves_over_lanes_without_members_at_once(self) -> None:
        w1 = moved(zero(), 8, lanes=range(LANES))
        assert (await self.store.append(append(new=w1))).status is AppendStatus.OK
        assert (await self.store.load_shard(SHARD, EPOCH)).watermarks == w1

    async def test_another_chunk_size_after_a_restart_would_skip_users(self) -> None:
        users = [f"u{i:02}" for i in range(20)]
        first = chunk(1, users[:10], index=0, count=2, size=10)
        await self.store.append(append(first))
        for changed in (
            chunk(1, users, index=0, count=1, size=20),
            chunk(1, users[5:10], index=1, count=4, size=5),
            chunk(1, users[10:], index=1, count=3, size=10),
        ):
            result = await self.store.append(append(chunk(2, ["ann"]), changed))
            assert result.status is AppendStatus.CHUNK_SIZE
        assert await offsets(self.store, "ann") == []
        assert await offsets(self.store, users[10]) == []
        assert (await self.store.progress(SHARD, 1, 2)) == {
            (1, LANE): ProgressRow(chunk_size=10, chunk_count=2, done=0b01)
        }

    async def test_the_only_chunks_of_several_lanes_are_one_item(self) -> None:
        item = chunk(1, ["ann", "bob", "cid"], lanes=[(3, 1), (LANE, 2)])
        w1 = moved(zero(), 1, lanes=(3, LANE))
        result = await self.store.append(append(item, new=w1, required=[(1, 3, 1), (1, LANE, 1)]))
        assert (result.status, result.applied) == (AppendStatus.OK, 1)
        assert [await offsets(self.store, user) for user in ("ann", "bob", "cid")] == [[1]] * 3
        row = ProgressRow(chunk_size=100, chunk_count=1, done=1)
        assert await self.store.progress(SHARD, 0, 9) == {(1, 3): row, (1, LANE): row}
        assert (await self.store.append(append(item))).applied == 0

    async def test_an_item_of_which_some_lanes_are_done_writes_the_others(self) -> None:
        """A replay that joins lanes as an earlier owner did not: what is stored is not written again."""
        await self.store.append(append(chunk(1, ["ann"], lane=3), chunk(1, ["eve"], lane=50)))
        users, lanes = ["ann", "bob", "cid", "eve", "fay"], [(3, 1), (LANE, 2), (50, 1), (63, 1)]
        again = await self.store.append(append(chunk(1, users, lanes=lanes, common=b"other")))
        assert (again.status, again.applied, again.nondeterministic) == (AppendStatus.OK, 1, 0)
        for user in users:
            (row,) = (await self.store.range_scan(span(user))).rows
            assert row.entry == REF + (b"common" if user in ("ann", "eve") else b"other")
        required = [(1, lane, 1) for lane in (3, LANE, 50, 63)]
        new = moved(zero(), 1, lanes=(3, LANE, 50, 63))
        assert (await self.store.append(append(new=new, required=required))).status is AppendStatus.OK

    async def test_w_past_one_missing_lane_of_many_is_refused(self) -> None:
        await self.store.append(append(chunk(1, ["ann", "bob"], lanes=[(LANE, 1), (40, 1)])))
        for missing in (2, 39, 63):
            new = moved(zero(), 1, lanes=(LANE, 40, missing))
            required = [(1, LANE, 1), (1, 40, 1), (1, missing, 1)]
            assert (await self.store.append(append(new=new, required=required))).status is AppendStatus.W_MOVED

    async def test_a_dispatch_has_one_chunk_size_on_all_its_lanes(self) -> None:
        await self.store.append(append(chunk(1, ["ann"], lane=3, size=10)))
        for changed in (
            chunk(1, ["bob"], size=20),
            chunk(1, ["bob"], count=2, size=20),
            chunk(1, ["ann"], lane=3, index=1, count=2, size=10),
            chunk(1, ["ann", "bob"], lanes=[(3, 1), (LANE, 1)], size=20),
        ):
            assert (await self.store.append(append(changed))).status is AppendStatus.CHUNK_SIZE
        await self.store.append(append(chunk(1, ["bob"], count=2, size=10)))
        joined = chunk(1, ["bob", "cid"], lanes=[(LANE, 1), (9, 1)], size=10)
        assert (await self.store.append(append(joined))).status is AppendStatus.CHUNK_SIZE
        assert (await self.store.append(append(chunk(1, ["cid"], lane=9, size=10)))).status is AppendStatus.OK

    async def test_an_item_of_several_lanes_has_one_chunk(self) -> None:
        with pytest.raises(ValueError, match="on 2 lanes"):
            await self.store.append(append(chunk(1, ["ann", "bob"], lanes=[(3, 1), (4, 1)], count=2)))

    async def test_entries_of_one_user_from_many_items_come_in_order(self) -> None:
        items = [chunk(offset, ["ann", "bob"], lanes=[(LANE, 2)]) for offset in range(300)]
        await self.store.append(append(chunk(1000, ["ann", "bob"])))
        assert (await self.store.append(append(*reversed(items)))).applied == 300
        assert (await self.store.append(append(*(chunk(n, ["ann", "bob"]) for n in range(1001, 1300))))).applied == 299
        assert await offsets(self.store, "bob", max_items=1000) == [*range(300), *range(1000, 1300)]

    async def test_many_chunks_in_any_order(self) -> None:
        order = [3, 16, 0, 9, *(i for i in range(17) if i not in (3, 16, 0, 9))]
        for index in order:
            await self.store.append(append(chunk(1, [f"u{index}"], index=index, count=17, size=1)))
        row = (await self.store.progress(SHARD, 1, 1))[1, LANE]
        assert row == ProgressRow(chunk_size=1, chunk_count=17, done=(1 << 17) - 1)
        moved_on = await self.store.append(append(new=moved(zero(), 1), required=[(1, LANE, 17)]))
        assert moved_on.status is AppendStatus.OK
        for index in order:
            assert await offsets(self.store, f"u{index}") == [1]

    async def test_a_different_member_under_a_known_prefix_is_refused_and_counted(self) -> None:
        """Chunks that should have disjoint users meet in one: the first bytes stand, nothing is added beside them."""
        await self.store.append(append(chunk(5, ["ann", "bob"], common=b"first", index=1, count=3)))
        other = await self.store.append(append(chunk(5, ["ann", "cid"], common=b"other", index=0, count=3)))
        assert (other.status, other.applied, other.nondeterministic) == (AppendStatus.OK, 1, 1)
        (row,) = (await self.store.range_scan(span("ann"))).rows
        assert row.entry == REF + b"first"
        assert await offsets(self.store, "cid") == [5]
        lower = await self.store.append(append(chunk(4, ["ann"])))
        assert (lower.applied, lower.nondeterministic) == (1, 0)
        assert await offsets(self.store, "ann") == [4, 5]

    async def test_w_may_not_go_back_and_the_fold_not_overtake_it(self) -> None:
        w1 = moved(zero(), 5)
        with pytest.raises(ValueError, match="back"):
            await self.store.append(append(previous=w1, new=zero()))
        with pytest.raises(ValueError, match="least W"):
            await self.store.append(append(new=w1, fold=b"f", fold_offset=0))
        with pytest.raises(ValueError, match="moves W"):
            await self.store.append(append(fold=b"f", fold_offset=0))
        with pytest.raises(ValueError, match="chunk 1 of 1"):
            await self.store.append(append(chunk(1, ["ann"], index=1)))
        with pytest.raises(ValueError, match="too large"):
            await self.store.append(append(chunk(1, ["ann"] * 20_000)))

    async def test_the_fold_is_saved_with_w_and_drops_progress_wholly_below_it(self) -> None:
        offsets_done = [0, 1023, 1024, 2047, 2048, 4095]
        for offset in offsets_done:
            await self.store.append(append(chunk(offset, ["ann"])))
        new = moved(zero(), 4095, lanes=range(LANES))
        required = [(offset, LANE, 1) for offset in offsets_done]
        saved = await self.store.append(append(new=new, required=required, fold=b"rows", fold_offset=2050))
        assert saved.status is AppendStatus.OK
        state = await self.store.load_shard(SHARD, EPOCH)
        assert (state.fold, state.fold_offset, state.watermarks) == (b"rows", 2050, new)
        assert sorted(offset for offset, _ in await self.store.progress(SHARD, 0, 5000)) == [2048, 4095]
        refused = await self.store.append(append(previous=zero(), new=new, fold=b"late", fold_offset=3000))
        assert refused.status is AppendStatus.W_MOVED
        assert (await self.store.load_shard(SHARD, EPOCH)).fold == b"rows"

    async def test_conversations_are_registered_once(self) -> None:
        await self.store.append(append(chunk(1, ["ann", "bob"], created_at_ms=unix_ms() - 5)))
        first = unix_ms()
        await self.store.append(
            append(
                chunk(2, ["ann"], created_at_ms=first), chunk(3, ["ann"], conversation_id="g:x", created_at_ms=first)
            )
        )
        await self.store.append(append(chunk(4, ["ann"], conversation_id="g:x", created_at_ms=first + 9)))
        rows = {row.conversation_id: row for row in await self.store.conversations(TENANT, "ann")}
        assert set(rows) == {DM, "g:x"}
        assert rows[DM].first_seen_at_ms < first
        assert rows["g:x"] == ConversationSeen(conversation_id="g:x", kind="group", first_seen_at_ms=first)
        assert [row.conversation_id for row in await self.store.conversations(TENANT, "bob")] == [DM]
        assert await self.store.conversations(TENANT, "eve") == []

    # ------------------------------------------------------------------------------------------------------- range

    async def test_range_touches_exactly_the_rows_it_returns(self) -> None:
        for offset in (10008, 10217, 10491):
            await self.store.append(append(chunk(offset, ["ann", "bob"])))
        await self.store.append(append(chunk(10001, ["ann"]), chunk(10501, ["ann"])))
        after, up_to = mailbox_seq(EPOCH, 10001), mailbox_seq(EPOCH, 10500)
        page = await self.store.range_scan(span("ann", after, up_to))
        assert (page.storage_keys_examined, page.storage_rows_returned, page.tombstones_scanned) == (3, 3, 0)
        assert page.exhausted
        assert page.day_probes == 10
        assert [row.mailbox_seq & 0xFFFF for row in page.rows] == [10008, 10217, 10491]
        nobody = await self.store.range_scan(span("eve", after, up_to))
        assert (nobody.storage_keys_examined, nobody.exhausted, nobody.effective_trim) == (0, True, 0)

    async def test_range_is_open_below_closed_above_and_serves_a_zero_cursor(self) -> None:
        for offset in (0, 1, 2):
            await self.store.append(append(chunk(offset, ["ann"])))
        assert await offsets(self.store, "ann") == [0, 1, 2]
        at = [mailbox_seq(EPOCH, offset) for offset in range(3)]
        assert await seqs(self.store, "ann", after_seq=at[0], up_to_seq=at[1]) == [at[1]]
        assert await seqs(self.store, "ann", after_seq=at[1], up_to_seq=at[1]) == []
        assert await seqs(self.store, "ann", after_seq=at[2], up_to_seq=EVERYTHING) == []

    async def test_rows_of_several_days_come_back_in_sequence_order(self) -> None:
        now = unix_ms()
        for offset, days_ago in ((1, 3), (2, 0), (3, 1), (4, 7), (5, -1), (6, 3)):
            await self.store.append(append(chunk(offset, ["ann"], created_at_ms=now - days_ago * DAY_MS)))
        assert await offsets(self.store, "ann") == [1, 2, 3, 4, 5, 6]

    async def test_a_clock_days_ahead_does_not_hide_an_entry(self) -> None:
        ahead = chunk(1, ["ann"], created_at_ms=unix_ms() + 20 * DAY_MS)
        await self.store.append(append(ahead))
        assert await offsets(self.store, "ann") == [1]
        assert (await self.store.append(append(ahead))).applied == 0

    async def test_pages_never_cut_an_event_group(self) -> None:
        now = unix_ms()
        for offset in range(40):
            await self.store.append(
                append(chunk(offset, ["ann"], ordinals=range(4), created_at_ms=now - offset % 3 * DAY_MS))
            )
        everything = await self.store.range_scan(span("ann"))
        assert len(everything.rows) == 160
        collected, after, up_to = [], 0, mailbox_seq(EPOCH, 39)
        for max_items, max_bytes in [(10, 1 << 19), (500, 300)] * 80:
            page = await self.store.range_scan(span("ann", after, up_to, max_items=max_items, max_bytes=max_bytes))
            sizes = [len(row.entry) for row in page.rows]
            cut = cut_page(
                [row.mailbox_seq for row in page.rows],
                sizes,
                up_to_seq=up_to,
                max_items=max_items,
                max_bytes=max_bytes,
                exhausted=page.exhausted,
            )
            collected += identities(page)[: cut.count]
            assert cut.covered_through_seq > after
            after = cut.covered_through_seq
            if not cut.has_more:
                break
        assert collected == identities(everything)

    async def test_a_big_backlog_over_days_is_examined_page_by_page(self) -> None:
        now = unix_ms()
        for offset in range(300):
            await self.store.append(append(chunk(offset, ["ann"], created_at_ms=now - (2 - offset // 100) * DAY_MS)))
        page = await self.store.range_scan(span("ann", max_items=42))
        assert not page.exhausted
        assert page.storage_rows_returned == 50
        assert page.storage_keys_examined == 50

    async def test_order_and_completeness_at_the_greatest_epoch(self) -> None:
        """26.6.6: offsets 0, 1, 2^47-1, 2^48-1 at epoch 0x7FFF beside an earlier epoch."""
        last = 0x7FFF
        await self.store.open_shard(SHARD, last, "grant-z", LANES)
        edge = [0, 1, (1 << 47) - 1, (1 << 48) - 1]
        expected = []
        for epoch in (1, 0x7FFE, last):
            for offset in reversed(edge):
                item = chunk(offset, ["ann"], epoch=epoch, lane=epoch % LANES)
                await self.store.append(append(item, epoch=last))
                expected.append(mailbox_seq(epoch, offset))
        assert await seqs(self.store, "ann", epoch=last) == sorted(expected)
        border = await seqs(
            self.store,
            "ann",
            epoch=last,
            after_seq=mailbox_seq(0x7FFE, (1 << 47) - 1),
            up_to_seq=mailbox_seq(last, 0),
        )
        assert border == [mailbox_seq(0x7FFE, (1 << 48) - 1), mailbox_seq(last, 0)]

    # ------------------------------------------------------------------------------------------- expiry, trim, status

    async def test_an_entry_of_an_expired_day_only_raises_the_frontier(self) -> None:
        old = unix_ms() - 8 * DAY_MS
        await self.store.append(append(chunk(1, ["ann"], created_at_ms=old), chunk(2, ["ann"])))
        page = await self.store.range_scan(span("ann"))
        assert [row.mailbox_seq for row in page.rows] == [mailbox_seq(EPOCH, 2)]
        assert page.effective_trim == mailbox_seq(EPOCH, 1)
        # the frontier is the lane's, not the user's, and not another lane's
        assert (await self.store.range_scan(span("eve"))).effective_trim == mailbox_seq(EPOCH, 1)
        assert (await self.store.range_scan(span("ann", lane=LANE + 1))).effective_trim == 0

    async def test_the_frontier_is_the_greatest_of_all_expired_days(self) -> None:
        now = unix_ms()
        for offset, days_ago in ((5, 20), (9, 30), (7, 9), (3, 12), (8, 2), (4, 9)):
            await self.store.append(append(chunk(offset, ["ann"], created_at_ms=now - days_ago * DAY_MS)))
        assert (await self.store.range_scan(span("ann"))).effective_trim == mailbox_seq(EPOCH, 9)
        assert await offsets(self.store, "ann") == [8]

    async def test_truncated_entries_are_gone_and_the_trim_never_falls(self) -> None:
        now = unix_ms()
        for offset in range(6):
            await self.store.append(append(chunk(offset, ["ann", "bob"], created_at_ms=now - offset % 2 * DAY_MS)))
        at = mailbox_seq(EPOCH, 3)
        await self.store.truncate_before(SHARD, EPOCH, TENANT, "ann", at)
        await self.store.truncate_before(SHARD, EPOCH, TENANT, "ann", at - 2)
        assert await offsets(self.store, "ann") == [4, 5]
        assert (await self.store.range_scan(span("ann"))).effective_trim == at
        assert (await self.store.range_scan(span("bob"))).effective_trim == 0
        assert len(await offsets(self.store, "bob")) == 6
        assert (await self.store.user_status(span("ann"))).effective_trim == at

    async def test_above_the_cap_the_oldest_entries_go_and_the_trim_is_the_greatest_removed(self) -> None:
        now = unix_ms()
        for offset in range(200):  # two days, whose sequences interleave
            await self.store.append(append(chunk(offset, ["ann", "bob"], created_at_ms=now - offset % 2 * DAY_MS)))
        capped = {"above": 199, "leave": 150, "limit": 30}
        assert await self.store.enforce_cap(SHARD, EPOCH, TENANT, "ann", **capped | {"above": 200}) == (0, 200)
        assert (await self.store.range_scan(span("ann"))).effective_trim == 0
        assert await self.store.enforce_cap(SHARD, EPOCH, TENANT, "ann", **capped) == (30, 170)
        assert await self.store.enforce_cap(SHARD, EPOCH, TENANT, "ann", **capped | {"above": 150}) == (20, 150)
        assert await self.store.enforce_cap(SHARD, EPOCH, TENANT, "ann", **capped | {"above": 150}) == (0, 150)
        assert await offsets(self.store, "ann") == list(range(50, 200))
        assert (await self.store.range_scan(span("ann"))).effective_trim == mailbox_seq(EPOCH, 49)
        assert len(await offsets(self.store, "bob")) == 200
        assert (await self.store.range_scan(span("bob"))).effective_trim == 0
        with pytest.raises(Fenced):
            await self.store.enforce_cap(SHARD, EPOCH - 1, TENANT, "ann", **capped)

    async def test_the_cap_never_splits_an_event_group(self) -> None:
        for offset in range(4):
            await self.store.append(append(chunk(offset, ["ann"], ordinals=range(3))))
        assert await self.store.enforce_cap(SHARD, EPOCH, TENANT, "ann", above=11, leave=11, limit=100) == (3, 9)
        assert await offsets(self.store, "ann") == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert (await self.store.user_status(span("ann"))).effective_trim == mailbox_seq(EPOCH, 0)

    async def test_status_counts_what_lies_between_the_cursor_and_w(self) -> None:
        now = unix_ms()
        w: LaneVector = zero()
        for offset in range(4):
            new = moved(w, offset)
            created_at_ms = now - offset % 2 * DAY_MS
            await self.store.append(append(chunk(offset, ["ann"], created_at_ms=created_at_ms), previous=w, new=new))
            w = new
        await self.store.append(append(chunk(9, ["ann"])))
        status = await self.store.user_status(span("ann", mailbox_seq(EPOCH, 0)))
        assert status.lane_watermark == mailbox_seq(EPOCH, 3)
        assert status.pending_entry_count == 3
        assert status.pending_bytes == 3 * len(b"0123456701234567x" + REF + b"common")
        empty = await self.store.user_status(span("ann", mailbox_seq(EPOCH, 3)))
        assert (empty.pending_entry_count, empty.pending_bytes) == (0, 0)
        other = await self.store.user_status(span("eve", lane=LANE + 1))
        assert (other.lane_watermark, other.pending_entry_count) == (0, 0)


class TestMemory(MailboxStoreContract):
    @pytest.fixture(autouse=True)
    async def _open(self) -> None:
        self.store = MemoryMailboxStore(SHARDS, unix_ms)
        await self.store.open_shard(SHARD, EPOCH, GRANT, LANES)

    async def test_an_instance_that_lost_its_last_second_is_opened_and_loaded_again(self) -> None:
        assert isinstance(self.store, MemoryMailboxStore)
        saved = self.store.saved()
        await self.store.append(append(chunk(1, ["ann"]), new=moved(zero(), 1)))
        self.store.restart(saved)
        assert not self.store.is_loaded(SHARD)
        with pytest.raises(StaleInstance):
            await self.store.user_status(span("ann"))
        assert (await self.store.append(append(chunk(1, ["ann"])))).status is AppendStatus.W_MOVED
        assert (await self.store.load_shard(SHARD, EPOCH)).watermarks == zero()
        assert self.store.is_loaded(SHARD)
        assert await offsets(self.store, "ann") == []


class TestRedis(MailboxStoreContract):
    @pytest.fixture(autouse=True)
    async def _open(self, mailbox_redis: str) -> AsyncIterator[Any]:
        client = RespClient(mailbox_redis, name="mailbox")
        await client.connect()
        self.store = RedisMailboxStore([client] * SHARDS)
        await self.store.open_shard(SHARD, EPOCH, GRANT, LANES)
        yield
        await client.close()
