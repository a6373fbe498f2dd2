"""26.1.2 A user without references may safely advance to the lane watermark: all criteria, with the negative branch."""

from __future__ import annotations

from qim.client.actions import Cursor
from qim.client.store import LocalStore
from qim.obs import metrics
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.dispatching import DispatchLog
from tests.acceptance.harness import WITHOUT_FANOUT, Node, named_users, reading, running_node

SHARD = 5


async def check_hole_is_skipped(node: Node, user: str, token: bytes) -> None:
    after, up_to = node.seq(user, 10001), node.seq(user, 10500)
    device = await node.device(user)
    welcome = await device.log_in(after, token)
    assert (welcome.lane_watermark, welcome.trim_watermark) == (up_to, node.seq(user, 9000))
    examined = reading(metrics.STORAGE_KEYS_EXAMINED)
    batch = await device.pull_batch(after, up_to)
    assert len(batch.entries) == 0  # criterion 1
    assert batch.covered_through_seq == up_to  # criterion 2
    assert batch.has_more is False  # criterion 3
    assert reading(metrics.STORAGE_KEYS_EXAMINED) - examined == 0  # criterion 4
    assert device.bodies(Opcode.ERROR) == []  # criterion 6
    await device.close()


async def check_client_advances(node: Node, user: str, token: bytes) -> None:
    after, up_to = node.seq(user, 10001), node.seq(user, 10500)
    store = LocalStore()
    store.apply([], (), Cursor(token, after, node.lane_of(user)))
    client = node.client(user, store=store)
    await client.wait_ready(10_000)
    assert client.state.sync.cursor.last_applied_mailbox_seq == after
    await client.resync(10_000)
    assert client.state.sync.cursor.last_applied_mailbox_seq == up_to  # criterion 5
    assert store.cursor().last_applied_mailbox_seq == up_to
    assert client.bodies(Opcode.ERROR) == []  # criterion 6
    await client.close()


async def check_trimmed_hole_is_refused(node: Node, user: str, token: bytes) -> None:
    """The session is open when the trim passes its cursor; the same request again."""
    after, up_to = node.seq(user, 10001), node.seq(user, 10500)
    device = await node.device(user)
    await device.log_in(after, token)
    await node.truncate_before(user, node.seq(user, 10100))
    answer = await device.pull(after, up_to)
    assert answer.opcode is Opcode.ERROR  # criterion 7
    assert answer.body.code == pb.CURSOR_EXPIRED
    assert answer.body.trim_watermark == node.seq(user, 10100)
    assert answer.body.rebuild_required is True
    covered = [batch.covered_through_seq for batch in device.bodies(Opcode.MAILBOX_BATCH)]
    assert covered.count(up_to) == 0  # criterion 8


async def test_a_user_without_entries_advances_over_the_hole_unless_it_was_trimmed() -> None:
    async with running_node(roles=WITHOUT_FANOUT) as node:
        (user,) = named_users(1, shard=SHARD, prefix="b")
        others = named_users(64, shard=SHARD) + named_users(1, shard=SHARD, lane=node.lane_of(user), prefix="same")
        await DispatchLog(node, SHARD, others).write_to(10501)
        await node.watermark_reaches(user, node.seq(user, 10500))
        await node.truncate_before(user, node.seq(user, 9000))
        device = await node.device(user)
        token = (await device.log_in()).mailbox_cursor.token
        await device.close()

        await check_hole_is_skipped(node, user, token)
        await check_client_advances(node, user, token)
        await check_trimmed_hole_is_refused(node, user, token)
