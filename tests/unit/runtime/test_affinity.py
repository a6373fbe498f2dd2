from __future__ import annotations

import os

from qim.runtime.affinity import pin_to_cpu, run_in_batches, usable_cpus


def test_a_process_can_be_pinned_and_set_free() -> None:
    cpus = usable_cpus()
    assert cpus == sorted(cpus)
    try:
        assert pin_to_cpu(cpus[0])
        assert usable_cpus() == cpus[:1]
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_core_that_is_not_there_is_refused() -> None:
    assert not pin_to_cpu(1023)


def test_a_process_and_what_it_starts_run_in_batches() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        changed = run_in_batches()
        if os.fork() == 0:
            os.write(write_end, b"batch" if changed and os.sched_getscheduler(0) == os.SCHED_BATCH else b"other")
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"batch"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_class_that_was_chosen_stays() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        changed = run_in_batches()
        os.write(write_end, b"kept" if not changed and os.sched_getscheduler(0) == os.SCHED_IDLE else b"lost")
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"kept"
