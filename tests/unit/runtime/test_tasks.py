from __future__ import annotations

import asyncio

from qim.runtime.tasks import TaskSet


def _tasks() -> tuple[TaskSet, list[tuple[str, str]]]:
    failures: list[tuple[str, str]] = []
    return TaskSet(lambda name, error: failures.append((name, str(error)))), failures


async def test_a_crash_is_reported_with_the_name_of_the_task() -> None:
    tasks, failures = _tasks()

    async def crash() -> None:
        raise ValueError("broken")

    await asyncio.wait([tasks.start("lane-3", crash())])
    await asyncio.sleep(0)
    assert failures == [("lane-3", "broken")]
    assert len(tasks) == 0


async def test_the_end_of_a_task_is_no_failure() -> None:
    tasks, failures = _tasks()

    async def work() -> int:
        return 5

    assert await tasks.start("once", work()) == 5
    assert failures == []


async def test_close_cancels_and_waits() -> None:
    tasks, failures = _tasks()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("yes")

    tasks.start("forever", work())
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["yes"]
    assert failures == []


async def test_nothing_starts_after_close() -> None:
    tasks, _ = _tasks()
    await tasks.close()
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    task = tasks.start("late", work())
    await asyncio.wait([task])
    assert task.cancelled()
    assert ran == []


async def test_close_may_be_called_from_inside() -> None:
    tasks, failures = _tasks()

    async def closer() -> None:
        await tasks.close()

    await tasks.start("closer", closer())
    assert failures == []
