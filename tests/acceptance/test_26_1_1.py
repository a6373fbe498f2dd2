"""26.1.1 A range query touches only this user's keys: all criteria; sequences of the case are log offsets."""

from __future__ import annotations

from qim.obs import metrics
from tests.acceptance.devices import direct, triple
from tests.acceptance.dispatching import DispatchLog, committed, dispatch_to, expected_triples
from tests.acceptance.harness import TENANT, WITHOUT_FANOUT, named_users, reading, running_node
from tests.support.redis_monitor import Command, monitored

SHARD = 3
BEFORE = (9500, 10001)
"""Entries of A outside the range: below the lower bound and on it."""
IN_RANGE = (10008, 10217, 10491)
TRIM = 9000
OBSERVED = (metrics.STORAGE_KEYS_EXAMINED, metrics.STORAGE_ROWS_RETURNED, metrics.TOMBSTONES_SCANNED)


def mailboxes_read(commands: list[Command]) -> set[str]:
    """`mailbox:<tenant>:<user>` of every mailbox key that any command named."""
    keys = {argument for command in commands for argument in command.arguments if argument.startswith("mailbox:")}
    return {key.rpartition(":")[0] for key in keys}


async def test_a_pull_reads_three_entries_for_three() -> None:
    async with running_node(roles=WITHOUT_FANOUT) as node:
        (user,) = named_users(1, shard=SHARD, prefix="a")
        sender = await node.online("peer")
        chat = direct("peer", user)
        await sender.say_all(chat, [b"to A"] * (len(BEFORE) + len(IN_RANGE)))
        values = [await dispatch_to(node, source, SHARD) for source in await committed(node, chat)]
        placed = dict(zip(BEFORE + IN_RANGE, values, strict=True))
        # Everybody else of the shard, A's own lane included, gets the other offsets.
        others = named_users(64, shard=SHARD) + named_users(1, shard=SHARD, lane=node.lane_of(user), prefix="same")
        log = DispatchLog(node, SHARD, others)
        await log.write_to(10501, placed)
        await node.watermark_reaches(user, node.seq(user, 10500))
        await node.truncate_before(user, node.seq(user, TRIM))

        device = await node.device(user)
        token = (await device.log_in()).mailbox_cursor.token
        device = await node.device(user)
        welcome = await device.log_in(node.seq(user, 10001), token)
        assert (welcome.lane_watermark, welcome.trim_watermark) == (node.seq(user, 10500), node.seq(user, TRIM))
        limits = node.parameters
        before = [reading(metric) for metric in OBSERVED]
        async with monitored(node.mailbox_address) as monitor:
            batch = await device.pull_batch(
                node.seq(user, 10001), node.seq(user, 10500),
                max_items=limits.pull_mailbox_max_items, max_bytes=limits.pull_mailbox_max_bytes,
            )  # fmt: skip
            commands = await monitor.settle()
        examined, returned, tombstones = (
            reading(metric) - value for metric, value in zip(OBSERVED, before, strict=True)
        )
        assert examined == 3  # criterion 1
        assert returned == 3  # criterion 2
        assert tombstones == 0  # criterion 3
        assert len(batch.entries) == 3  # criterion 4
        assert batch.covered_through_seq == node.seq(user, 10500)  # criterion 5
        assert batch.has_more is False  # criterion 6
        assert mailboxes_read(commands) == {f"mailbox:{TENANT}:{user}"}  # criterion 7
        reads = [command for command in commands if command.by_script and command.name == "ZRANGEBYLEX"]
        assert len(reads) == 10, "one probe of each day that may still hold entries"
        expected = expected_triples(node, user, {at: placed[at] for at in IN_RANGE})
        assert sorted(map(triple, batch.entries)) == sorted(expected)
        assert [entry.payload_or_ciphertext for entry in batch.entries] == [b"to A"] * 3
