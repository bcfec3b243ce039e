"""The reverse index of dependencies."""

from djqueue.core.dependencies import DependencyTracker
from tests.core.making import make_job

A, B = ("q", "a"), ("q", "b")


def test_dependents_come_in_the_order_in_which_they_were_added():
    tracker = DependencyTracker()
    jobs = [make_job() for _ in range(20)]
    for job in jobs:
        tracker.add(A, job)
    tracker.add(B, jobs[0])

    assert tracker.of(A) == jobs
    assert tracker.pop(A) == jobs
    assert tracker.pop(A) == []
    assert tracker.of(B) == jobs[:1]


def test_the_last_dependent_that_goes_takes_the_entry_with_it():
    tracker = DependencyTracker()
    one, two = make_job(), make_job()
    tracker.add(A, one)
    tracker.add(A, one)
    tracker.add(A, two)

    assert not tracker.let_go(A, one)
    assert tracker.of(A) == [two]
    assert not tracker.let_go(A, two)
    assert not tracker.let_go(B, two)

    assert len(tracker) == 0


def test_a_job_enqueued_again_under_its_id_is_another_dependent():
    tracker = DependencyTracker()
    old, new = make_job("same"), make_job("same")
    tracker.add(A, old)
    tracker.add(A, new)

    tracker.let_go(A, old)

    assert tracker.of(A) == [new]


def test_the_last_that_lets_go_of_a_record_says_so():
    tracker = DependencyTracker()
    one, two, late = make_job(), make_job(), make_job()
    tracker.add(A, one)
    tracker.add(A, two)

    assert tracker.keep(A) == [one, two]
    tracker.hold(A, late)
    tracker.hold(A, late)
    assert tracker.of(A) == tracker.keep(B) == []

    assert [tracker.let_go(A, job) for job in (one, one, late)] == [False] * 3
    assert tracker.let_go(A, two)
    assert not tracker.let_go(A, two)
    assert len(tracker) == 0


def test_nobody_holds_a_record_that_is_gone():
    tracker = DependencyTracker()
    tracker.hold(A, make_job())

    tracker.forget(A)
    tracker.forget(B)

    assert len(tracker) == 0
