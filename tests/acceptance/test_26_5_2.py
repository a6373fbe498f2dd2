"""26.5.2 A push for an old `session_epoch` is not written into the new session: all criteria.

The old connection is kept from being reclaimed by a client that does not read: KICKED waits behind what it was pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qim.config.parameters import default_parameters
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
RECONCILE_MS = 2000
"""Stands for the 60 s of `presence_reconcile_interval_ms`."""


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


async def check_convergence(node: Node, old: OnlineDevice) -> None:
    """Stale rows go when a push meets them, and by the full reconciliation when none does."""
    sender = await node.online("ann")
    live = list(rows_of(node, USER))
    add_stale(node, old)
    await sender.say_all(direct("ann", USER), [b"through"])
    await until(lambda: old not in rows_of(node, USER))  # criterion 4
    assert list(rows_of(node, USER)) == live

    def ghosts(prefix: str) -> list[OnlineDevice]:
        return [row for number in range(GHOSTS) for row in rows_of(node, f"{prefix}{number}")]

    def haunt(prefix: str) -> None:
        for number in range(GHOSTS):
            add_stale(node, node.mailbox._requests.device_of(
                TENANT, f"{prefix}{number}", "phone", gateway="gateway-0", connection_id=number + 1, session_epoch=1
            ))  # fmt: skip

    haunt("early")
    await until(lambda: ghosts("early") == [])
    # now a reconciliation has just ended; the next ghosts come a little later, when the next one is furthest
    await asyncio.sleep(RECONCILE_MS / 1000 / 8)
    haunt("late")
    since_ms = node.clock.monotonic_ms()
    await until(lambda: ghosts("late") == [])
    assert node.clock.monotonic_ms() - since_ms <= RECONCILE_MS  # criterion 4
    assert list(rows_of(node, USER)) == live, "what is online stays"


async def test_pushes_for_an_old_session_go_nowhere() -> None:
    assert default_parameters().presence_reconcile_interval_ms == 60_000
    async with running_node(presence_reconcile_interval_ms=RECONCILE_MS) as node:
        new, old_row = await replace(node)
        await check_convergence(node, old_row)
        await new.until(lambda: len(new.pushed()) > 0)
        assert [entry.payload_or_ciphertext for entry in new.pushed()] == [b"through"]  # criterion 2
