"""The online index of a MailboxNode: which connections a user has (DESIGN-data §7), pure.

Fed by OPEN_SESSION, CLOSE_SESSION and PRESENCE_STALE, rebuilt from the presence tables on shard open and compared with
them every `presence_reconcile_interval`. It may hold connections that are gone (the gateway says so); it never misses
one that is there: a gateway writes presence before it sends OPEN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from qim.protocol.internal import user_key


class OnlineDevice:
    """One connection of a device."""

    __slots__ = (
        "absent", "connection_id", "device_id", "gateway", "lane", "session_epoch", "shard", "tenant_id", "user_id",
        "user_key",
    )  # fmt: skip

    def __init__(
        self,
        tenant_id: str,
        user_id: str,
        device_id: str,
        *,
        gateway: str,
        connection_id: int,
        session_epoch: int,
        shard: int,
        lane: int,
    ) -> None:
        self.tenant_id = tenant_id
        self.user_id = user_id
        self.device_id = device_id
        self.gateway = gateway
        """Role instance that owns the connection."""
        self.connection_id = connection_id
        self.session_epoch = session_epoch
        self.shard = shard
        self.lane = lane
        self.user_key = user_key(tenant_id, user_id)
        self.absent = False
        """The last comparison with the presence tables did not find it."""

    def identity(self) -> tuple[str, int]:
        """What distinguishes connections of the whole cluster."""
        return self.gateway, self.connection_id


class OnlineIndex:
    """(tenant, user) -> devices."""

    __slots__ = ("_count", "_names", "_tenants")

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, tuple[OnlineDevice, ...]]] = {}
        self._names: dict[bytes, str] = {}
        """user_key -> user, of everybody in the index."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def open(self, device: OnlineDevice) -> bool:
        """A connection logged in; it replaces older sessions of the same device, never a newer one. False if it was
        here already: whoever was not has missed what was pushed meanwhile."""
        devices = self.devices_of(device.tenant_id, device.user_id)
        kept = [
            other
            for other in devices
            if other.identity() != device.identity()
            and (other.device_id != device.device_id or other.session_epoch > device.session_epoch)
        ]
        self._set(device.tenant_id, device.user_id, (*kept, device))
        return all(other.identity() != device.identity() for other in devices)

    def close(self, tenant_id: str, user_id: str, gateway: str, connection_id: int) -> bool:
        """The connection is gone; False if it was not here."""
        devices = self.devices_of(tenant_id, user_id)
        kept = tuple(other for other in devices if other.identity() != (gateway, connection_id))
        self._set(tenant_id, user_id, kept)
        return len(kept) != len(devices)

    def devices_of(self, tenant_id: str, user_id: str) -> Sequence[OnlineDevice]:
        users = self._tenants.get(tenant_id)
        return users.get(user_id, ()) if users is not None else ()

    def user_of(self, key: bytes) -> str:
        """Who has this `user_key`; "" for nobody who is online."""
        return self._names.get(key, "")

    def users_of(self, tenant_id: str) -> dict[str, tuple[OnlineDevice, ...]]:
        """user -> devices of one tenant, for many look-ups; do not change it."""
        return self._tenants.get(tenant_id) or {}

    def all(self) -> Iterator[OnlineDevice]:
        for users in self._tenants.values():
            for devices in users.values():
                yield from devices

    def of_shard(self, shard: int, lanes: Iterable[int] | None = None) -> list[OnlineDevice]:
        """Devices whose mailbox is in the shard, on the given lanes or on all."""
        wanted = None if lanes is None else frozenset(lanes)
        return [device for device in self.all() if device.shard == shard and (wanted is None or device.lane in wanted)]

    def of_gateway(self, gateway: str) -> list[OnlineDevice]:
        return [device for device in self.all() if device.gateway == gateway]

    def forget_shard(self, shard: int) -> None:
        """Another MailboxNode owns the shard."""
        for device in self.of_shard(shard):
            self.close(device.tenant_id, device.user_id, device.gateway, device.connection_id)

    def reconcile(self, present: Iterable[OnlineDevice], shards: frozenset[int]) -> tuple[int, list[OnlineDevice]]:
        """Compare the devices of some shards with what the presence tables hold; the number of differences found, and
        the devices that were missing.

        A missing one is added at once. One too many goes only when it is missing for the second time: a gateway that
        was late with its lease must not lose its pushes.
        """
        found = {device.identity(): device for device in present if device.shard in shards}
        differences = 0
        for device in [device for device in self.all() if device.shard in shards]:
            if found.pop(device.identity(), None) is not None:
                device.absent = False
                continue
            differences += 1
            if device.absent:
                self.close(device.tenant_id, device.user_id, device.gateway, device.connection_id)
            device.absent = True
        added = list(found.values())
        for device in added:
            self.open(device)
        return differences + len(added), added

    def _set(self, tenant_id: str, user_id: str, devices: tuple[OnlineDevice, ...]) -> None:
        users = self._tenants.setdefault(tenant_id, {})
        before = users.get(user_id, ())
        self._count += len(devices) - len(before)
        if devices:
            users[user_id] = devices
            if not before:
                self._names[devices[0].user_key] = user_id
        else:
            if before:
                del self._names[before[0].user_key]
                del users[user_id]
            if not users:
                del self._tenants[tenant_id]
