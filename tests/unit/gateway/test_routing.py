"""Addresses of conversations and users."""

from __future__ import annotations

from qim.core.ids import conversation_bucket, mailbox_shard_id
from qim.gateway.routing import Routing
from qim.registry.api import LeaseKind, Route, RouteMap
from tests.support.fake_backplane import FakeRoutes


def test_owners() -> None:
    routes = FakeRoutes(buckets=64, shards=16)
    bucket = conversation_bucket("acme", "dm:ann:bob", 64)
    shard = mailbox_shard_id("acme", "ann", 16)
    routes.map = RouteMap(
        2,
        {
            LeaseKind.CONVERSATION_BUCKET: {bucket: Route("writer-1", 2)},
            LeaseKind.MAILBOX_SHARD: {shard: Route("mailbox-3", 2)},
        },
    )
    routing = Routing(routes, conversation_bucket_count=64, mailbox_shard_count=16)
    assert routing.writer_of("acme", "dm:ann:bob") == "writer-1"
    assert routing.shard_of("acme", "ann") == shard
    assert routing.mailbox_of(shard) == "mailbox-3"
    assert routing.mailbox_of((shard + 1) % 16) is None
    assert not routing.complete()


def test_complete_when_everything_has_an_owner() -> None:
    routes = FakeRoutes(buckets=64, shards=16)
    assert Routing(routes, conversation_bucket_count=64, mailbox_shard_count=16).complete()
    assert not Routing(routes, conversation_bucket_count=128, mailbox_shard_count=16).complete()


def test_silence_asks_for_a_fresh_map() -> None:
    routes = FakeRoutes()
    Routing(routes, conversation_bucket_count=64, mailbox_shard_count=16).peer_failed()
    assert routes.refreshes == 1


def test_a_newer_map_is_followed() -> None:
    routes = FakeRoutes(buckets=64, shards=16)
    routing = Routing(routes, conversation_bucket_count=64, mailbox_shard_count=16)
    moved = {bucket: Route("writer-1", 2) for bucket in range(64)}
    routes.change(RouteMap(2, {LeaseKind.CONVERSATION_BUCKET: moved}))
    assert routing.writer_of("acme", "dm:ann:bob") == "writer-1"
    assert routing.mailbox_of(0) is None
    assert not routing.complete()
