"""The world's doing: what goes wrong in a run, and the end of it. Every fault of a plan is a method of `Faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qim.registry.api import LeaseKind
from tests.sim.devices import Device
from tests.sim.servers import Connection, run_now

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.cluster import Cluster


class Faults:
    """See `plan.Step`: times in s of virtual time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loop = cluster.loop
        self._triggers: list[tuple[str, list[int], Callable[[Connection], None]]] = []

    def executed(self, connection: Connection, method: str) -> None:
        """A server executed a call: what was to happen at it happens."""
        name = f"{connection.purpose}.{method}"
        for trigger in list(self._triggers):
            wanted, left, act = trigger
            if wanted == name and connection.process.alive:
                left[0] -= 1
                if left[0] <= 0:
                    self._triggers.remove(trigger)
                    self._cluster.trace(f"{name} of {connection.process.name} was executed")
                    act(connection)

    # ------------------------------------------------------------------------------------------- workers and devices

    def crash(self, worker: str, after_callbacks: int, down_s: float) -> None:
        process = self._cluster.workers[worker].process
        if process is not None and process.alive:
            self._cluster.workers[worker].down_for_s = down_s
            process.crash_after = after_callbacks
            if process.paused:
                process.on_crash()

    def crash_at(self, call: str, nth: int, down_s: float) -> None:
        def act(connection: Connection) -> None:
            worker = self._cluster.workers.get(connection.process.name)
            if worker is not None:
                worker.down_for_s = down_s
                worker.died(connection.process)

        self._triggers.append((call, [nth], act))

    def break_at(self, call: str, nth: int, _: float) -> None:
        self._triggers.append((call, [nth], Connection.break_))

    def takeover(self, worker: str, forced: bool) -> None:
        self._cluster.workers[worker].take_over(forced=forced)

    def takeover_at(self, call: str, nth: int, _: float) -> None:
        def act(connection: Connection) -> None:
            worker = self._cluster.workers.get(connection.process.name)
            if worker is not None and not worker.name.startswith("gateway"):
                worker.take_over(forced=nth < 4)

        self._triggers.append((call, [nth], act))

    def split_at(self, call: str, nth: int, for_s: float) -> None:
        """Stopped behind a call, taken for dead; then it goes on where it was."""

        def act(connection: Connection) -> None:
            worker = self._cluster.workers.get(connection.process.name)
            if worker is not None and not worker.name.startswith("gateway") and connection.process is worker.process:
                self.pause(worker.name, for_s)
                worker.take_over(forced=True)

        self._triggers.append((call, [nth], act))

    def mailbox_lost_at(self, call: str, nth: int, down_s: float) -> None:
        lost_s = 0.5 * nth
        self._triggers.append((call, [nth], lambda _: self.mailbox_lost(lost_s, down_s)))

    def pause(self, worker: str, for_s: float) -> None:
        process = self._cluster.workers[worker].process
        if process is not None and process.alive:
            process.stop()
            self._loop.world_later(for_s, process.resume)

    def clock(self, worker: str, step_ms: int, for_s: float) -> None:
        wall = self._cluster.workers[worker].wall
        wall.offset_ms += step_ms
        self._loop.world_later(for_s, setattr, wall, "offset_ms", 0)

    def break_(self, worker: str, purpose: str) -> None:
        for connection in self._connections(worker, purpose):
            connection.break_()

    def slow(self, worker: str, purpose: str, latency_s: float, for_s: float) -> None:
        for connection in self._connections(worker, purpose):
            connection.slow_s = latency_s
            self._loop.world_later(for_s, setattr, connection, "slow_s", 0.0)

    def server_freeze(self, server: str, for_s: float) -> None:
        frozen = self._cluster.core if server == "core" else self._cluster.mailbox
        if not frozen.frozen:
            frozen.freeze()
            self._loop.world_later(for_s, frozen.thaw)

    # ---------------------------------------------------------------------------------------------------- leases

    def unproven(self, worker: str, down_s: float) -> None:
        """The host of a worker dies with its supervisor: its leases end by themselves."""
        found = self._cluster.workers[worker]
        if found.process is not None and found.process.alive:
            found.down_for_s = down_s
            found.died(found.process, proven=False)

    def drain(self, worker: str, down_s: float) -> None:
        found = self._cluster.workers[worker]
        found.down_for_s = down_s
        found.drain()

    def no_registry(self, worker: str, for_s: float) -> None:
        """One process loses the registry."""
        for connection in self._connections(worker, "registry"):
            connection.cut(for_s)

    def registry_gone(self, for_s: float) -> None:
        """Nobody reaches the registry."""
        for worker in self._cluster.workers:
            self.no_registry(worker, for_s)

    def registry_clock(self, step_ms: int, for_s: float) -> None:
        self._cluster.registry_step(step_ms)
        self._loop.world_later(for_s, self._cluster.registry_step, 0)

    def move(self, kind: str, shard_id: int, owner: str, for_s: float) -> None:
        """An operator moves an id, and lets the balance decide again later."""
        registry, moved = self._cluster.registry, LeaseKind(kind)
        run_now(registry.pin(moved, shard_id, owner))
        self._loop.world_later(for_s, lambda: run_now(registry.pin(moved, shard_id, "")))

    # --------------------------------------------------------------------------------------------- servers and links

    def mailbox_lost(self, since_s: float, down_s: float) -> None:
        """The mailbox instance ends and comes back as it was up to two seconds ago."""
        self._cluster.mailbox.crash()
        lost = self._cluster.mailbox.lose_since(self._loop.time() - since_s)
        self._cluster.trace(f"the mailbox instance lost {lost} writes")
        self._cluster.oracle.mailbox_rolled_back()
        self._cluster.lease_watch.mailbox_rolled_back()
        self._loop.world_later(down_s, self._cluster.mailbox.restart)

    def blackout(self, since_s: float, down_s: float) -> None:
        """Power fails: every worker and the mailbox instance end at once."""
        for worker in self._cluster.workers.values():
            if worker.process is not None and worker.process.alive:
                worker.down_for_s = down_s
                worker.died(worker.process)
        self.mailbox_lost(since_s, down_s)

    def refuse(self, records: int) -> None:
        """The broker of the dispatch log refuses records for good, if there is one."""
        self._cluster.broker.refusals += records

    def core_crash(self, down_s: float) -> None:
        self._cluster.core.crash()
        self._loop.world_later(down_s, self._cluster.core.restart)

    def cut(self, worker: str, role: str, for_s: float) -> None:
        self._cluster.network.cut(worker, role, for_s=for_s)

    def lag(self, worker: str, role: str, latency_s: float, for_s: float) -> None:
        self._cluster.network.slow[worker, role] = latency_s
        self._loop.world_later(for_s, self._cluster.network.slow.pop, (worker, role), None)

    def pipe(self, device: str, _: float) -> None:
        process = self._cluster.devices[device].process
        if process is not None:
            self._cluster.drop_pipes(process)

    def hold(self, device: str, for_s: float) -> None:
        process = self._cluster.devices[device].process
        for found in self._cluster.pipes:
            if any(end.process is process for end in found.ends):
                found.held_until_s = self._loop.time() + for_s

    def device(self, device: str, for_s: float) -> None:
        found = self._cluster.devices[device]
        if found.process is not None and found.process.alive:
            found.kill()
            self._loop.world_later(for_s, self._start_again, found)

    def _start_again(self, device: Device) -> None:
        if device.process is None or not device.process.alive:
            device.start()

    def _connections(self, worker: str, purpose: str) -> list[Connection]:
        process = self._cluster.workers[worker].process
        found = self._cluster.connections.get(process, []) if process is not None else []
        return [connection for connection in found if connection.purpose == purpose]

    # -------------------------------------------------------------------------------------------------- the end

    def heal(self) -> None:
        """Everything works from here on: nobody is stopped, slow, cut off or on another clock."""
        self._triggers.clear()
        self._cluster.network.slow.clear()
        self._cluster.network.severed.clear()
        for server in (self._cluster.core, self._cluster.mailbox):
            server.restart()
            if server.frozen:
                server.thaw()
        for process in self._cluster.processes:
            process.wall.offset_ms = 0
            process.crash_after = None
            if process.alive and process.paused:
                process.resume()
        self._cluster.registry_step(0)
        for connections in self._cluster.connections.values():
            for connection in connections:
                connection.slow_s = 0.0
                connection.cut_until_s = 0.0
        for pipe in self._cluster.pipes:
            pipe.held_until_s = 0.0
        for worker in self._cluster.workers.values():
            if worker.process is None or not worker.process.alive:
                worker.start()
        for device in self._cluster.devices.values():
            self._start_again(device)
            if device.client is not None and not device.live and device.process is not None:
                device.process.soon(device.client.network_changed)
