"""Presence tables between processes."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qim.errors import StartupError
from qim.presence.layout import HEADER_PID, SLOT_SEQUENCE, PresenceEntry, slot_base
from qim.presence.shm import PresenceFull, PresenceTable, PresenceView, live_connections, table_path

NOW_MS = 1_700_000_000_000
HAMMER_S = 0.5


def entry(number: int, user_hash: int | None = None) -> PresenceEntry:
    """An entry all of whose words follow from `number`: a mix of two shows."""
    name = f"{number:06d}"
    return PresenceEntry(
        tenant_id="t" + name * 10,
        user_id="u" + name * 10,
        device_id="d" + name * 10,
        connection_id=number,
        session_epoch=number,
        user_hash=number if user_hash is None else user_hash,
        capabilities=number,
        opened_unix_ms=number,
    )


def test_reader_sees_what_the_writer_holds(tmp_path: Path) -> None:
    table = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    slots = {number: table.insert(entry(number)) for number in range(1, 20)}
    for number in range(1, 10):
        table.remove(slots[number])
    with PresenceView(table_path(tmp_path, "gateway-0")) as view:
        assert {found.connection_id for found in view.entries()} == set(range(10, 20))
        assert view.find(12) == [entry(12)]
        assert view.find(3) == []
    assert len(table) == 10
    table.close()


def test_devices_of_one_user_share_a_chain(tmp_path: Path) -> None:
    table = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    slots = [table.insert(entry(number, user_hash=7)) for number in (1, 2, 3)]
    other = table.insert(entry(4, user_hash=8))
    table.remove(slots[0])
    with PresenceView(table_path(tmp_path, "gateway-0")) as view:
        assert [found.connection_id for found in view.find(7)] == [2, 3]
        assert [found.connection_id for found in view.find(8)] == [4]
        table.remove(other)
        table.remove(slots[2])
        table.remove(slots[1])
        assert view.find(7) == []
        assert list(view.entries()) == []
    table.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60))
def test_any_order_of_inserts_and_removes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int]]
) -> None:
    run_dir = tmp_path_factory.mktemp("presence")
    table = PresenceTable(run_dir, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    held: dict[int, int] = {}
    with PresenceView(table_path(run_dir, "gateway-0")) as view:
        for insert, number in steps:
            if insert and number not in held:
                held[number] = table.insert(entry(number, user_hash=number % 3))
            elif not insert and number in held:
                table.remove(held.pop(number))
            for user_hash in range(3):
                expected = {n for n in held if n % 3 == user_hash}
                assert {found.connection_id for found in view.find(user_hash)} == expected
    table.close()


def test_full_table_refuses(tmp_path: Path) -> None:
    table = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    slots = [table.insert(entry(number)) for number in range(48)]
    with pytest.raises(PresenceFull):
        table.insert(entry(48))
    table.remove(slots[1])
    table.insert(entry(48))
    table.close()


def test_new_process_starts_with_a_new_file(tmp_path: Path) -> None:
    first = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    first.insert(entry(1))
    view = PresenceView(table_path(tmp_path, "gateway-0"))
    second = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    second.insert(entry(2))
    assert [found.connection_id for found in view.entries()] == [1]
    with PresenceView(table_path(tmp_path, "gateway-0")) as fresh:
        assert [found.connection_id for found in fresh.entries()] == [2]
    view.close()
    second.close()


def test_live_connections_skips_ended_leases(tmp_path: Path) -> None:
    table = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    table.insert(entry(1))
    stale = PresenceTable(tmp_path, "gateway-1", now_unix_ms=NOW_MS, capacity=64)
    stale.insert(entry(2))
    table.beat(NOW_MS + 25_000)

    def live(now_ms: int) -> list[tuple[str, int]]:
        found = live_connections(tmp_path, now_unix_ms=now_ms, lease_ttl_ms=30_000)
        return [(gateway, each.connection_id) for gateway, each in found]

    assert live(NOW_MS + 29_000) == [("gateway-0", 1), ("gateway-1", 2)]
    assert live(NOW_MS + 30_000) == [("gateway-0", 1)]
    table.close()
    stale.close()
    assert live(NOW_MS) == []


def test_slot_of_a_writer_that_died_inside_it_is_skipped(tmp_path: Path) -> None:
    table = PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    slot = table.insert(entry(1))
    table.insert(entry(2))
    table._words[slot_base(slot, 64) + SLOT_SEQUENCE] += 1
    with PresenceView(table_path(tmp_path, "gateway-0")) as view:
        assert [found.connection_id for found in view.entries()] == [2]
    table.close()


def test_foreign_files_and_capacities_are_refused(tmp_path: Path) -> None:
    path = table_path(tmp_path, "gateway-0")
    path.write_bytes(b"x")
    with pytest.raises(StartupError, match="not a presence table"):
        PresenceView(path)
    path.write_bytes(b"\x00" * 4096)
    with pytest.raises(StartupError, match="not a presence table"):
        PresenceView(path)
    with pytest.raises(StartupError, match="power of two"):
        PresenceTable(tmp_path, "gateway-0", now_unix_ms=NOW_MS, capacity=100)


def test_missing_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot make the presence table .*No such file"):
        PresenceTable(tmp_path / "nowhere", "gateway-0", now_unix_ms=NOW_MS, capacity=64)


def _hammer(run_dir: Path, seconds: float) -> None:
    table = PresenceTable(run_dir, "gateway-0", now_unix_ms=NOW_MS, capacity=64)
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        slots = [table.insert(entry(number + step, user_hash=5)) for step in range(4)]
        number += 4
        for slot in slots:
            table.remove(slot)


def test_no_read_is_torn_while_another_process_writes(tmp_path: Path) -> None:
    path = table_path(tmp_path, "gateway-0")
    writer = multiprocessing.get_context("spawn").Process(target=_hammer, args=(tmp_path, HAMMER_S))
    writer.start()
    while not path.exists():
        writer.join(timeout=0.01)
    reads = 0
    with PresenceView(path) as view:
        assert view._words[HEADER_PID] == writer.pid
        while writer.is_alive():
            for found in [*view.find(5), *view.entries()]:
                assert found == entry(found.connection_id, user_hash=5)
                reads += 1
    writer.join()
    assert writer.exitcode == 0
    assert reads > 100
