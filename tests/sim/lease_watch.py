"""What must hold of leases, seen from outside: who is granted what while who still believes to have it, and whose
calls have an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qim.registry.api import LeaseKind
from qim.registry.keeper import LeaseKeeper
from qim.registry.lease import State
from qim.stores.api import AppendStatus, CommitStatus

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.loop import SimProcess
    from tests.sim.servers import Connection

_AT_WORK: Final = frozenset({State.OPENING, State.HELD, State.CLOSING})
_OPENS: Final = {
    "open_bucket": LeaseKind.CONVERSATION_BUCKET,
    "open_partition": LeaseKind.OUTBOX_PARTITION,
    "open_shard": LeaseKind.MAILBOX_SHARD,
}
_EXCUSED_S: Final = 12.1
"""After a clock step of the registry, or a death that was none, owners may overlap until the self-fence."""


class LeaseWatch:
    """Two rules. An id is granted only when nobody who runs believes to have it: whoever cannot renew has dropped it
    by then. And whoever does believe so wrongly (it was stopped, taken for dead, or clocks jumped) has no effect once
    a store knows the next epoch."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._keepers: list[tuple[SimProcess, LeaseKeeper]] = []
        self._granted: dict[tuple[LeaseKind, int], int] = {}
        self._opened: dict[tuple[LeaseKind, int], int] = {}
        self._bounded: dict[int, int] = {}
        self._excused_until_s = 0.0
        self.moves = 0
        """Grants of an id that somebody had before."""

    def keeps(self, process: SimProcess, keeper: LeaseKeeper) -> None:
        """A role instance has started."""
        self._keepers = [found for found in self._keepers if found[0].alive]
        self._keepers.append((process, keeper))

    def forced(self) -> None:
        """Leases of somebody alive are given away."""
        self._excused_until_s = self._cluster.loop.time() + _EXCUSED_S

    clock_stepped = forced

    def mailbox_rolled_back(self) -> None:
        """The mailbox instance knows the epochs of a second ago again."""
        shards = self._cluster.mailbox.store._held.shards
        for shard in range(self._cluster.plan.shards):
            held = shards.get(shard)
            self._opened[LeaseKind.MAILBOX_SHARD, shard] = held.epoch if held is not None else 0

    def executed(self, connection: Connection, method: str, args: tuple[Any, ...], outcome: Any) -> None:
        """A server executed a call."""
        if isinstance(outcome, Exception):
            return
        if method == "acquire":
            for shard_id, answer in outcome.items():
                self._grants(connection.process, args[0], shard_id, answer.epoch)
        elif method in _OPENS:
            key = _OPENS[method], args[0]
            self._opened[key] = max(self._opened.get(key, 0), args[1])
        elif method == "commit":
            if any(one.status is CommitStatus.COMMITTED for one in outcome):
                self._acts(connection, LeaseKind.CONVERSATION_BUCKET, args[0], args[1], method)
        elif method == "save":
            self._acts(connection, LeaseKind.OUTBOX_PARTITION, args[0], args[1], method)
        elif method in ("truncate_before", "enforce_cap"):
            self._acts(connection, LeaseKind.MAILBOX_SHARD, args[0], args[1], method)
        elif method == "append" and connection.purpose == "mailbox":
            if outcome.status is AppendStatus.OK:
                self._acts(connection, LeaseKind.MAILBOX_SHARD, args[0].shard, args[0].shard_epoch, method)
        elif method == "append" and not self._cluster.plan.broker:
            self._acts(connection, LeaseKind.OUTBOX_PARTITION, args[1].source_partition, args[1].epoch, method)
        elif method == "write_boundary":
            self._bounds(args[0], args[1].shard_epoch)

    def _grants(self, process: SimProcess, kind: LeaseKind, shard_id: int, epoch: int) -> None:
        before = self._granted.get((kind, shard_id), 0)
        if epoch <= before:
            return
        self._granted[kind, shard_id] = epoch
        self.moves += before > 0
        if self._cluster.loop.time() < self._excused_until_s:
            return
        for other, keeper in self._keepers:
            runs = other.alive and not other.paused and other is not process
            if runs and keeper.kind is kind and keeper.state(shard_id) in _AT_WORK:
                self._cluster.oracle.violation(
                    f"{kind} {shard_id} is granted to {process.name} (epoch {epoch}), {other.name} still has it"
                )

    def _acts(self, connection: Connection, kind: LeaseKind, shard_id: int, epoch: int, method: str) -> None:
        opened = self._opened.get((kind, shard_id), 0)
        if epoch < opened:
            self._cluster.oracle.violation(
                f"{method} of {connection.process.name} at {kind} {shard_id} took effect under epoch {epoch}, "
                f"epoch {opened} is open"
            )

    def _bounds(self, shard: int, epoch: int) -> None:
        """A boundary that comes late would give away offsets that a later epoch has counted already."""
        if epoch < self._bounded.get(shard, 0):
            self._cluster.oracle.violation(f"the boundary of epoch {epoch} of shard {shard} comes after a later one")
        self._bounded[shard] = max(self._bounded.get(shard, 0), epoch)
