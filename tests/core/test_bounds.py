"""Sweeps of large surpluses, and records of jobs that fail often, stay bounded."""

import pytest

from djqueue.core.engine import Engine, sweeper
from djqueue.core.engine.settlement import Settlement
from djqueue.core.job import Batch, ClaimRequest, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.policies import Keep, KeepOfJob, KeepResults, QueuePolicy, Retention
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
def test_sweep_removes_large_surplus_in_steps_between_which_other_jobs_run(retention, monkeypatch):
    engine = Engine(clock=FakeClock(), policies={"q": QueuePolicy(retention=retention)}, cores=1)
    complete_many(engine, JOBS)
    removed, steps = [], 0
    forget, settle = sweeper._forget, Settlement.settle

    def forget_noting(*arguments):
        found = forget(*arguments)
        removed.append(found[0])
        return found

    def complete_between_steps(settlement, changes):
        nonlocal steps
        settle(settlement, changes)
        assert not engine.context.shard("other").lock.locked()
        with monkeypatch.context() as inner:
            inner.setattr(Settlement, "settle", settle)
            complete_many(engine, 1, "other")
        steps += 1

    monkeypatch.setattr(sweeper, "_forget", forget_noting)
    monkeypatch.setattr(Settlement, "settle", complete_between_steps)
    engine.sweep(60_000)

    results = sum(
        job.result is not None
        for job in engine.reads.jobs("q", list(engine.context.shard("q").queues["q"].jobs))
    )
    kept = JOBS if retention.results.bytes is not None else KEPT
    assert (engine.reads.counts("q")[State.COMPLETED], results) == (kept, KEPT)
    assert max(removed) <= sweeper.SWEEP_LIMIT
    assert steps >= len(removed) >= JOBS // sweeper.SWEEP_LIMIT
    check_engine(engine)


def test_details_of_a_job_that_fails_repeatedly_stay_bounded():
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
