"""What every part of a gateway worker that talks to the rest of the node needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qim.backplane.api import AskingBackplane, PeerUnavailable
from qim.config.parameters import Parameters
from qim.gateway.routing import Routing
from qim.obs.logs import get_logger
from qim.protocol.opcodes import InternalOpcode
from qim.runtime.clock import Clock
from qim.runtime.tasks import TaskSet

log = get_logger(__name__)

RETRY_JITTER_RATIO: Final = 0.3
"""±30 %, mandatory for every `retry_after_ms` (§20.4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Handed to the parts at construction."""

    backplane: AskingBackplane
    routing: Routing
    parameters: Parameters
    work: TaskSet
    """One task per request that is no send; one that fails concerns one client."""
    clock: Clock
    random_unit: Callable[[], float]

    async def ask(self, peer: str | None, opcode: InternalOpcode, body: bytes) -> bytes | None:
        """None when nobody owns what was asked for, or nobody answered: it may have been done or not."""
        if peer is not None:
            try:
                return await self.backplane.request(peer, opcode, body, timeout_ms=self.parameters.submit_timeout_ms)
            except PeerUnavailable as error:
                self.peer_failed(opcode, error)
                return None
        self.routing.peer_failed()
        return None

    def peer_failed(self, opcode: InternalOpcode, error: PeerUnavailable) -> None:
        """A request was not answered."""
        log.debug("peer_unavailable", opcode=int(opcode), reason=str(error))
        self.routing.peer_failed()

    def jittered_ms(self, base_ms: float) -> int:
        """`base_ms` ± 30 %, at least 1."""
        return max(1, int(base_ms * (1 + RETRY_JITTER_RATIO * (2 * self.random_unit() - 1))))
