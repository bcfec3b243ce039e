"""The bell of the claim loop: nothing that rings is lost, and nobody is woken in vain."""

import asyncio
import threading

import pytest

from djqueue.runtime.bell import Bell, Hearing


@pytest.fixture
async def bell() -> Bell:
    return Bell(asyncio.get_running_loop())


async def wakes(bell: Bell, hearing: Hearing) -> None:
    await asyncio.wait_for(bell.sleep(None, hearing), 5)


async def sleeps(bell: Bell, hearing: Hearing) -> None:
    """It does not wake, however long the loop turns."""
    sleeping = asyncio.ensure_future(bell.sleep(None, hearing))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sleeping.done()
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)


async def test_what_rang_before_the_sleep_ends_it_at_once(bell):
    for ring in (bell.jobs_came, bell.run_ended, bell.run_ended_here, bell.stop):
        ring()
        await wakes(bell, Hearing.ALL)


async def test_every_ring_wakes_once(bell):
    bell.jobs_came()
    bell.run_ended()
    await wakes(bell, Hearing.ALL)
    await sleeps(bell, Hearing.ALL)


@pytest.mark.parametrize("ring", ["jobs_came", "run_ended", "stop"])
async def test_a_ring_from_another_thread_wakes_the_sleeper(bell, ring):
    sleeping = asyncio.ensure_future(bell.sleep(None, Hearing.ALL))
    await asyncio.sleep(0)
    thread = threading.Thread(target=getattr(bell, ring))
    thread.start()
    await asyncio.wait_for(sleeping, 5)
    thread.join()


async def test_jobs_wait_while_all_slots_are_taken_and_are_not_forgotten(bell):
    bell.jobs_came()
    await sleeps(bell, Hearing.ENDINGS)
    bell.run_ended()
    await wakes(bell, Hearing.ENDINGS)
    await wakes(bell, Hearing.ALL)
    await sleeps(bell, Hearing.ALL)


async def test_jobs_that_come_while_all_slots_are_taken_are_not_forgotten(bell):
    sleeping = asyncio.ensure_future(bell.sleep(None, Hearing.ENDINGS))
    await asyncio.sleep(0)
    bell.jobs_came()
    bell.run_ended_here()
    await asyncio.wait_for(sleeping, 5)
    await wakes(bell, Hearing.ALL)


async def test_while_the_storage_is_left_in_peace_only_the_end_wakes(bell):
    bell.jobs_came()
    bell.run_ended()
    await sleeps(bell, Hearing.STOP)
    bell.stop()
    await wakes(bell, Hearing.STOP)
    await wakes(bell, Hearing.ENDINGS)
    await wakes(bell, Hearing.ALL)


async def test_a_sleep_may_have_an_end(bell):
    await bell.sleep(0.001, Hearing.ALL)


async def test_a_bell_that_rings_all_the_time_lets_others_have_their_turn(bell):
    turns = []

    async def other():
        turns.append(True)

    task = asyncio.ensure_future(other())
    bell.jobs_came()
    await bell.sleep(None, Hearing.ALL)

    assert turns
    await task


def test_ringing_after_the_loops_end_is_harmless():
    async def main() -> Bell:
        bell = Bell(asyncio.get_running_loop())
        bell._sleeper = asyncio.get_running_loop().create_future()
        return bell

    bell = asyncio.run(main())
    bell.jobs_came()
    bell.run_ended()
    bell.stop()


async def test_no_ring_is_lost_between_threads(bell):
    """A thread rings for everything that it puts; the sleeper takes all there is, and sleeps."""
    total, taken = 20_000, 0
    put: list[int] = []

    def produce():
        for number in range(total):
            put.append(number)
            bell.jobs_came()

    producer = threading.Thread(target=produce)
    producer.start()
    while taken < total:
        await asyncio.wait_for(bell.sleep(None, Hearing.ALL), 5)
        taken = len(put)
    producer.join()
