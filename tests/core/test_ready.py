"""Waiting jobs of several names are taken in one common order."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.engine.joblists import Fifo, ReadyJobs
from tests.core.making import make_job

NAMES = ("a", "b", "c")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(NAMES), st.integers(-1, 1), st.booleans()),
        st.tuples(st.just("extend"), st.sampled_from(NAMES), st.integers(-1, 1), st.just(False)),
        st.tuples(st.just("pop"), st.frozensets(st.sampled_from(NAMES)), st.integers(1, 4), st.just(False)),
        st.tuples(st.just("remove"), st.just(""), st.integers(0, 100), st.just(False)),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_best_jobs_of_the_requested_names_come_first(steps):
    ready, model, number = ReadyJobs(), [], 0
    for verb, names, argument, front in steps:
        if verb == "push":
            number += 1
            job = make_job(name=names, priority=argument)
            ready.push(job, front=front)
            model.append((-argument, -number if front else number, job))
        elif verb == "extend":
            jobs = [make_job(name=names, priority=argument) for _ in range(2)]
            ready.extend(jobs, names, argument)
            model += [(-argument, number + at, job) for at, job in enumerate(jobs, 1)]
            number += 2
        elif verb == "pop":
            model.sort(key=lambda entry: entry[:2])
            taken = [entry for entry in model if entry[2].name in names][:argument]
            assert ready.pop(argument, names) == [job for _, _, job in taken]
            model = [entry for entry in model if entry not in taken]
        elif model:
            ready.remove(model.pop(argument % len(model))[2])
        present = [job.name for _, _, job in model]
        assert ready.size == len(model)
        assert ready.counts() == {name: present.count(name) for name in set(present)}
        for name in NAMES:
            assert ready.has(frozenset({name})) == (name in present)


def test_last_job_put_first_is_first_across_names():
    ready = ReadyJobs()
    for job_id, name in (("1", "a"), ("2", "b"), ("3", "a")):
        ready.push(make_job(job_id, name=name), front=True)

    assert [job.id for job in ready.pop(3, frozenset({"a", "b"}))] == ["3", "2", "1"]


def test_removed_ready_jobs_leave_nothing_behind():
    ready = ReadyJobs()
    ready.extend([], "a", 0)

    assert ready.counts() == {}


def test_jobs_with_unhandled_names_are_not_scanned():
    ready = ReadyJobs()
    ready.extend([make_job(name="unheard of") for _ in range(10_000)], "unheard of", 9)
    ready.push(make_job("mine", name="a"))
    queue = ready._by_name["unheard of"]
    del queue._fifos  # A look would fail.

    assert [job.id for job in ready.pop(5, frozenset({"a"}))] == ["mine"]
    assert ready.size == 10_000


class Indexed(deque):
    """Counts how often an entry is looked at."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)


def test_oldest_job_is_found_without_passing_the_same_removed_jobs_again():
    ready = ReadyJobs()
    jobs = [make_job(created_at=number) for number in range(1_000, 3_000)]
    ready.extend(jobs, "send", 0)
    for job in jobs[:300]:
        ready.remove(job)
    queue = ready._by_name["send"]
    [fifo] = queue._fifos.values()
    watched = queue._fifos[0] = Fifo(Indexed(fifo.generations), Indexed(fifo.jobs))

    assert ready.oldest_at() == 1_300
    passed = watched.jobs.looks
    assert ready.oldest_at() == 1_300
    assert (passed > 300, watched.jobs.looks - passed < 10) == (True, True)
    assert len(ready.pop(2_000, frozenset({"send"}))) == 1_700
