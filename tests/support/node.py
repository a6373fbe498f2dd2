"""Whole nodes for integration and acceptance tests: processes in a temporary directory, and devices that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol

from qim.app.connect import AdminClient, NodeAddress
from qim.app.own_node import OwnNode, OwnNodeOptions
from qim.app.settings import PoolSizes
from qim.client.aio import Client
from qim.client.link import ClientOptions
from qim.client.store import LocalStore

TENANT: Final = "test"
"""Its rate limits are lifted on every node of the tests."""
READY_TIMEOUT_MS: Final = 30_000
MERGED: Final = OwnNodeOptions(pools=PoolSizes(2, 1, 1, 1), unlimited_tenant=TENANT)
"""G | W+F+M: two gateway workers, one process for the rest."""
APART: Final = OwnNodeOptions(pools=PoolSizes(2, 2, 2, 2), apart=True, unlimited_tenant=TENANT)
"""Every role instance a process of its own, two of each."""


def options_with(base: OwnNodeOptions, **parameters: str) -> OwnNodeOptions:
    """`base` with parameters by their names, e.g. `ping_interval_initial="1000"`."""
    values: Mapping[str, str] = {f"QIM_{name.upper()}": value for name, value in parameters.items()}
    return OwnNodeOptions(
        pools=base.pools,
        apart=base.apart,
        unlimited_tenant=base.unlimited_tenant,
        redis_server=base.redis_server,
        commit_log=base.commit_log,
        parameters={**base.parameters, **values},
    )


@contextmanager
def running_node(options: OwnNodeOptions = MERGED, directory: Path | None = None) -> Iterator[OwnNode]:
    """A started node: `.address()` says where it is, `.kill(process)`, `.stop()`, `.kill_all()` and `.start()` act."""
    node = OwnNode(options, directory)
    try:
        node.start()
        yield node
    finally:
        node.close()


class Closing(Protocol):
    """A connection of any kind."""

    async def close(self) -> None: ...


class Devices:
    """SDK clients of one node, and whatever else is to be closed with them."""

    def __init__(self, address: NodeAddress, admin: AdminClient, tenant: str = TENANT) -> None:
        self.address = address
        self.admin = admin
        self._tenant = tenant
        self._open: list[Closing] = []

    async def add(
        self,
        user: str,
        device: str = "phone",
        *,
        store: Path | str = ":memory:",
        ready: bool = True,
        options: ClientOptions | None = None,
    ) -> Client:
        """A device that is connecting, or online if `ready`."""
        token = await self.admin.token(self._tenant, user, device, 3600)
        client = Client(
            self.address.client_host,
            self.address.port,
            tenant_id=self._tenant,
            user_id=user,
            device_id=device,
            token=token,
            store=LocalStore(store),
            ssl_context=self.address.client_tls(),
            options=options,
        )
        self._open.append(client)
        client.start()
        if ready:
            await client.wait_ready(READY_TIMEOUT_MS)
        return client

    def also_close(self, connection: Closing) -> None:
        """At the end, too."""
        self._open.append(connection)

    async def close(self) -> None:
        for connection in self._open:
            await connection.close()


@asynccontextmanager
async def devices_of(node: OwnNode, tenant: str = TENANT) -> AsyncIterator[Devices]:
    """Devices on a running node; all are closed at the end."""
    address = node.address()
    async with AdminClient(address) as admin:
        devices = Devices(address, admin, tenant)
        try:
            yield devices
        finally:
            await devices.close()
