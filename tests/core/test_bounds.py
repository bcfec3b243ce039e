"""A great surplus is worked off in steps, while jobs go on."""

import threading

import pytest

from djqueue.core.engine import Engine, sweeper
from djqueue.core.job import Batch, ClaimRequest, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import Keep, KeepOfJob, KeepResults, Retention
from djqueue.core.states import State
from djqueue.testing.clock import FakeClock
from tests.core.anatomy import check_engine

JOBS = 10 * sweeper.SWEEP_LIMIT
KEPT = 100


def complete_many(engine, count, queue="q"):
    engine.enqueue([Batch(queue, "n", JobOptions(), [b"0123456789"] * count)])
    jobs = engine.claim(ClaimRequest("w", count, frozenset({"n"}), (queue,))).jobs
    engine.finish([Outcome(queue, job.id, job.token, "complete", b"0123456789") for job in jobs])


@pytest.mark.parametrize(
    "retention",
    [
        Retention(completed=Keep(count=KEPT)),
        Retention(completed=Keep(bytes=20 * KEPT)),
        Retention(results=KeepResults(bytes=10 * KEPT)),
    ],
)
def test_a_great_surplus_is_worked_off_in_steps_while_jobs_go_on(retention, monkeypatch):
    engine = Engine(clock=FakeClock(), policies={"q": QueuePolicy(retention=retention)}, cores=1)
    complete_many(engine, JOBS)
    taken = []
    forget = sweeper._forget

    def noting(*arguments):
        found = forget(*arguments)
        taken.append(found[0])
        return found

    monkeypatch.setattr(sweeper, "_forget", noting)
    steps, over = 0, threading.Event()

    def work():
        nonlocal steps
        while not over.is_set():
            complete_many(engine, 1, "other")
            steps += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            engine.sweep(60_000)
    finally:
        over.set()
        thread.join()

    results = sum(
        job.result is not None
        for job in engine.reads.jobs("q", list(engine.context.shard("q").queues["q"].jobs))
    )
    kept = JOBS if retention.results.bytes is not None else KEPT
    assert (engine.reads.counts("q")[State.COMPLETED], results) == (kept, KEPT)
    assert max(taken) <= sweeper.SWEEP_LIMIT
    assert len(taken) >= JOBS // sweeper.SWEEP_LIMIT
    assert steps > 10
    check_engine(engine)


def test_a_job_that_fails_again_and_again_leaves_nothing_that_grows():
    clock = FakeClock()
    kept = Retention(attempts=KeepOfJob(age=10**9))
    engine = Engine(clock=clock, policies={"q": QueuePolicy(retention=kept)}, cores=1)
    engine.enqueue([Batch("q", "n", JobOptions(), [b""], ["a"])])
    for _ in range(500):
        [job] = engine.claim(ClaimRequest("w", 1, frozenset({"n"}), ("q",))).jobs
        engine.finish([Outcome("q", job.id, job.token, "fail")])
        engine.jobs.retry("q", ["a"])
        clock.advance(1)

    assert len(engine.context.shard("q").queues["q"].finished._details._due) < 100
