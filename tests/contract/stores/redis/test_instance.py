"""Probes, stamps and the watch over free room, on a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from qim.errors import StartupError
from qim.stores.redis import instance, keys
from qim.stores.redis.instance import InstanceRole, RoomWatch, Stamp, claim_instance, inspect_instance, join_roles
from qim.stores.redis.resp import RespClient

ALWAYS = {InstanceRole.MESSAGE, InstanceRole.CORE}
STAMP = Stamp(cluster_id="c1", roles=join_roles(ALWAYS), instance_id="main")


@pytest.fixture
def admin(message_redis: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(message_redis, decode_responses=True) as client:
        yield client


class ServerThatSays:
    """A connection that answers INFO server and CONFIG GET as told, everything else like a fit server."""

    def __init__(self, info: str = "redis_version:7.0.15\r\nredis_mode:standalone", **config: str) -> None:
        self._info = info
        self._config = {
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
            "appendfsync": "always",
            "no-appendfsync-on-rewrite": "no",
            **{name.replace("_", "-"): value for name, value in config.items()},
        }

    def execute_command(self, *args: object) -> Any:
        if args == ("INFO", "server"):
            return self._info
        if args[0] == "INFO":
            return "cluster_enabled:0\r\nrole:master"
        return {str(args[2]): self._config[str(args[2])]}


def test_a_fit_server_has_no_stamp_at_first(message_redis: str, mailbox_redis: str) -> None:
    assert inspect_instance(message_redis, ALWAYS) is None
    assert inspect_instance(message_redis, {InstanceRole.MAILBOX}) is None
    assert inspect_instance(mailbox_redis, {InstanceRole.MAILBOX}) is None


def test_messages_need_fsync_always(mailbox_redis: str) -> None:
    for roles in (ALWAYS, {InstanceRole.CORE}, {InstanceRole.MAILBOX, InstanceRole.MESSAGE}):
        with pytest.raises(StartupError, match="has appendfsync everysec: set it to always"):
            inspect_instance(mailbox_redis, roles)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ("redis_version:6.2.14\r\nredis_mode:standalone", "runs redis_version 6.2.14"),
        ("redis_version:7.0\r\nredis_mode:standalone", "three-part"),
        ("redis_version:7.0.0-rc1\r\nredis_mode:standalone", "three-part"),
        ("redis_version:7.0.1\r\nredis_version:7.0.2\r\nredis_mode:standalone", "three-part"),
        ("valkey_version:9.1.2", "three-part"),
        ("redis_version:7.2.4\r\nserver_mode:cluster", "mode cluster"),
        ("redis_version:7.2.4\r\nredis_mode:sentinel", "mode sentinel"),
    ],
)
def test_unfit_servers_are_refused(info: str, text: str) -> None:
    with pytest.raises(StartupError, match=text):
        instance._check_server(ServerThatSays(info), "redis://h:1")


@pytest.mark.parametrize(
    "info", ["redis_version:7.0.0\r\nredis_mode:standalone", "redis_version:10.0.0\r\nserver_mode:standalone"]
)
def test_fit_versions_pass(info: str) -> None:
    instance._check_server(ServerThatSays(info), "redis://h:1")


@pytest.mark.parametrize(
    "config",
    [
        {"appendonly": "no"},
        {"maxmemory_policy": "allkeys-lru"},
        {"appendfsync": "no"},
        {"no_appendfsync_on_rewrite": "yes"},
    ],
)
def test_every_setting_that_loses_messages_is_refused(config: dict[str, str]) -> None:
    (name, value) = next(iter(config.items()))
    with pytest.raises(StartupError, match=f"{name.replace('_', '-')} {value}"):
        instance._check_durability(ServerThatSays(**config), "redis://h:1", always=True)


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot use the Redis at unix://") as caught:
        inspect_instance(f"unix://{tmp_path}/none.sock", ALWAYS)
    assert "\n" not in str(caught.value)


def test_an_empty_server_is_stamped_once(message_redis: str) -> None:
    claim_instance(message_redis, STAMP, known=False)
    assert inspect_instance(message_redis, ALWAYS) == STAMP
    for known in (False, True):
        claim_instance(message_redis, STAMP, known=known)


def test_an_empty_server_under_a_known_id_is_refused(message_redis: str, admin: redis.Redis) -> None:
    """Its conversation sequences would start over at 1."""
    with pytest.raises(StartupError, match="is empty, but main of cluster c1 has held data"):
        claim_instance(message_redis, STAMP, known=True)
    assert admin.dbsize() == 0


def test_foreign_data_is_never_stamped(message_redis: str, admin: redis.Redis) -> None:
    admin.set("somebody", "else")
    with pytest.raises(StartupError, match="holds data that is not ours"):
        claim_instance(message_redis, STAMP, known=False)
    assert admin.exists(keys.STAMP) == 0


@pytest.mark.parametrize(
    "change", [{"cluster_id": "c2"}, {"roles": "mailbox"}, {"instance_id": "m1"}, {"format_version": 2}]
)
def test_another_stamp_is_refused(message_redis: str, change: dict[str, Any]) -> None:
    claim_instance(message_redis, STAMP, known=False)
    other = Stamp(**{"cluster_id": "c1", "roles": STAMP.roles, "instance_id": "main", **change})
    with pytest.raises(StartupError, match=re.escape("is main (core+message, format 1) of cluster c1, expected")):
        claim_instance(message_redis, other, known=False)


@pytest.mark.parametrize("text", ["not json", '{"newer": 1}'])
def test_an_unreadable_stamp_is_refused(message_redis: str, admin: redis.Redis, text: str) -> None:
    admin.set(keys.STAMP, text)
    with pytest.raises(StartupError, match="stamp of another program"):
        inspect_instance(message_redis, ALWAYS)


async def test_the_watch_tells_when_memory_runs_out(message_redis: str, admin: redis.Redis, tmp_path: Path) -> None:
    client = RespClient(message_redis, name="message")
    await client.connect()
    watch = RoomWatch(client, data_dir=tmp_path, free_ratio_min=0.0001)
    assert await watch.refresh() is False
    limit = int(admin.config_get("maxmemory")["maxmemory"] or 0)
    admin.config_set("maxmemory", int(admin.info("memory")["used_memory"]))
    assert await watch.refresh() is True
    admin.config_set("maxmemory", limit)
    assert await watch.refresh() is False
    await client.close()
    watch.full = True
    assert await watch.refresh() is True


def test_a_failing_aof_or_a_full_disk_counts_as_full(tmp_path: Path) -> None:
    watch = RoomWatch(RespClient("redis://127.0.0.1:1", name="message"), data_dir=tmp_path, free_ratio_min=1.0)
    unlimited = {"maxmemory": "0", "used_memory": "9"}
    assert watch._is_full(unlimited, {"aof_last_write_status": "ok"}) is True
    watch = RoomWatch(RespClient("redis://127.0.0.1:1", name="message"))
    assert watch._is_full(unlimited, {"aof_last_write_status": "ok"}) is False
    assert watch._is_full(unlimited, {"aof_last_write_status": "err"}) is True
