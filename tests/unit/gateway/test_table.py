"""Connections by id and by user."""

from __future__ import annotations

from typing import cast

import pytest

from qim.gateway.connection import ClientConnection
from qim.gateway.table import ConnectionIds, ConnectionTable


class Connection:
    def __init__(self, connection_id: int) -> None:
        self.id = connection_id


def connection(connection_id: int) -> ClientConnection:
    return cast(ClientConnection, Connection(connection_id))


def test_ids_differ_between_workers_and_starts() -> None:
    ids: set[int] = set()
    for index in (0, 1, 1023):
        for start_ms in (1_790_000_000_000, 1_790_000_000_001):
            source = ConnectionIds(gateway_index=index, now_unix_ms=start_ms)
            ids |= {source.take() for _ in range(1000)}
    assert len(ids) == 6000
    assert all(0 < number < 1 << 63 for number in ids)
    with pytest.raises(ValueError, match="gateway index"):
        ConnectionIds(gateway_index=1024, now_unix_ms=0)


def test_devices_of_a_user() -> None:
    table = ConnectionTable()
    phone, tablet, other = (connection(number) for number in (1, 2, 3))
    for each in (phone, tablet, other):
        table.add(each)
    table.bind(phone, b"ann")
    table.bind(tablet, b"ann")
    table.bind(other, b"bob")
    assert table.of_user(b"ann") == [phone, tablet]
    assert table.of_user(b"eve") == []
    table.unbind(phone, b"ann")
    assert table.of_user(b"ann") == [tablet]
    assert list(table.sessions()) == [tablet, other]
    table.unbind(tablet, b"ann")
    assert table.of_user(b"ann") == []
    assert len(table) == 3
    table.discard(phone)
    table.discard(phone)
    assert len(table) == 2


def test_callers_may_close_what_they_iterate() -> None:
    table = ConnectionTable()
    bound = [connection(number) for number in range(4)]
    for each in bound:
        table.bind(each, b"ann")
    seen = []
    for each in table.sessions():
        table.unbind(each, b"ann")
        seen.append(each)
    assert seen == bound
