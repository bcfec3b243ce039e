"""The wake-up event of the claim loop: no wake-up is lost, and no worker is woken without reason."""

import asyncio
import threading

import pytest

from djqueue.runtime.wakeevent import WakeEvent, WakeOn
from tests.support import PATIENCE


@pytest.fixture
async def wake_event() -> WakeEvent:
    return WakeEvent(asyncio.get_running_loop())


async def wakes(wake_event: WakeEvent, hearing: WakeOn) -> None:
    await asyncio.wait_for(wake_event.sleep(None, hearing), PATIENCE)


async def sleeps(wake_event: WakeEvent, hearing: WakeOn) -> None:
    """It does not wake, however long the loop turns."""
    sleeping = asyncio.ensure_future(wake_event.sleep(None, hearing))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sleeping.done()
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)


async def test_wake_event_set_before_the_sleep_ends_it_immediately(wake_event):
    for ring in (wake_event.jobs_came, wake_event.run_ended, wake_event.run_ended_here, wake_event.stop):
        ring()
        await wakes(wake_event, WakeOn.ALL)


async def test_each_wake_up_ends_one_sleep(wake_event):
    wake_event.jobs_came()
    wake_event.run_ended()
    await wakes(wake_event, WakeOn.ALL)
    await sleeps(wake_event, WakeOn.ALL)


async def test_finished_attempts_already_collected_do_not_wake_the_worker(wake_event):
    wake_event.run_ended()
    wake_event.clear_endings()
    await sleeps(wake_event, WakeOn.ALL)
    wake_event.run_ended()
    await wakes(wake_event, WakeOn.ALL)


@pytest.mark.parametrize("ring", ["jobs_came", "run_ended", "stop"])
async def test_wake_up_from_another_thread_ends_the_sleep(wake_event, ring):
    sleeping = asyncio.ensure_future(wake_event.sleep(None, WakeOn.ALL))
    await asyncio.sleep(0)
    thread = threading.Thread(target=getattr(wake_event, ring))
    thread.start()
    await asyncio.wait_for(sleeping, PATIENCE)
    thread.join()


async def test_new_jobs_do_not_wake_a_full_worker_and_are_remembered(wake_event):
    wake_event.jobs_came()
    await sleeps(wake_event, WakeOn.ENDINGS)
    wake_event.run_ended()
    await wakes(wake_event, WakeOn.ENDINGS)
    await wakes(wake_event, WakeOn.ALL)
    await sleeps(wake_event, WakeOn.ALL)


async def test_new_jobs_during_the_sleep_of_a_full_worker_are_remembered(wake_event):
    sleeping = asyncio.ensure_future(wake_event.sleep(None, WakeOn.ENDINGS))
    await asyncio.sleep(0)
    wake_event.jobs_came()
    wake_event.run_ended_here()
    await asyncio.wait_for(sleeping, PATIENCE)
    await wakes(wake_event, WakeOn.ALL)


async def test_only_shutdown_ends_the_sleep_during_storage_backoff(wake_event):
    wake_event.jobs_came()
    wake_event.run_ended()
    await sleeps(wake_event, WakeOn.STOP)
    wake_event.stop()
    await wakes(wake_event, WakeOn.STOP)
    await wakes(wake_event, WakeOn.ENDINGS)
    await wakes(wake_event, WakeOn.ALL)


async def test_sleep_ends_after_its_timeout(wake_event):
    await wake_event.sleep(0.001, WakeOn.ALL)


async def test_sleep_says_whether_more_than_an_ending_has_ended_it(wake_event):
    assert await wake_event.sleep(0.001, WakeOn.ALL)
    wake_event.run_ended_here()
    assert not await wake_event.sleep(None, WakeOn.ALL)
    wake_event.run_ended_here()
    wake_event.jobs_came()
    assert await wake_event.sleep(None, WakeOn.ALL)
    wake_event.run_ended_here()
    # The time of the pause is over, although a run has ended meanwhile.
    assert await wake_event.sleep(0.001, WakeOn.STOP)


async def test_continuous_wake_ups_let_other_tasks_run(wake_event):
    turns = []

    async def other():
        turns.append(True)

    task = asyncio.ensure_future(other())
    wake_event.jobs_came()
    await wake_event.sleep(None, WakeOn.ALL)

    assert turns
    await task


def test_wake_up_after_the_end_of_the_event_loop_is_ignored():
    async def main() -> WakeEvent:
        wake_event = WakeEvent(asyncio.get_running_loop())
        wake_event._sleeper = asyncio.get_running_loop().create_future()
        return wake_event

    wake_event = asyncio.run(main())
    wake_event.jobs_came()
    wake_event.run_ended()
    wake_event.stop()


async def test_no_wake_up_between_threads_is_lost(wake_event):
    """A thread rings for everything that it puts; the sleeper takes all there is, and sleeps."""
    total, taken = 20_000, 0
    put: list[int] = []

    def produce():
        for number in range(total):
            put.append(number)
            wake_event.jobs_came()

    producer = threading.Thread(target=produce)
    producer.start()
    while taken < total:
        await asyncio.wait_for(wake_event.sleep(None, WakeOn.ALL), PATIENCE)
        taken = len(put)
    producer.join()
