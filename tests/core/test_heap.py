"""The priority queue compared with a sorted list, with removals."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.engine.joblists import COMPACT_ABOVE, COMPACT_FROM, PriorityQueue
from tests.core.making import make_job

steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2)),
        st.tuples(st.just("front"), st.integers(-2, 2)),
        st.tuples(st.just("extend"), st.integers(-2, 2)),
        st.tuples(st.just("pop"), st.integers(0, 4)),
        st.tuples(st.just("remove"), st.integers(0, 1_000)),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_jobs_come_by_priority_then_arrival(steps):
    queue, model, number = PriorityQueue(), [], 0
    for verb, argument in steps:
        if verb in ("push", "front"):
            number += 1
            job = make_job(priority=argument)
            job.generation = -number if verb == "front" else number
            queue.push(job, front=verb == "front")
            model.append((-argument, job.generation, job))
        elif verb == "extend":
            jobs = [make_job(priority=argument) for _ in range(3)]
            queue.extend(jobs, number + 1, argument)
            assert [job.generation for job in jobs] == [number + 1, number + 2, number + 3]
            number += 3
            model += [(-argument, job.generation, job) for job in jobs]
        elif verb == "pop":
            model.sort(key=lambda entry: entry[:2])
            assert queue.pop(argument) == [job for _, _, job in model[:argument]]
            assert all(job.generation == 0 for _, _, job in model[:argument])
            del model[:argument]
        elif model:
            entry = model.pop(argument % len(model))
            queue.remove(entry[2])
            assert entry[2].generation == 0
        assert queue.size == len(model)
        best = min(model, key=lambda entry: entry[:2], default=None)
        assert queue.head() == (None if best is None else best[:2])
    model.sort(key=lambda entry: entry[:2])
    assert queue.pop(1_000) == [job for _, _, job in model]
    assert not queue._fifos
    assert not queue._order
    assert queue._stale == 0


@given(st.lists(st.integers(0, 10_000), max_size=400), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_stale_entries_are_removed_above_a_fifth(picks, priorities):
    queue = PriorityQueue()
    jobs = []
    for number in range(1, 401):
        job = make_job(priority=number % priorities)
        job.generation = number
        queue.push(job)
        jobs.append(job)
    for pick in picks:
        queue.remove(jobs.pop(pick % len(jobs)))
        entries = sum(len(fifo.jobs) for fifo in queue._fifos.values())
        assert entries == queue.size + queue._stale
        assert entries < COMPACT_FROM or queue._stale <= entries * COMPACT_ABOVE
    assert queue.pop(400) == sorted(jobs, key=lambda job: (-job.options.priority, number_of(job)))


def number_of(job):
    return int(job.id.removeprefix("job-"))


def test_unused_priority_is_removed():
    queue = PriorityQueue()
    for number in range(1, 2_001):
        job = make_job(priority=number)
        job.generation = number
        queue.push(job)
        assert queue.pop(1) == [job]

    assert not queue._fifos
    assert not queue._order
