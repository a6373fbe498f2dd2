from __future__ import annotations

from qim.protocol.internal import user_key
from qim.shard_workers.mailbox.online import OnlineDevice, OnlineIndex


def device(
    user: str = "u",
    name: str = "d",
    *,
    connection: int = 1,
    epoch: int = 1,
    shard: int = 0,
    lane: int = 0,
    gateway: str = "g0",
) -> OnlineDevice:
    return OnlineDevice(
        "t", user, name, gateway=gateway, connection_id=connection, session_epoch=epoch, shard=shard, lane=lane
    )


def connections(index: OnlineIndex, user: str = "u") -> list[int]:
    return [found.connection_id for found in index.devices_of("t", user)]


def test_devices_of_a_user_are_found_until_they_close() -> None:
    index = OnlineIndex()
    index.open(device(connection=1))
    index.open(device(name="e", connection=2))
    index.open(device(user="v", connection=3))
    assert connections(index) == [1, 2]
    assert index.users_of("t").keys() == {"u", "v"}
    assert index.devices_of("t", "u")[0].user_key == user_key("t", "u")
    assert index.close("t", "u", "g0", 1)
    assert not index.close("t", "u", "g1", 2), "connections are those of their gateway"
    assert connections(index) == [2]
    assert len(index) == 2
    assert (index.user_of(user_key("t", "u")), index.user_of(user_key("t", "w"))) == ("u", "")
    index.close("t", "u", "g0", 2)
    index.close("t", "v", "g0", 3)
    assert index.users_of("t") == {}
    assert index.users_of("other") == {}
    assert index.user_of(user_key("t", "u")) == ""
    assert len(index) == 0


def test_a_newer_session_replaces_an_older_one_of_the_device_and_never_the_reverse() -> None:
    index = OnlineIndex()
    index.open(device(connection=1, epoch=5))
    index.open(device(connection=2, epoch=6, gateway="g1"))
    assert connections(index) == [2]
    index.open(device(connection=1, epoch=5))
    assert sorted(connections(index)) == [1, 2], "an old one that is late does not push the new one out"


def test_the_same_connection_opens_again_without_doubling() -> None:
    index = OnlineIndex()
    assert [index.open(device(connection=1, epoch=epoch)) for epoch in (5, 5, 6)] == [True, False, False]
    assert [found.session_epoch for found in index.devices_of("t", "u")] == [6]


def test_devices_by_shard_lane_and_gateway() -> None:
    index = OnlineIndex()
    index.open(device("a", connection=1, shard=1, lane=3))
    index.open(device("b", connection=2, shard=1, lane=4, gateway="g1"))
    index.open(device("c", connection=3, shard=2, lane=3))
    assert {found.user_id for found in index.of_shard(1)} == {"a", "b"}
    assert {found.user_id for found in index.of_shard(1, [3])} == {"a"}
    assert {found.user_id for found in index.of_gateway("g0")} == {"a", "c"}


def test_reconciling_adds_at_once_and_removes_what_is_missing_twice() -> None:
    index = OnlineIndex()
    index.open(device("kept", connection=1))
    index.open(device("gone", connection=2))
    index.open(device("elsewhere", connection=3, shard=9))
    present = [device("kept", connection=1), device("new", connection=4), device("not ours", connection=5, shard=8)]
    differences, added = index.reconcile(present, frozenset({0}))
    assert (differences, [found.user_id for found in added]) == (2, ["new"])
    assert index.users_of("t").keys() == {"kept", "gone", "elsewhere", "new"}
    assert index.reconcile(present, frozenset({0})) == (1, [])
    assert index.users_of("t").keys() == {"kept", "elsewhere", "new"}
    assert index.reconcile(present, frozenset({0})) == (0, [])


def test_a_connection_that_is_found_again_starts_afresh() -> None:
    index = OnlineIndex()
    index.open(device(connection=1))
    for present in ([], [device(connection=1)], []):
        index.reconcile(present, frozenset({0}))
    assert connections(index) == [1]
