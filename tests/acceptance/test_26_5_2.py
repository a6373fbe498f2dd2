"""26.5.2 A push for an old `session_epoch` is not written into the new session: all criteria.

The old connection is kept from being reclaimed by a client that does not read: KICKED waits behind what it was pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from qim.gateway.connection import ClientConnection
from qim.obs import metrics
from qim.protocol import qim_pb2 as pb
from qim.protocol.entry import FLAGS_ORDINARY, MENTION_NONE, encode_ref
from qim.protocol.internal import encode_push_batch, user_key
from qim.protocol.opcodes import InternalOpcode, Opcode
from qim.shard_workers.mailbox.online import OnlineDevice
from tests.acceptance.devices import Device, direct
from tests.acceptance.harness import TENANT, Node, reading, running_node, until

USER = "bob"
WRONG_PUSHES = 300
"""To each wrong pair of connection and epoch."""
BULK, BULK_BYTES = 100, 60_000
"""More than the sockets between the gateway and a client that does not read can take."""
GHOSTS = 50
PERIOD_MS = 60_000
"""`presence_reconcile_interval_ms`."""


def rows_of(node: Node, user: str) -> Sequence[OnlineDevice]:
    """What the MailboxNode believes to be online."""
    return node.mailbox._index.devices_of(TENANT, user)


def connection_of(node: Node, row: OnlineDevice) -> ClientConnection | None:
    """The gateway's side of it, until its socket is gone."""
    assert node.gateway._node is not None
    return node.gateway._node._table.by_id.get(row.connection_id)


def add_stale(node: Node, row: OnlineDevice) -> None:
    """As if the end of that connection had not been heard."""
    kept = rows_of(node, row.user_id)
    node.mailbox._index._set(TENANT, row.user_id, (*kept, row))


def push(node: Node, connection_id: int, epoch: int, mailbox_seq: int, payload: bytes) -> None:
    """PushBatch of one entry to one connection, as a MailboxNode sends it."""
    ref = encode_ref(mailbox_seq, mailbox_seq.to_bytes(8, "big"), 0, FLAGS_ORDINARY, MENTION_NONE)
    common = pb.Entry(event_type=pb.EVENT_MESSAGE, body_included=True, payload_or_ciphertext=payload)
    row = (user_key(TENANT, USER), connection_id, epoch, mailbox_seq, ref)
    batch = encode_push_batch(TENANT, common.SerializeToString(), [row])
    node.backplane.notify("gateway-0", InternalOpcode.PUSH_BATCH, batch)


async def stop_reading(node: Node, device: Device, row: OnlineDevice) -> None:
    """Leave the sockets between the gateway and the device full."""
    assert device._wire is not None and device._wire._transport is not None
    device._wire._transport.pause_reading()
    connection = connection_of(node, row)
    assert connection is not None
    for _ in range(BULK):
        push(node, row.connection_id, row.session_epoch, node.watermark(USER), b"x" * BULK_BYTES)
        await asyncio.sleep(0)
    await until(lambda: connection._paused)


async def check_discarded(node: Node, old: OnlineDevice, new: OnlineDevice) -> None:
    """Pushes to the old connection, and old-epoch pushes to the new one."""
    seq = node.watermark(USER) + 1
    wrong = [
        (old.connection_id, old.session_epoch),
        (old.connection_id, new.session_epoch),
        (new.connection_id, old.session_epoch),
    ]
    rejected, stale = reading(metrics.SESSION_EPOCH_REJECT_TOTAL), reading(metrics.PRESENCE_STALE_TOTAL)
    for connection_id, epoch in wrong * WRONG_PUSHES:
        push(node, connection_id, epoch, seq, b"for the old session")
    sent = len(wrong) * WRONG_PUSHES
    await until(lambda: reading(metrics.PRESENCE_STALE_TOTAL) - stale >= sent)
    assert reading(metrics.SESSION_EPOCH_REJECT_TOTAL) - rejected == sent  # criterion 1: 100 %
    assert reading(metrics.PRESENCE_STALE_TOTAL) - stale == sent  # criterion 1
    assert new in rows_of(node, USER), "a report about the old session ends nothing of the new one"


async def replace(node: Node) -> tuple[Device, OnlineDevice]:
    """The operation: (the new session's device, the old session's row)."""
    old = await node.online(USER)
    (old_row,) = rows_of(node, USER)
    await stop_reading(node, old, old_row)
    new = await node.online(USER)
    (new_row,) = rows_of(node, USER)
    assert new_row.session_epoch == new.welcome.session_epoch == old.welcome.session_epoch + 1
    assert connection_of(node, old_row) is not None, "not yet reclaimed"
    await check_discarded(node, old_row, new_row)
    assert connection_of(node, old_row) is not None

    assert old._wire is not None and old._wire._transport is not None
    old._wire._transport.resume_reading()
    await old.until(lambda: old.closed)  # criterion 3
    last = old.received[-1]
    assert last.opcode is Opcode.KICKED  # criterion 3
    assert (last.body.reason, last.body.replaced_by_device) == (pb.REPLACED, "phone")  # criterion 3
    assert all(entry.payload_or_ciphertext[:1] == b"x" for entry in old.pushed())
    await until(lambda: connection_of(node, old_row) is None)
    await check_discarded(node, old_row, new_row)
    return new, old_row


def ghosts(node: Node, prefix: str) -> list[OnlineDevice]:
    return [row for number in range(GHOSTS) for row in rows_of(node, f"{prefix}{number}")]


def haunt(node: Node, prefix: str) -> float:
    """Rows of connections that are gone, nobody pushes to them; when that was, monotonic ms."""
    for number in range(GHOSTS):
        add_stale(node, node.mailbox._requests.device_of(
            TENANT, f"{prefix}{number}", "phone", gateway="gateway-0", connection_id=number + 1, session_epoch=1
        ))  # fmt: skip
    return node.clock.monotonic_ms()


async def check_invalidated(node: Node, old: OnlineDevice) -> None:
    """A push meets the stale row: PRESENCE_STALE takes it out, without a reconciliation."""
    sender = await node.online("ann")
    live = list(rows_of(node, USER))
    add_stale(node, old)
    stale = reading(metrics.PRESENCE_STALE_TOTAL)
    await sender.say_all(direct("ann", USER), [b"through"])
    await until(lambda: old not in rows_of(node, USER))  # criterion 4
    assert reading(metrics.PRESENCE_STALE_TOTAL) - stale == 1
    assert list(rows_of(node, USER)) == live
    assert len(ghosts(node, "early")) == GHOSTS, "there was no reconciliation yet"


async def check_reconciled(node: Node, early_ms: float) -> None:
    """Stale rows that no push meets are gone at the end of the period, wherever in it they began."""
    live = list(rows_of(node, USER))
    await until(lambda: reading(metrics.PRESENCE_RECONCILE_DIFF) >= GHOSTS, PERIOD_MS / 1000)
    # one has just ended; ghosts that come a little later wait longest for the next one
    await asyncio.sleep(1)
    late_ms = haunt(node, "late")
    for prefix, since_ms in (("early", early_ms), ("late", late_ms)):
        await until(lambda prefix=prefix: ghosts(node, prefix) == [], PERIOD_MS / 1000)  # type: ignore[misc]
        assert node.clock.monotonic_ms() - since_ms <= PERIOD_MS  # criterion 4
    assert list(rows_of(node, USER)) == live, "what is online stays"


@pytest.mark.timeout(180)
async def test_pushes_for_an_old_session_go_nowhere() -> None:
    metrics.PRESENCE_RECONCILE_DIFF.set(0)
    async with running_node() as node:
        assert node.parameters.presence_reconcile_interval_ms == PERIOD_MS
        early_ms = haunt(node, "early")
        new, old_row = await replace(node)
        await check_invalidated(node, old_row)
        await new.until(lambda: len(new.pushed()) > 0)
        await check_reconciled(node, early_ms)
        assert [entry.payload_or_ciphertext for entry in new.pushed()] == [b"through"]  # criterion 2
