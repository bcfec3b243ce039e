"""The claim loop: number and size of its round trips, and its wake-ups."""

import asyncio
import sys
import threading
import time
from itertools import pairwise

import pytest

from djqueue import Queue, Snooze, Worker
from djqueue.core.job import ClaimRequest
from djqueue.core.policies import Rate
from djqueue.runtime import claiming, probation
from djqueue.runtime.wakeevent import WakeEvent
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from tests.runtime.running import HANDLER, reached, record, work_off, working
from tests.runtime.storages import DistantStorage, LockedStorage, RecordingStorage
from tests.support import aeventually


async def test_worker_finishes_and_claims_jobs_in_shared_round_trips(storage, queue):
    queue.enqueue_many(range(1_000), name=HANDLER)

    async def handler(job):
        return job.payload

    await work_off(storage, handler, concurrency=100, max_jobs=1_000)

    told = [outcomes for outcomes, _, _ in storage.trips]
    given = [jobs for _, _, jobs in storage.trips]
    assert sum(told) == sum(given) == 1_000
    # Ten times a hundred jobs, each hundred told of with the claim of the next one.
    assert given[:10] == [100] * 10
    assert told[1:11] == [100] * 10
    assert len(storage.trips) <= 13


async def test_results_of_sync_jobs_are_reported_in_groups(storage, queue):
    queue.enqueue_many(range(1_000), name=HANDLER)

    await work_off(storage, lambda job: None, concurrency=100, max_jobs=1_000)

    assert len(storage.trips) < 500


@pytest.mark.parametrize(("slots", "at_once", "given"), [(100, 2, 50), (20, 1, 20)])
async def test_worker_makes_two_round_trips_at_once_if_both_are_full_enough(slots, at_once, given):
    storage = DistantStorage()
    Queue("work", storage=storage).enqueue_many(range(1_000), name=HANDLER)

    async def handler(job):
        return job.payload

    await work_off(storage, handler, concurrency=slots, max_jobs=1_000)

    assert storage.most == at_once
    assert max(jobs for _, _, jobs in storage.trips) == given
    assert max(told for told, _, _ in storage.trips) == given
    assert sum(told for told, _, _ in storage.trips) == 1_000


async def test_outcome_of_a_locked_job_is_reported_again_while_others_run():
    storage = LockedStorage()
    queue = Queue("work", storage=storage)
    storage.locked.add("locked")
    queue.enqueue(name=HANDLER, id="locked")

    async with working(storage, lambda job: job.id, concurrency=1) as worker:
        for _ in range(3):
            await reached(queue, queue.enqueue(name=HANDLER).id, "completed")
        assert queue.counts()["active"] == 1
        assert (worker.counters.completed, worker.counters.lost) == (3, 0)
        storage.locked.clear()
        await reached(queue, "locked", "completed")
        await aeventually(lambda: worker.counters.completed == 4)

    assert sum(told for told, _, _ in storage.trips) == 4


async def test_worker_that_stops_waits_for_the_lock_of_a_job_that_has_ended():
    storage = LockedStorage()
    queue = Queue("work", storage=storage)
    storage.locked.add("locked")
    queue.enqueue(name=HANDLER, id="locked")

    async with working(storage, lambda job: job.id) as worker:
        await aeventually(lambda: storage.trips and not worker.running)
        worker.stop()
        storage.locked.clear()

    assert queue.counts()["completed"] == 1


async def test_worker_never_claims_more_jobs_than_it_has_free_slots(storage, queue):
    queue.enqueue_many(range(50), name=HANDLER)
    held = asyncio.Semaphore(0)

    async def handler(job):
        await held.acquire()

    async with working(storage, handler, concurrency=3) as worker:
        await aeventually(lambda: worker.running == 3)
        assert queue.counts()["active"] == 3
        held.release()
        await aeventually(lambda: worker.counters.completed == 1 and worker.running == 3)
        assert queue.counts()["active"] == 3
        for _ in range(49):
            held.release()
        await aeventually(lambda: worker.counters.completed == 50)

    assert all(slots is None or jobs <= slots <= 3 for _, slots, jobs in storage.trips)


async def test_claimed_job_counts_as_running(storage, queue):
    """No prefetch: with one slot taken by a long job, the next one is left to other workers."""
    done = asyncio.Event()

    async def handler(job):
        await done.wait()
        return "first worker"

    async with working(storage, handler, concurrency=1) as worker:
        queue.enqueue(name=HANDLER)
        await aeventually(lambda: worker.running == 1)
        job_id = queue.enqueue(name=HANDLER).id
        async with working(storage, lambda job: "second worker"):
            await reached(queue, job_id, "completed")
        done.set()

    assert queue.get_result(job_id) == "second worker"


async def test_worker_without_free_slots_makes_no_round_trip_for_new_jobs(storage, queue, monkeypatch):
    done, rounds = asyncio.Event(), []
    plain = claiming.ClaimLoop._next_exchange

    def counted(self):
        rounds.append(True)
        return plain(self)

    async def handler(job):
        await done.wait()

    monkeypatch.setattr(claiming.ClaimLoop, "_next_exchange", counted)
    async with working(storage, handler, concurrency=1) as worker:
        queue.enqueue(name=HANDLER)
        await aeventually(lambda: worker.running == 1)
        before = len(rounds), len(storage.trips)
        for number in range(100):
            queue.enqueue(number, name=HANDLER)
            await asyncio.sleep(0)
        assert (len(rounds), len(storage.trips)) == before
        done.set()
        await aeventually(lambda: worker.counters.completed == 101)


async def test_idle_worker_with_several_round_trips_at_once_looks_only_once(monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 600.0)
    storage = DistantStorage()
    queue = Queue("work", storage=storage)

    async with working(storage, lambda job: None, concurrency=100, maintain=False) as worker:
        await aeventually(lambda: storage.trips)
        for _ in range(100):
            await asyncio.sleep(0)
        assert storage.trips == [(0, 50, 0)]
        queue.enqueue(name=HANDLER)
        await aeventually(lambda: worker.counters.completed == 1)
        for _ in range(100):
            await asyncio.sleep(0)
        # One round trip after the wake-up, one with the outcome, and one for jobs that came meanwhile.
        assert len(storage.trips) <= 4


async def test_resumed_worker_with_several_round_trips_at_once_claims_immediately(monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 600.0)
    storage = DistantStorage()
    queue = Queue("work", storage=storage)

    async with working(storage, lambda job: None, concurrency=100, maintain=False) as worker:
        await aeventually(lambda: storage.trips)
        worker.quiet()
        job_id = queue.enqueue(name=HANDLER).id
        worker.resume()
        await reached(queue, job_id, "completed")


BOTH_KINDS = pytest.mark.parametrize(
    ("make_storage", "slots"),
    [(RecordingStorage, 10), (DistantStorage, 100)],
    ids=["one at once", "two at once"],
)


@BOTH_KINDS
async def test_new_job_wakes_an_idle_worker_without_a_poll(make_storage, slots, monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 600.0)
    started = threading.Event()
    storage = make_storage()
    queue = Queue("work", storage=storage)

    async with working(storage, lambda job: started.set(), concurrency=slots) as worker:
        await aeventually(lambda: storage.trips)
        for number in range(50):
            started.clear()
            thread = threading.Thread(target=queue.enqueue, kwargs={"name": HANDLER})
            thread.start()
            await asyncio.to_thread(thread.join)
            await aeventually(started.is_set)
            await aeventually(lambda n=number: worker.counters.completed == n + 1)


@pytest.mark.parametrize(("make_storage", "slots"), [(RecordingStorage, 2), (DistantStorage, 50)])
async def test_no_wake_up_is_lost_under_continuous_enqueues(make_storage, slots, monkeypatch):
    """Every enqueue lands at another instant between an empty claim and going to sleep."""
    monkeypatch.setattr(claiming, "POLL", 600.0)
    storage = make_storage()
    queue = Queue("work", storage=storage)
    total = 2_000

    def produce():
        for number in range(total):
            queue.enqueue(number, name=HANDLER)
            if number % 7 == 0:
                time.sleep(0)

    async def handler(job):
        return None

    async with working(storage, handler, concurrency=slots) as worker:
        await asyncio.to_thread(produce)
        await aeventually(lambda: worker.counters.completed == total)


@BOTH_KINDS
async def test_job_enqueued_during_a_claim_is_claimed_without_a_poll(make_storage, slots, monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 600.0)
    storage = make_storage()
    queue = Queue("work", storage=storage)
    plain, late = storage.afinish, []

    async def slow(outcomes, then=None):
        finished = await plain(outcomes, then)
        if not late:
            # The answer "nothing there" is on its way, and now there is something.
            late.append(queue.enqueue(name=HANDLER).id)
            await asyncio.sleep(0)
        return finished

    storage.afinish = slow
    async with working(storage, lambda job: "seen", concurrency=slots):
        await aeventually(lambda: late)
        await reached(queue, late[0], "completed")


async def test_poll_finds_job_without_a_wake_up(storage, queue, monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 0.02)
    storage.listen = lambda queues, wake: lambda: None

    async with working(storage, lambda job: None, maintain=False):
        await aeventually(lambda: storage.trips)
        await reached(queue, queue.enqueue(name=HANDLER).id, "completed")


async def test_delayed_job_starts_when_due_without_a_poll(storage, queue, monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 600.0)

    async with working(storage, lambda job: None, maintain=False) as worker:
        await aeventually(lambda: storage.trips)
        job_id = queue.enqueue(name=HANDLER, delay=0.05).id
        finished = await reached(queue, job_id, "completed")
        assert worker.counters.completed == 1

    assert finished.run_at <= finished.started_at < finished.run_at + 1_000


async def test_rate_limit_delays_claims_but_does_not_stop_them(storage, queue, monkeypatch):
    monkeypatch.setattr(claiming, "POLL", 600.0)
    storage.queues.set_limits("work", Rate(2, 100), None)
    ids = [result.id for result in queue.enqueue_many(range(6), name=HANDLER)]

    async with working(storage, lambda job: None, maintain=False):
        last = await reached(queue, ids[-1], "completed")

    assert last.started_at - record(queue, ids[0]).started_at >= 150


async def test_worker_claims_only_from_its_queues(storage, queue):
    other = Queue("other", storage=storage)
    mine, theirs = queue.enqueue(name=HANDLER).id, other.enqueue(name=HANDLER).id

    await work_off(storage, lambda job: None, queues=["work"])

    assert record(queue, mine).state == "completed"
    assert record(other, theirs).state == "waiting"


async def test_worker_claims_jobs_in_order_of_priority(storage, queue):
    order = []
    for priority in (1, 5, 3):
        queue.enqueue(priority, name=HANDLER, priority=priority)

    await work_off(storage, lambda job: order.append(job.payload), concurrency=1)

    assert order == [5, 3, 1]


async def test_jobs_of_paused_queue_are_claimed_only_after_resume(storage, queue):
    queue.pause()
    job_id = queue.enqueue(name=HANDLER).id

    async with working(storage, lambda job: None):
        await aeventually(lambda: storage.trips)
        assert record(queue, job_id).state == "waiting"
        queue.resume()
        await reached(queue, job_id, "completed")


async def test_claimed_job_without_handler_is_released(storage, queue, caplog):
    """A storage of somebody's own that does not heed the names."""
    plain = storage.afinish

    async def careless(outcomes, then=None):
        names = frozenset({HANDLER, "unknown"})
        return await plain(outcomes, then and then._replace(names=names))

    storage.afinish = careless
    job_id = queue.enqueue(name="unknown").id
    async with working(storage, lambda job: None):
        delayed = await reached(queue, job_id, "delayed")

    assert delayed.attempts == 0
    assert "has no handler" in caplog.text


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}])
async def test_worker_runs_exactly_max_jobs(storage, queue, options):
    queue.enqueue_many(range(20), name=HANDLER)

    worker = Worker(storage, handlers={HANDLER: lambda job: None}, max_jobs=7, **options)
    await worker.run()

    assert worker.counters.processed == 7
    assert queue.counts()["waiting"] == 13
    assert queue.counts()["active"] == 0


async def test_failed_attempts_count_for_max_jobs_and_released_jobs_do_not(storage, queue):
    runs = []

    def handler(job):
        runs.append(job.payload)
        if runs.count("sleepy") == 1:
            raise Snooze(delay=0)
        if job.payload == "bad":
            raise ValueError

    queue.enqueue("sleepy", name=HANDLER, priority=9)
    queue.enqueue("bad", name=HANDLER, max_attempts=1, priority=5)
    queue.enqueue("left", name=HANDLER)
    worker = Worker(storage, handlers={HANDLER: handler}, max_jobs=2, concurrency=1)
    await worker.run()

    assert runs == ["sleepy", "sleepy", "bad"]
    assert queue.counts()["waiting"] == 1


async def test_worker_claims_no_other_job_until_its_stalled_job_ends(clocked, monkeypatch):
    monkeypatch.setattr(probation, "CLAIM_PAUSES", (3_600.0,))
    storage, queue = clocked
    stalled = lost_jobs(storage, queue, 1)
    others = [queue.enqueue(name=HANDLER).id for _ in range(3)]
    done, running = asyncio.Event(), []

    async def handler(job):
        running.append(job.id)
        if job.id in stalled:
            await done.wait()

    async with working(storage, handler, concurrency=10) as worker:
        await aeventually(lambda: running == stalled)
        queue.enqueue(name=HANDLER)
        assert queue.counts()["waiting"] == 4
        done.set()
        await aeventually(lambda: worker.counters.completed == 5)

    assert set(others) < set(running)
    assert [jobs for _, _, jobs in storage.trips if jobs] == [1, 4]


async def test_other_jobs_join_long_stalled_jobs_one_by_one(clocked, monkeypatch):
    clock = passing_clock(monkeypatch)
    storage, queue = clocked
    lost_jobs(storage, queue, 3)
    done = asyncio.Event()

    async def handler(job):
        await done.wait()

    async with working(storage, handler, concurrency=10, clock=clock) as worker:
        await aeventually(lambda: worker.running == 3)
        done.set()
        await aeventually(lambda: worker.counters.completed == 3)

    assert [jobs for _, _, jobs in storage.trips if jobs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("losses", "alone", "bound"), [(1, 500, 21_000), (2, 2_000, 81_000), (3, 10_000, 241_000)]
)
async def test_many_long_stalled_jobs_start_within_a_bound_and_other_jobs_immediately(
    clocked, monkeypatch, losses, alone, bound
):
    storage, queue = clocked
    stalled = lost_jobs(storage, queue, 500)
    for _ in range(losses - 1):
        lose_again(storage, stalled)
    good = {queue.enqueue(name=HANDLER).id for _ in range(30)}
    clock, done = passing_clock(monkeypatch), asyncio.Event()
    started = claim_times(storage, monkeypatch, clock)

    async def handler(job):
        await done.wait()

    async with working(storage, handler, concurrency=530, clock=clock) as worker:
        await aeventually(lambda: worker.running == 530)
        done.set()
        await aeventually(lambda: worker.counters.completed == 530)

    assert set(started) == {*stalled, *good}
    assert max(started[one] for one in good) == alone
    assert max(started.values()) <= bound
    assert [jobs for _, _, jobs in storage.trips if jobs] == [1, 30] + [1] * 499


async def test_waiting_jobs_get_every_second_claim_beside_short_stalled_jobs(clocked):
    storage, queue = clocked
    stalled = lost_jobs(storage, queue, 500)
    good = [queue.enqueue(name=HANDLER).id for _ in range(30)]
    order = []

    async def handler(job):
        order.append(job.id)

    await work_off(storage, handler, concurrency=10)

    assert set(order) == {*stalled, *good}
    # Three claims of ten jobs, each after one stalled job.
    assert [jobs for _, _, jobs in storage.trips if jobs][:6] == [1, 10, 1, 10, 1, 10]


async def test_finished_stalled_job_passes_no_probation_to_an_older_job(clocked, monkeypatch):
    storage, queue = clocked
    ids = lost_jobs(storage, queue, 3)
    clock, done = passing_clock(monkeypatch), asyncio.Event()
    started = claim_times(storage, monkeypatch, clock)

    async def handler(job):
        if job.id == ids[0]:
            await done.wait()

    async with working(storage, handler, concurrency=10, clock=clock) as worker:
        await aeventually(lambda: worker.counters.completed == 2)
        assert 5_000 == started[ids[1]] <= started[ids[2]] < 6_000
        done.set()
        await aeventually(lambda: worker.counters.completed == 3)


async def test_stalled_jobs_use_half_of_the_slots_while_other_jobs_wait(clocked, monkeypatch):
    storage, queue = clocked
    stalled = set(lost_jobs(storage, queue, 50))
    good = [queue.enqueue(name=HANDLER).id for _ in range(200)]
    clock, done, running, most = passing_clock(monkeypatch), asyncio.Event(), set(), []

    async def handler(job):
        if job.id in stalled:
            running.add(job.id)
            await done.wait()
        else:
            clock.advance(100)
            most.append(len(running))
            await asyncio.sleep(0)

    async with working(storage, handler, concurrency=10, clock=clock) as worker:
        await aeventually(lambda: len(most) == 200)
        assert max(most) == 5
        await aeventually(lambda: worker.running == 10)
        done.set()
        await aeventually(lambda: worker.counters.completed == 250)

    assert good


async def test_two_stalled_jobs_never_share_a_probation(clocked, monkeypatch):
    storage, queue = clocked
    stalled = set(lost_jobs(storage, queue, 10))
    for _ in range(50):
        queue.enqueue(name=HANDLER)
    monkeypatch.setattr(probation, "CLAIM_PAUSES", (0.001,))
    running, met, others = set(), [], []

    async def handler(job):
        if job.id not in stalled:
            others.append(len(running))
            return
        met.append(set(running))
        running.add(job.id)
        seen = len(others)
        await aeventually(lambda: len(others) > seen or len(others) == 50)
        running.discard(job.id)

    async with working(storage, handler, concurrency=10) as worker:
        await aeventually(lambda: worker.counters.completed == 60)

    assert met == [set()] * 10


async def test_first_stalled_job_after_other_jobs_has_a_full_probation(clocked, monkeypatch):
    storage, queue = clocked
    clock = passing_clock(monkeypatch)
    started, rounds = claim_times(storage, monkeypatch, clock), [asyncio.Event(), asyncio.Event()]
    stalled = {}

    async def handler(job):
        if job.id in stalled:
            await rounds[stalled[job.id]].wait()

    waits = []
    async with working(storage, handler, concurrency=100, clock=clock) as worker:
        for number, done in enumerate(rounds):
            ids = lost_jobs(storage, queue, 3)
            stalled.update(dict.fromkeys(ids, number))
            await aeventually(lambda: worker.running == 3)
            done.set()
            await aeventually(lambda count=4 * number + 3: worker.counters.completed == count)
            times = [started[one] for one in ids]
            waits.append([later - earlier for earlier, later in pairwise(times)])
            # A claim that finds no stalled job ends the row.
            queue.enqueue(name=HANDLER)
            await aeventually(lambda count=4 * number + 4: worker.counters.completed == count)

    assert waits == [[5_000, 3_750]] * 2


async def test_jobs_claimed_by_a_parallel_round_trip_beside_a_stalled_job_are_released(monkeypatch):
    monkeypatch.setattr(probation, "CLAIM_PAUSES", (3_600.0,))
    clock = FakeClock()
    storage = DistantStorage(clock=clock)
    queue = Queue("work", storage=storage)
    lost_jobs(storage, queue, 2)
    queue.pause()
    other = Queue("other", storage=storage)
    first = other.enqueue(name=HANDLER).id
    may_end, done, running = asyncio.Event(), asyncio.Event(), []

    async def handler(job):
        running.append(job.id)
        await (may_end if job.id == first else done).wait()

    async with working(storage, handler, concurrency=100) as worker:
        await aeventually(lambda: running == [first])
        # One round trip claims because of the resumed queue, the other one with the outcome.
        queue.resume()
        may_end.set()
        await aeventually(lambda: worker.counters.released == 1)
        assert len(running) == 2
        assert queue.counts()["waiting"] == 1
        done.set()
        await aeventually(lambda: worker.counters.completed == 3)

    assert storage.most == 2


def passing_clock(monkeypatch):
    """A clock that a worker's timed sleep moves on, without waiting; not the one between polls."""
    clock, sleep = FakeClock(), WakeEvent.sleep
    monkeypatch.setattr(claiming, "POLL", 600.0)

    async def pass_time(self, seconds, hearing):
        if seconds is not None and seconds < 100:
            clock.advance(round(seconds * 1_000))
            seconds = 0
        return await sleep(self, seconds, hearing)

    monkeypatch.setattr(WakeEvent, "sleep", pass_time)
    return clock


def claim_times(storage, monkeypatch, clock):
    """Return when each job was claimed, in milliseconds from now on."""
    times, start, finish = {}, clock.monotonic(), storage.finish

    def timed(outcomes, then=None):
        finished = finish(outcomes, then)
        times.update((one.id, clock.monotonic() - start) for one in finished.claims.jobs)
        return finished

    monkeypatch.setattr(storage, "finish", timed)
    return times


def lose_again(storage, ids):
    """Claim stalled jobs, one by one, and lose them again."""
    request = ClaimRequest("lost", len(ids), frozenset({HANDLER}))
    claimed = [storage.claim(request).jobs[0] for _ in ids]
    storage.engine.clock.advance(claimed[0].lease + 1)
    assert storage.sweep().stalled == len(ids)
    storage.trips.clear()


def lost_jobs(storage, queue, many):
    """Ids of jobs that wait again after the loss of their worker."""
    ids = [queue.enqueue(name=HANDLER).id for _ in range(many)]
    claimed = storage.claim(ClaimRequest("lost", many, frozenset({HANDLER}))).jobs
    assert [one.id for one in claimed] == ids
    storage.engine.clock.advance(claimed[0].lease + 1)
    assert storage.sweep().stalled == many
    storage.trips.clear()
    return ids


@pytest.fixture
def clocked():
    """A storage that notes its round trips, on a fake clock, and a queue of it."""
    storage = RecordingStorage(clock=FakeClock())
    return storage, Queue("work", storage=storage)


async def turns_of_the_loop(storage, jobs):
    """Run so many short jobs; return how often the loop's other tasks ran between the first and the last."""
    queue = Queue("numbers", storage=storage)
    queue.enqueue_many(range(jobs), name=HANDLER)
    turns, is_done = 0, False
    at_jobs = []

    async def count_turns():
        nonlocal turns
        while not is_done:
            turns += 1
            await asyncio.sleep(0)

    async def handler(job):
        at_jobs.append(turns)

    counting = asyncio.create_task(count_turns())
    await work_off(storage, handler, concurrency=1, max_jobs=jobs)
    is_done = True
    await counting

    assert queue.counts()["completed"] == jobs
    return at_jobs[-1] - at_jobs[0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 has no eager tasks")
async def test_consecutive_short_jobs_run_without_a_turn_of_the_event_loop(monkeypatch):
    monkeypatch.setattr("djqueue.runtime.claiming.BURST", 60)

    assert await turns_of_the_loop(MemoryStorage(), 2_000) < 100


async def test_many_short_jobs_let_other_tasks_of_the_event_loop_run():
    assert await turns_of_the_loop(MemoryStorage(), 2_000) > 10


async def test_event_loop_runs_other_callbacks_after_each_long_synchronous_step():
    storage = MemoryStorage()
    queue = Queue("numbers", storage=storage)
    queue.enqueue_many(range(5), name=HANDLER)
    seen = []

    async def handler(job):
        asyncio.get_running_loop().call_soon(seen.append, "other")
        seen.append("job")
        until = time.monotonic() + 2 * claiming.BURST
        while time.monotonic() < until:
            pass

    await work_off(storage, handler, concurrency=1, max_jobs=5)

    assert seen == ["job", "other"] * 5
