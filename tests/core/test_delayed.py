"""Delayed jobs against a sorted list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.engine.joblists import COMPACT_ABOVE, COMPACT_FROM, DelayedJobs, ReadyJobs
from tests.core.making import make_job

steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 30), st.none()),
        st.tuples(st.just("due"), st.integers(0, 30), st.sampled_from([None, None, 2])),
        st.tuples(st.just("remove"), st.integers(0, 100), st.none()),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_delayed_jobs_come_by_time_then_by_arrival(steps):
    delayed, model = DelayedJobs(), []
    for verb, argument, limit in steps:
        if verb == "push":
            job = make_job(run_at=argument)
            delayed.push(job)
            model.append(job)
        elif verb == "due":
            due = sorted((job for job in model if job.run_at <= argument), key=lambda job: job.run_at)
            assert delayed.pop_due(argument, limit) == due[:limit]
            model = [job for job in model if job not in due[:limit]]
        elif model:
            delayed.remove(model.pop(argument % len(model)))
        assert delayed.size == len(model)
        assert delayed.next_due() == min((job.run_at for job in model), default=None)


def test_stale_entries_are_removed_above_a_fifth():
    delayed = DelayedJobs()
    jobs = [make_job(run_at=number) for number in range(1_000)]
    for job in jobs:
        delayed.push(job)
    for job in jobs[100:]:
        delayed.remove(job)
        stale = len(delayed._heap) - delayed.size
        assert len(delayed._heap) < COMPACT_FROM or stale <= len(delayed._heap) * COMPACT_ABOVE

    assert delayed.pop_due(1_000) == jobs[:100]
    assert not delayed._heap


def test_stale_delayed_entry_does_not_count_as_a_ready_job():
    delayed, ready = DelayedJobs(), ReadyJobs()
    job = make_job(run_at=5)
    delayed.push(job)
    delayed.remove(job)
    ready.push(job)

    assert delayed.next_due() is None
    assert delayed.pop_due(10) == []
    assert ready.pop(1, frozenset({"send"})) == [job]


def test_entry_of_a_job_moved_to_another_queue_stays_stale():
    for first, second in ((DelayedJobs(), DelayedJobs()), (ReadyJobs(), ReadyJobs())):
        job, other = make_job(run_at=5), make_job(run_at=6)
        for one in (job, other):
            first.push(one)
        first.remove(job)
        second.push(job)

        taken = first.pop_due(10) if isinstance(first, DelayedJobs) else first.pop(2, frozenset({"send"}))
        assert taken == [other]
