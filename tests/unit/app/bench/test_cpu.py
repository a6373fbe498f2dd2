"""CPU accounts of processes."""

from __future__ import annotations

import os
import threading
import time

from qim.app.bench.cpu import CpuMeter, cpu_ns, per_item_us

GONE = 2**22 + 1
"""Above any pid."""


def burn() -> None:
    end_s = time.thread_time() + 0.02
    while time.thread_time() < end_s:
        pass


def test_every_thread_counts() -> None:
    before = cpu_ns(os.getpid())
    done, go = threading.Event(), threading.Event()

    def work() -> None:
        burn()
        done.set()
        go.wait()  # a thread that has ended has no account any more

    thread = threading.Thread(target=work)
    thread.start()
    done.wait()
    used = cpu_ns(os.getpid()) - before
    go.set()
    thread.join()
    assert used >= 15_000_000


def test_a_process_that_is_gone_used_nothing() -> None:
    assert cpu_ns(GONE) == 0


def test_pools_are_summed() -> None:
    read = CpuMeter({"here": [os.getpid()], "twice": [os.getpid(), os.getpid()], "gone": [GONE]}).read()
    assert read["twice"] >= 2 * read["here"] > 0
    assert read["gone"] == 0


def test_cpu_per_item() -> None:
    assert per_item_us({"a": 1_000, "b": 0}, {"a": 5_000, "b": 8_000}, 4) == {"a": 1.0, "b": 2.0}
    assert per_item_us({"a": 1_000}, {"a": 5_000}, 0) == {"a": 0.0}
