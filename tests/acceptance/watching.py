"""What is looked at all the time while faults are injected into a node of processes: W of every lane as the store has
it, and the metrics of every worker that must stay 0 (26.6.5). What a worker counted before it was killed is kept."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import redis

from qim.app.connect import NodeAddress
from qim.app.own_node import pids_of
from qim.app.status import metrics_socket
from qim.core.seq import log_offset_of
from qim.errors import StartupError
from qim.obs import metrics
from qim.stores.redis import keys

LOOK_EVERY_S: Final = 0.1
SCRAPE_EVERY_S: Final = 0.5
SCRAPE_TIMEOUT_S: Final = 2.0
LOOKS_MIN: Final = 50
"""At W, in a run that says anything about sequences."""
SCRAPES_MIN: Final = 10
"""Of each worker it judges."""
REGRESSIONS: Final = "mailbox_seq_regression_count"


class Watch:
    """Observations of one scenario; read them after the block of `watched`."""

    def __init__(self, address: NodeAddress) -> None:
        self.address = address
        self.looks = 0
        """Times all W were read."""
        self.scrapes: Counter[str] = Counter()
        """process -> answers of its metrics endpoint."""
        self.went_back: list[str] = []
        """Lanes whose stored W was lower than before."""
        self.regressions = 0.0
        """Greatest `mailbox_seq_regression_count` any worker ever showed."""
        self.violations: dict[str, float] = {}
        """Series that must stay 0 and did not, with their greatest value."""
        self.alerts: dict[str, str] = {}
        """Alerts that fired at any time, with their severities."""
        self.texts: dict[str, str] = {}
        """process -> its last exposition."""
        self._w: list[tuple[int, ...]] = [()] * address.mailbox_shard_count
        self._store = redis.Redis.from_url(address.mailbox_address)

    def look(self) -> list[tuple[int, ...]]:
        """All W now, compared with those of the last look."""
        with self._store.pipeline(transaction=False) as reads:
            for shard in range(len(self._w)):
                reads.hget(keys.shard(shard), keys.WATERMARKS_FIELD)
            stored = [struct.unpack(f">{len(packed) // 8}Q", packed) if packed else () for packed in reads.execute()]
        for shard, (before, now) in enumerate(zip(self._w, stored, strict=True)):
            if len(now) < len(before):
                self.went_back.append(f"shard {shard} lost its W")
            for lane, (old, new) in enumerate(zip(before, now, strict=False)):
                if new < old:
                    self.went_back.append(f"shard {shard} lane {lane}: {old:#x} -> {new:#x}")
        self._w = stored
        self.looks += 1
        return stored

    async def looked_often(self) -> None:
        """Until a run that may be over sooner was looked at long enough to say anything."""
        while self.looks < LOOKS_MIN or min(self.scrapes.values(), default=0) < SCRAPES_MIN:
            await asyncio.sleep(0.1)

    def covered(self) -> int:
        """Log offsets every lane of their shard is done with, summed: grows while anything is materialized."""
        return sum(log_offset_of(min(lanes)) for lanes in self._w if lanes)

    async def scrape(self) -> None:
        """Ask every worker that runs for its metrics."""
        with contextlib.suppress(StartupError):
            names = [name for name in pids_of(self.address.run_dir) if not name.startswith("redis-")]
            await asyncio.gather(*(self._scrape(name) for name in names))

    async def _scrape(self, process: str) -> None:
        connector = aiohttp.UnixConnector(path=str(metrics_socket(Path(self.address.run_dir), process)))
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get("http://worker/metrics") as response,
            ):
                text = (await response.read()).decode()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # it was just killed
        self.texts[process] = text
        self.scrapes[process] += 1
        for series, value in metrics.always_zero_violations(text).items():
            self.violations[series] = max(self.violations.get(series, 0.0), value)
        self.regressions = max(self.regressions, self.violations.get(REGRESSIONS, 0.0))
        self.alerts |= metrics.firing_alerts(text)

    def gauge(self, process: str, series: str) -> float:
        """A series of one worker as it was seen last, 0 if it has none."""
        for line in self.texts.get(process, "").splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return 0.0

    def counted(self, series: str) -> float:
        """Sum of a series over all workers as they were seen last."""
        found = 0.0
        for text in self.texts.values():
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if name == series or name.startswith(series + "{"):
                    found += float(value)
        return found

    def check_sequences(self, *, tolerated: frozenset[str] = frozenset()) -> None:
        """Common criteria of 26.8: nothing went back, nothing that must stay 0 moved. The heartbeat wheel's counter is
        the processor's: other tests may keep that busy."""
        assert self.looks > 0
        assert self.scrapes.total() > 0
        assert self.went_back == []
        assert self.regressions == 0
        left = set(self.violations) - {"timewheel_tick_overrun_total"} - tolerated
        assert not left, self.violations

    def close(self) -> None:
        self._store.close()


@asynccontextmanager
async def watched(address: NodeAddress) -> AsyncIterator[Watch]:
    """A watch that looks until the end of the block, and once more then."""
    watch = Watch(address)

    async def look_on() -> None:
        while True:
            watch.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def scrape_on() -> None:
        while True:
            await watch.scrape()
            await asyncio.sleep(SCRAPE_EVERY_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(look_on()), tasks.create_task(scrape_on())]
            try:
                yield watch
            finally:
                for task in running:
                    task.cancel()
        watch.look()
        await watch.scrape()
    finally:
        watch.close()
