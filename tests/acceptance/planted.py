"""`qim join` with a fault built in: a worker process that does what the product never does.

    python -m tests.acceptance.planted PLANT --data DIR --control FILE --pool mailbox

The control file is JSON, read when it matters, absent = nothing is done yet. Plants:

- `held`     {"shard", "lane", "chunks", "stopped"}: of the lane (default: all) so many chunks go to the store,
             then none; none at all of the lane that is stopped.
- `slow`     {"shard", "chunks_per_s"}: the shard gets so many chunks into the store.
- `stubborn` {…}: nothing of the registry is heard any more, and no lease is given up: no self-fence, no giving way.
- `committed`      {"shard", "committed"}: a takeover takes what lies below the committed position for done.
- `committed_fold` the same, and W goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson

from qim.app import wiring
from qim.app.join import JoinOptions, run_joined
from qim.app.settings import PoolSizes
from qim.commit_log.api import LogRecord
from qim.registry.keeper import LeaseKeeper
from qim.registry.lease import LeaseMachine, SendBeat
from qim.shard_workers.mailbox.expand import Dispatch
from qim.shard_workers.mailbox.lanes import SubTask
from qim.shard_workers.mailbox.shard import ShardRunner

UNUSED = PoolSizes(gateway=0, writer=0, fanout=0, mailbox=0)


def replace_method(owner: type, name: str, method: Callable[..., object]) -> None:
    """For as long as this process lives."""
    assert callable(getattr(owner, name))
    setattr(owner, name, method)


class Control:
    """What the test has written, {} before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_ns = 0
        self._value: dict[str, int] = {}

    def value(self) -> dict[str, int]:
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed_ns != self._read_ns:
            self._read_ns, self._value = changed_ns, orjson.loads(self._path.read_bytes())
        return self._value


class Gate:
    """Chunks go while fewer were taken than `allowed`."""

    def __init__(self, control: Control, allowed: Callable[[dict[str, int]], float]) -> None:
        self._control = control
        self._allowed = allowed
        self._taken = 0
        take = SubTask.take_chunk

        def counted(task: SubTask) -> int:
            self._taken += self._concerns(task.work.dispatch.frame.target_mailbox_shard, task.lane)
            return take(task)

        replace_method(SubTask, "take_chunk", counted)

    def __call__(self, shard: int, lane: int, offset: int) -> bool:
        wanted = self._control.value()
        if not self._concerns(shard, lane):
            return False
        return lane == wanted.get("stopped") or self._taken >= self._allowed(wanted)

    def _concerns(self, shard: int, lane: int) -> bool:
        wanted = self._control.value()
        return wanted.get("shard") == shard and wanted.get("lane", lane) == lane


def held(control: Control) -> Gate:
    return Gate(control, lambda wanted: wanted["chunks"])


def slow(control: Control) -> Gate:
    started_s: list[float] = []

    def allowed(wanted: dict[str, int]) -> float:
        now_s = time.monotonic()
        started_s.append(now_s)
        del started_s[1:]
        return (now_s - started_s[0]) * wanted["chunks_per_s"]

    return Gate(control, allowed)


def keep_leases(control: Control) -> None:
    """It keeps what it has: once there is a control file it hears nothing of the registry any more, and neither its
    own clock nor a store that refuses its epoch makes it let go."""
    beat = LeaseKeeper._beat

    async def unheard(keeper: LeaseKeeper, action: SendBeat) -> None:
        if not control.value():
            await beat(keeper, action)

    replace_method(LeaseKeeper, "_beat", unheard)
    replace_method(LeaseKeeper, "fenced", lambda keeper, shard_id, epoch: None)
    replace_method(LeaseMachine, "_fence_self", lambda machine, now_ms, actions: None)


def skip_committed(control: Control, *, fold: bool) -> None:
    """What was read once is not read again."""
    admit, restore = ShardRunner._admit, ShardRunner._restore

    def committed_of(runner: ShardRunner) -> int:
        wanted = control.value()
        return wanted["committed"] if runner.shard == wanted.get("shard") else 0

    def forgetful(runner: ShardRunner, record: LogRecord) -> None:
        if record.offset < committed_of(runner):
            runner.machine.admit(Dispatch(record.offset, record.value))
        else:
            admit(runner, record)

    async def restore_at(runner: ShardRunner) -> None:
        await restore(runner)
        if committed := committed_of(runner):
            runner.machine._fold.next_offset = runner._feed.next_offset = committed

    if fold:
        replace_method(ShardRunner, "_restore", restore_at)
    else:
        replace_method(ShardRunner, "_admit", forgetful)


def plant(name: str, control: Control) -> None:
    """Put the fault into this process, which the workers are forked from."""
    gates: dict[str, Callable[[Control], Gate]] = {"held": held, "slow": slow}
    if name in gates:
        wiring.RoleBuilder = partial(wiring.RoleBuilder, chunk_gate=gates[name](control))  # type: ignore[misc,assignment]
    elif name == "stubborn":
        keep_leases(control)
    else:
        skip_committed(control, fold=name == "committed_fold")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("plant", choices=("held", "slow", "stubborn", "committed", "committed_fold"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--pool", required=True)
    options = parser.parse_args()
    plant(options.plant, Control(options.control))
    pools = UNUSED._replace(**{options.pool: 1})
    return run_joined(JoinOptions(data_dir=options.data, pools=pools, apart=True))


if __name__ == "__main__":
    sys.exit(main())
