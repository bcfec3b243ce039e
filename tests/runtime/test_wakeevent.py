"""The bell of the claim loop: nothing that rings is lost, and nobody is woken in vain."""

import asyncio
import threading

import pytest

from djqueue.runtime.wakeevent import WakeEvent, WakeOn


@pytest.fixture
async def wake_event() -> WakeEvent:
    return WakeEvent(asyncio.get_running_loop())


async def wakes(wake_event: WakeEvent, hearing: WakeOn) -> None:
    await asyncio.wait_for(wake_event.sleep(None, hearing), 5)


async def sleeps(wake_event: WakeEvent, hearing: WakeOn) -> None:
    """It does not wake, however long the loop turns."""
    sleeping = asyncio.ensure_future(wake_event.sleep(None, hearing))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sleeping.done()
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)


async def test_what_rang_before_the_sleep_ends_it_at_once(wake_event):
    for ring in (wake_event.jobs_came, wake_event.run_ended, wake_event.run_ended_here, wake_event.stop):
        ring()
        await wakes(wake_event, WakeOn.ALL)


async def test_every_ring_wakes_once(wake_event):
    wake_event.jobs_came()
    wake_event.run_ended()
    await wakes(wake_event, WakeOn.ALL)
    await sleeps(wake_event, WakeOn.ALL)


async def test_ended_runs_that_were_looked_at_wake_nobody(wake_event):
    wake_event.run_ended()
    wake_event.clear_endings()
    await sleeps(wake_event, WakeOn.ALL)
    wake_event.run_ended()
    await wakes(wake_event, WakeOn.ALL)


@pytest.mark.parametrize("ring", ["jobs_came", "run_ended", "stop"])
async def test_a_ring_from_another_thread_wakes_the_sleeper(wake_event, ring):
    sleeping = asyncio.ensure_future(wake_event.sleep(None, WakeOn.ALL))
    await asyncio.sleep(0)
    thread = threading.Thread(target=getattr(wake_event, ring))
    thread.start()
    await asyncio.wait_for(sleeping, 5)
    thread.join()


async def test_jobs_wait_while_all_slots_are_taken_and_are_not_forgotten(wake_event):
    wake_event.jobs_came()
    await sleeps(wake_event, WakeOn.ENDINGS)
    wake_event.run_ended()
    await wakes(wake_event, WakeOn.ENDINGS)
    await wakes(wake_event, WakeOn.ALL)
    await sleeps(wake_event, WakeOn.ALL)


async def test_jobs_that_come_while_all_slots_are_taken_are_not_forgotten(wake_event):
    sleeping = asyncio.ensure_future(wake_event.sleep(None, WakeOn.ENDINGS))
    await asyncio.sleep(0)
    wake_event.jobs_came()
    wake_event.run_ended_here()
    await asyncio.wait_for(sleeping, 5)
    await wakes(wake_event, WakeOn.ALL)


async def test_while_the_storage_is_left_in_peace_only_the_end_wakes(wake_event):
    wake_event.jobs_came()
    wake_event.run_ended()
    await sleeps(wake_event, WakeOn.STOP)
    wake_event.stop()
    await wakes(wake_event, WakeOn.STOP)
    await wakes(wake_event, WakeOn.ENDINGS)
    await wakes(wake_event, WakeOn.ALL)


async def test_a_sleep_may_have_an_end(wake_event):
    await wake_event.sleep(0.001, WakeOn.ALL)


async def test_a_bell_that_rings_all_the_time_lets_others_have_their_turn(wake_event):
    turns = []

    async def other():
        turns.append(True)

    task = asyncio.ensure_future(other())
    wake_event.jobs_came()
    await wake_event.sleep(None, WakeOn.ALL)

    assert turns
    await task


def test_ringing_after_the_loops_end_is_harmless():
    async def main() -> WakeEvent:
        wake_event = WakeEvent(asyncio.get_running_loop())
        wake_event._sleeper = asyncio.get_running_loop().create_future()
        return wake_event

    wake_event = asyncio.run(main())
    wake_event.jobs_came()
    wake_event.run_ended()
    wake_event.stop()


async def test_no_ring_is_lost_between_threads(wake_event):
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
        await asyncio.wait_for(wake_event.sleep(None, WakeOn.ALL), 5)
        taken = len(put)
    producer.join()
