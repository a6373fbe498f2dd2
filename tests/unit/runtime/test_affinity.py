from __future__ import annotations

import os

from qim.runtime.affinity import pin_to_cpu, usable_cpus


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
