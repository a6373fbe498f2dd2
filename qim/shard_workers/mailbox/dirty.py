"""MAILBOX_DIRTY for connections that may have missed a push, spread over time (DESIGN-data §7).

A mark is a promise to tell a connection after now. It is kept until the gateway's link took the frame or the connection
is gone, so it survives a full queue and a link that is down.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Final

from qim.backplane.api import Backplane
from qim.protocol.opcodes import InternalOpcode
from qim.protocol.qim_pb2 import DeviceTarget, MarkDirty
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex

SPREAD_PER_DEVICE_MS: Final = 2.0
"""500 pulls a second beside everything else; few people whose shard died do not wait for a crowd that is not there."""
RETRY_MS: Final = 500.0
TICK_MS: Final = 100.0


class DirtySpreader:
    """Pending marks of a role; `tick` sends what is due."""

    def __init__(self, backplane: Backplane, index: OnlineIndex, spread_ms: float) -> None:
        """`spread_ms`: the longest time over which many connections are told."""
        self._backplane = backplane
        self._index = index
        self._spread_ms = spread_ms
        self._due: dict[tuple[str, int], tuple[float, OnlineDevice]] = {}
        self._missed_gateways: dict[str, None] = {}
        self._links_down: set[str] = set()

    def __len__(self) -> int:
        return len(self._due)

    def mark(self, devices: Iterable[OnlineDevice], now_ms: float, *, spread_ms: float = 0.0) -> None:
        """Tell these connections within `spread_ms`; one that is waiting already stays where it is."""
        for device in devices:
            self._due.setdefault(device.identity(), (now_ms + random.random() * spread_ms, device))

    def mark_all(self, devices: Collection[OnlineDevice], now_ms: float) -> None:
        """Tell all connections of a shard or gateway: their pulls must not come at once."""
        spread_ms = min(self._spread_ms, (len(self._due) + len(devices)) * SPREAD_PER_DEVICE_MS)
        self.mark(devices, now_ms, spread_ms=spread_ms)

    def gateway_missed(self, gateway: str) -> None:
        """A frame for a gateway was dropped: mark all its connections, once the link works again if it is down."""
        if gateway not in self._links_down:
            self._missed_gateways[gateway] = None

    def link_changed(self, gateway: str, up: bool, now_ms: float) -> None:
        """While a link is down nothing more is noted: when it is up again every connection is marked."""
        if not up:
            self._links_down.add(gateway)
            return
        self._links_down.discard(gateway)
        self.mark_all(self._index.of_gateway(gateway), now_ms)

    def tick(self, now_ms: float, shard_epochs: dict[int, int]) -> None:
        """Send the marks that are due; what a link refuses is tried again."""
        for gateway in self._missed_gateways:
            self.mark_all(self._index.of_gateway(gateway), now_ms)
        self._missed_gateways.clear()
        due = [device for at_ms, device in self._due.values() if at_ms <= now_ms]
        frames: dict[tuple[str, int], list[OnlineDevice]] = {}
        for device in due:
            del self._due[device.identity()]
            # What is in the index now, by identity: a client that had to AUTH again has a greater session epoch on the
            # same connection, and the gateway takes no mark for the session it replaced.
            for present in self._index.devices_of(device.tenant_id, device.user_id):
                if present.identity() == device.identity():
                    frames.setdefault((present.gateway, present.shard), []).append(present)
        for (gateway, shard), devices in frames.items():
            frame = MarkDirty(
                devices=map(_target, devices), shard=shard, shard_epoch=shard_epochs.get(shard, 0)
            ).SerializeToString()
            if not self._backplane.notify(gateway, InternalOpcode.MARK_DIRTY, frame):
                self.mark(devices, now_ms + RETRY_MS)


def _target(device: OnlineDevice) -> DeviceTarget:
    return DeviceTarget(
        tenant_id=device.tenant_id,
        user_id=device.user_id,
        device_id=device.device_id,
        connection_id=device.connection_id,
        session_epoch=device.session_epoch,
    )
