"""Retention of ended jobs, each independent of the others."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.engine.finished import FinishedJobs
from djqueue.core.policies import Keep, Retention
from djqueue.core.states import State
from tests.core.making import make_job


def ended(at, **options):
    job = make_job(**options)
    job.state, job.finished_at, job.result = State.COMPLETED, at, b"done"
    return job


def take(finished, now, limit=1_000):
    jobs = finished.expired(now, limit)
    for job in jobs:
        finished.remove(job)
    return jobs


def test_short_retention_does_not_shorten_a_longer_one():
    finished = FinishedJobs()
    long, short = ended(0, result_ttl=3_600_000), ended(0, result_ttl=300)
    finished.add(long)
    finished.add(short)

    assert take(finished, 900) == [short]
    assert take(finished, 3_599_999) == []
    assert take(finished, 3_600_000) == [long]
    assert not finished._records


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([5, 50, 200, None]), st.booleans()), max_size=80)
)
@settings(max_examples=80, deadline=None)
def test_ended_jobs_expire_exactly_on_time(steps):
    finished, there, now = FinishedJobs(), [], 1_000
    for elapsed, kept, removed in steps:
        now += elapsed
        due = {job for job in there if job.options.result_ttl is not None and gone_at(job) <= now}
        assert set(take(finished, now)) == due
        there = [job for job in there if job not in due]
        if removed and there:
            finished.remove(there.pop(0))
        job = ended(now, result_ttl=kept)
        finished.add(job)
        there.append(job)
        assert finished.completed == len(there)


def gone_at(job):
    return job.finished_at + job.options.result_ttl


def test_early_removed_jobs_leave_nothing_behind():
    finished = FinishedJobs()
    jobs = [ended(0, result_ttl=10, retention=1_000) for _ in range(1_000)]
    for job in jobs:
        finished.add(job)
    for job in jobs[:950]:
        finished.remove(job)

    assert sum(map(len, finished._records.values())) < 100
    assert sum(map(len, finished._results.values())) < 100
    assert take(finished, 1_000) == jobs[950:]
    assert finished._stale == finished._size == 0


def test_removed_job_does_not_delay_others_when_the_clock_is_set_back():
    finished = FinishedJobs()
    early, late, other = (
        ended(10_000, result_ttl=100),
        ended(5_000, result_ttl=100),
        ended(0, result_ttl=None),
    )
    for job in (early, other, late):
        finished.add(job)
    finished.remove(early)

    assert take(finished, 5_100) == [late]


def test_result_is_dropped_while_its_record_is_kept():
    finished = FinishedJobs()
    job = ended(0, result_ttl=100, retention=1_000)
    finished.add(job)

    finished.drop_results(99, 10)
    assert job.result == b"done"
    finished.drop_results(100, 10)
    assert job.result is None
    assert take(finished, 999) == []
    assert take(finished, 1_000) == [job]


def test_record_is_kept_at_least_as_long_as_its_result():
    finished = FinishedJobs()
    job = ended(0, result_ttl=1_000, retention=10)
    finished.add(job)

    assert take(finished, 999) == []
    assert take(finished, 1_000) == [job]


def test_sweep_removes_no_more_than_its_limit():
    finished = FinishedJobs()
    for _ in range(5):
        finished.add(ended(0, result_ttl=1))

    assert [len(take(finished, 10, 2)) for _ in range(4)] == [2, 2, 1, 0]


def test_surplus_records_are_removed_by_earliest_expiry():
    finished = FinishedJobs(retention=Retention(completed=Keep(count=2)))
    jobs = {kept: ended(0, result_ttl=kept) for kept in (None, 50, 500, 5_000)}
    for job in jobs.values():
        finished.add(job)
    cancelled = ended(0, result_ttl=1)
    cancelled.state = State.CANCELLED
    finished.add(cancelled)

    assert finished.surplus(1) == [jobs[50]]
    finished.remove(jobs[50])
    assert finished.surplus(10) == [jobs[500]]
    finished.remove(jobs[500])
    assert finished.surplus(10) == []
    assert set(take(finished, 10_000)) == {cancelled, jobs[5_000]}
    assert (finished._size, finished._stale, finished.completed) == (1, 0, 1)


def test_maximum_age_only_shortens_retention():
    finished = FinishedJobs(retention=Retention(completed=Keep(age=100)))
    jobs = [ended(0, result_ttl=kept) for kept in (None, 50, 500)]
    for job in jobs:
        finished.add(job)

    assert take(finished, 50) == [jobs[1]]
    assert take(finished, 99) == []
    assert take(finished, 100) == [jobs[0], jobs[2]]
