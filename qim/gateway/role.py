"""`GatewayRole`: the life of one gateway worker (DESIGN §2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qim.backplane.api import AskingBackplane
from qim.config.parameters import Parameters
from qim.gateway.node import ConnectionNode, GatewaySettings
from qim.gateway.routing import Routes, Routing
from qim.gateway.sessions import SessionOpener
from qim.gateway.surroundings import Surroundings
from qim.obs.logs import get_logger
from qim.protocol.opcodes import InternalOpcode
from qim.registry.api import LeaseKind, RouteMap
from qim.registry.routes import owners_of
from qim.runtime.clock import Clock
from qim.runtime.tasks import FailureHandler, TaskSet

log = get_logger(__name__)

DRAIN_POLL_S: Final = 0.02
CLOSE_WAIT_MS: Final = 2000
"""Of a drain, for peers to take what was written to them; then they are cut off."""


class GatewayRole:
    """See `Role`. Handlers are registered at construction, so before the backplane starts."""

    def __init__(
        self,
        name: str,
        settings: GatewaySettings,
        *,
        parameters: Parameters,
        backplane: AskingBackplane,
        routes: Routes,
        registry: SessionOpener,
        clock: Clock,
        random_unit: Callable[[], float],
        on_failure: FailureHandler,
    ) -> None:
        """`name` is "gateway-<i>". `on_failure` hears of a dead task without which the role cannot go on."""
        self.name = name
        self._settings = settings
        self._registry = registry
        self._vital = TaskSet(on_failure)
        self._surroundings = Surroundings(
            backplane=backplane,
            routing=Routing(
                routes,
                conversation_bucket_count=settings.conversation_bucket_count,
                mailbox_shard_count=settings.mailbox_shard_count,
            ),
            parameters=parameters,
            work=TaskSet(_request_failed),
            clock=clock,
            random_unit=random_unit,
        )
        self._node: ConnectionNode | None = None
        backplane.on_notice(InternalOpcode.PUSH_BATCH, self._on_push_batch)
        backplane.on_notice(InternalOpcode.MARK_DIRTY, self._on_mark_dirty)
        backplane.on_notice(InternalOpcode.REPLACE_SESSION, self._on_replace_session)
        backplane.on_link(self._on_link)
        routes.on_change(self._on_routes)

    @property
    def port(self) -> int:
        """The bound port, also when 0 was asked for. Only after `start`."""
        assert self._node is not None
        return self._node.port

    async def start(self) -> None:
        """StartupError when the port or the presence table cannot be had."""
        node = ConnectionNode(self.name, self._settings, self._surroundings, self._registry)
        self._node = node
        for peer in (*self._settings.peers, *self._settings.other_gateways):
            self._surroundings.backplane.connect(peer)
        self._vital.start("heartbeat wheel", node.turn_wheel())
        self._vital.start("shard follower", node.follow_shards())
        log.info("gateway_listening", role=self.name, address=self._settings.host, port=node.port)

    async def drain(self) -> None:
        """Stop accepting and reading, answer what was accepted, then close every connection behind its last frame."""
        node = self._node
        if node is None:
            return
        node.stop_accepting()
        await self._wait_until(
            lambda: len(self._surroundings.work) == 0 and node.sends_open == 0,
            self._surroundings.parameters.submit_timeout_ms,
        )
        node.close_all("drain")
        await self._wait_until(lambda: len(node) == 0, CLOSE_WAIT_MS)

    async def stop(self) -> None:
        node, self._node = self._node, None
        await self._vital.close()
        if node is not None:
            node.stop_accepting()
            node.abort_all("stop")
        await self._surroundings.work.close()
        if node is not None:
            # transports report the end of their sockets one tick after the abort
            await self._wait_until(lambda: len(node) == 0, CLOSE_WAIT_MS)
            node.close()

    def ready(self) -> bool:
        """Serving, and every shard and bucket has an owner."""
        return self._node is not None and self._node.accepting and self._surroundings.routing.complete()

    def _on_push_batch(self, peer: str, body: bytes) -> None:
        if self._node is not None:
            self._node.on_push_batch(peer, body)

    def _on_mark_dirty(self, peer: str, body: bytes) -> None:
        if self._node is not None:
            self._node.on_mark_dirty(peer, body)

    def _on_replace_session(self, peer: str, body: bytes) -> None:
        if self._node is not None:
            self._node.on_replace_session(peer, body)

    def _on_link(self, peer: str, up: bool) -> None:
        if self._node is not None and up:
            self._node.on_link_up(peer)

    def _on_routes(self, routes: RouteMap) -> None:
        for kind in (LeaseKind.CONVERSATION_BUCKET, LeaseKind.MAILBOX_SHARD):
            for owner in owners_of(routes, kind):
                self._surroundings.backplane.connect(owner)
        if self._node is not None:
            self._node.on_routes(routes)

    async def _wait_until(self, done: Callable[[], bool], timeout_ms: float) -> None:
        """Looks instead of being told: the conditions belong to two owners and last two seconds at most."""
        deadline_ms = self._surroundings.clock.monotonic_ms() + timeout_ms
        while not done() and self._surroundings.clock.monotonic_ms() < deadline_ms:
            await asyncio.sleep(DRAIN_POLL_S)


def _request_failed(task: str, error: BaseException) -> None:
    """A defect met by one request: it was logged and counted, its client runs into a timeout, the others live on."""
