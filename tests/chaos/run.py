"""`make chaos`: one fault after another on nodes of their own, judged and put into one table.

Each fault has its node (two workers of every pool, each a process), its people and its checks: the checker over every
device and the store, and the dispatch audit, which must find nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import redis
import uvloop

from qim.app.audit.command import audit_node
from qim.app.connect import AdminClient
from qim.app.own_node import LOG_FILE, OwnNode
from qim.app.replay.chaos import BacklogProbe
from qim.app.replay.evidence import RunDir
from qim.config.parameters import default_parameters
from qim.errors import QimError
from qim.obs.logs import configure_logs
from qim.runtime.clock import SystemClock
from qim.runtime.file_limit import raise_file_limit
from tests.chaos.alarms import alarms
from tests.chaos.faults import FaultKind, Ground, Surroundings, selected
from tests.chaos.judge import judge
from tests.chaos.load import RESYNC_MIN_INTERVAL_MS, Load
from tests.chaos.table import NOT_RECOVERED, FaultResult, Recovery, text
from tests.support.faults.broker import running_replicated_cluster, running_split_cluster
from tests.support.faults.clock import HostClock
from tests.support.faults.full_disk import small_disk
from tests.support.faults.kill import CrashPoints
from tests.support.kafka_server import running_kafka
from tests.support.node import APART, options_with
from tests.support.takeover import TENTH

BOUND_MIN: Final = 60.0
ENDING_S: Final = 150.0
"""Time kept for the checks of the last fault."""
SHARDS: Final = 4
PARAMETERS: Final = {
    # few shards and lanes and small chunks: the large group's message takes several calls, and several chunks of a lane
    "single_host_mailbox_shard_count": str(SHARDS),
    "lane_count": "8",
    "append_chunk_members": "4",
    # faults follow one another faster than they do in life
    "restart_backoff_reset_ms": "500",
    "client_resync_min_interval": str(RESYNC_MIN_INTERVAL_MS),
}
BUSY_TIMEOUT_S: Final = 10.0
"""How long an injection waits for something in flight."""
FIRST_SECOND_MS: Final = 1000.0
RECENT_MS: Final = 2000.0
SLOW_MS: Final = 200.0
SETTLE_S: Final = 90.0
"""As the replay's: a device that was told nothing finds a gap by its next PONG."""
DISK_MIB: Final = 512
BETWEEN_S: Final = 0.3
_POLL_S: Final = 0.002
_LOOK_S: Final = 0.01


class Injection:
    """One injection of a fault: `faults.Field`."""

    def __init__(self, ground: Ground, load: Load, probe: BacklogProbe, timeout_s: float) -> None:
        self.ground = ground
        self.met = 0
        self._load = load
        self._probe = probe
        self._clock = SystemClock()
        self._timeout_s = timeout_s
        self._recovery: asyncio.Task[Recovery] | None = None

    async def busy(self) -> None:
        """See faults.Field; returns after BUSY_TIMEOUT_S whatever there is."""
        deadline_ms = self._clock.monotonic_ms() + BUSY_TIMEOUT_S * 1000
        while not self._load.ledger.unacknowledged() and self._clock.monotonic_ms() < deadline_ms:
            await asyncio.sleep(_POLL_S)

    def strike(self) -> None:
        """See faults.Field."""
        now_ms = self._clock.monotonic_ms()
        recent = self._load.sent_between(now_ms - RECENT_MS, now_ms)
        waiting = frozenset(self._load.unfinished({*recent, *self._load.ledger.unacknowledged()}))
        self.met = len(waiting) + (self._load.admin_call_since_ms > 0) + self._above_w()
        self._recovery = asyncio.create_task(self._recovered(waiting, now_ms))

    async def recovery(self) -> Recovery:
        """How long everything in flight at the strike, and sent in the second after it, took to arrive."""
        assert self._recovery is not None, "the fault never struck"
        return await self._recovery

    async def _recovered(self, waiting: frozenset[str], started_ms: float) -> Recovery:
        """What took no longer than SLOW_MS was not touched by the fault and does not count."""
        pending, seen_ms, last_ms, last_new_ms = set(waiting), started_ms, started_ms, started_ms
        while True:
            await asyncio.sleep(_LOOK_S)
            now_ms = self._clock.monotonic_ms()
            if seen_ms < started_ms + FIRST_SECOND_MS:
                pending.update(self._load.sent_between(seen_ms, min(now_ms, started_ms + FIRST_SECOND_MS)))
                seen_ms = now_ms
            left = set(self._load.unfinished(pending))
            for name in pending - left:
                if name in waiting:
                    last_ms = now_ms
                elif now_ms - self._load.sent_at_ms(name) > SLOW_MS:
                    last_ms = last_new_ms = now_ms
            pending = left
            if not pending and now_ms >= started_ms + FIRST_SECOND_MS:
                return Recovery((last_new_ms - started_ms) / 1000, (last_ms - started_ms) / 1000)
            if now_ms >= started_ms + self._timeout_s * 1000:
                return NOT_RECOVERED

    def _above_w(self) -> int:
        try:
            return self._probe.read().above_w
        except (redis.RedisError, QimError):
            return 0


@contextmanager
def _ground(fault: FaultKind) -> Iterator[Ground]:
    """The node of a fault, started."""
    with ExitStack() as stack:
        # Under /tmp whatever TMPDIR says: a unix socket path has 107 bytes.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qimc", dir="/tmp")))
        clock, crashes = HostClock(directory / "clock"), CrashPoints(directory / "crashes")
        options = options_with(APART, **PARAMETERS, **({} if fault.default_leases else TENTH))
        disk, broker, brokers, replicated = None, None, None, None
        if fault.surroundings is Surroundings.BROKER:
            broker = stack.enter_context(running_kafka())
            options = replace(options, commit_log=broker.url("chaos"))
        elif fault.surroundings is Surroundings.TWO_BROKERS:
            brokers = stack.enter_context(running_split_cluster())
            buckets = default_parameters().conversation_bucket_count
            on_second = {"dispatch": {1}, "outbox": set(range(0, buckets, 8))}
            url = brokers.make_topics("chaos", {"dispatch": SHARDS, "outbox": buckets}, on_second)
            options = replace(options, commit_log=url)
        elif fault.surroundings is Surroundings.THREE_BROKERS:
            replicated = stack.enter_context(running_replicated_cluster())
            options = replace(options, commit_log=replicated.url("chaos"))
        node = OwnNode(crashes.options(clock.options(options)), directory / "node")
        if fault.surroundings is Surroundings.SMALL_DISK:
            disk = stack.enter_context(small_disk(node.data_dir / "redis-mailbox", size_mib=DISK_MIB))
        stack.callback(node.close)
        node.start()
        yield Ground(
            node=node, clock=clock, crashes=crashes, disk=disk, broker=broker, brokers=brokers, replicated=replicated
        )


async def _play(fault: FaultKind, ground: Ground, run_dir: RunDir, result: FaultResult, until_s: float) -> None:
    """All injections of a fault; what they did is added to `result`."""
    address = ground.node.address()
    probe = BacklogProbe(address.core_address, address.mailbox_address, SHARDS, commit_log=address.commit_log)
    async with AdminClient(address) as admin, asyncio.TaskGroup() as tasks:
        load = Load(address, admin, run_dir, SystemClock(), tasks, result.seed)
        await load.begin()
        for number in range(result.wanted):
            if time.monotonic() >= until_s:
                result.notes.append(f"the time was over after {number} injections")
                break
            await asyncio.sleep(BETWEEN_S)
            injection = Injection(ground, load, probe, fault.recovery_timeout_s)
            await injection.busy()
            await fault.act(injection, number)
            result.recoveries.append(await injection.recovery())
            result.met.append(injection.met)
        await load.end()
        conversations, converged = await load.settle(SETTLE_S)
        result.alarms = await alarms(ground.node)
        await load.close()
    probe.close()
    load.save(converged, result.seed)
    result.sent = len(load.ledger.sent)
    result.findings = judge(conversations, run_dir.load().devices)
    audit = await audit_node(address)
    result.orphans = audit.found.total()
    result.notes += [f"{one.orphan.value}: {one.where}: {one.what}" for one in audit.findings]


def run_fault(fault: FaultKind, *, injections: int, seed: int, until_s: float, keep: Path) -> FaultResult:
    """One row of the table. What a failed one left behind, the node's log and the devices' stores, goes to `keep`."""
    wanted = fault.times if fault.times == 1 else injections or fault.times
    result = FaultResult(name=fault.name, wanted=wanted, seed=seed)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qim-chaos-") as directory, ExitStack() as stack:
        run_dir = RunDir(Path(directory) / fault.name)
        run_dir.create()
        configure_logs(level="error", stream=io.StringIO(), process="chaos")
        logs = None
        try:
            ground = stack.enter_context(_ground(fault))
            logs = ground.node.directory / LOG_FILE
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_play(fault, ground, run_dir, result, until_s))
        except Exception as error:  # noqa: BLE001  the other faults are still to be tried
            result.notes.append(_where(error))
        if result.failures():
            shutil.rmtree(keep / fault.name, ignore_errors=True)
            shutil.copytree(run_dir.path, keep / fault.name)
            if logs is not None:
                shutil.copy(logs, keep / fault.name)
    result.seconds = time.monotonic() - started_s
    return result


def _where(error: BaseException) -> str:
    """An error and the line of this suite it came from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" in frame.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"{at}{error!r}"


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 when a fault did harm, met nothing, or was not injected as often as it should."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--faults", default="", help="beginnings of names, separated by commas; all by default")
    parser.add_argument("--injections", type=int, default=0, help="of each fault; 0 = as many as each is worth")
    parser.add_argument("--minutes", type=float, default=BOUND_MIN, help="bound of the whole run")
    parser.add_argument("--seed", type=int, default=1, help="of who writes to whom and who goes away")
    parser.add_argument("--keep", type=Path, default=Path("chaos-results"), help="for what a failed fault left behind")
    options = parser.parse_args(arguments)
    try:
        faults = selected(options.faults)
    except ValueError as error:
        parser.error(str(error))
    raise_file_limit()
    until_s = time.monotonic() + options.minutes * 60 - ENDING_S
    results = []
    for fault in faults:
        results.append(
            run_fault(fault, injections=options.injections, seed=options.seed, until_s=until_s, keep=options.keep)
        )
        print(text(results[-1:]), flush=True)
    print(text(results), flush=True)
    return 1 if any(result.failures() for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
