"""The reverse index of dependencies."""

from djqueue.core.engine.indexes import DependencyTracker
from tests.core.making import make_job

A, B = ("q", "a"), ("q", "b")


def test_dependents_keep_the_order_in_which_they_were_added():
    tracker = DependencyTracker()
    jobs = [make_job() for _ in range(20)]
    for job in jobs:
        tracker.add(A, job)
    tracker.add(B, jobs[0])

    assert tracker.of(A) == jobs
    assert tracker.pop(A) == jobs
    assert tracker.pop(A) == []
    assert tracker.of(B) == jobs[:1]


def test_removing_the_last_dependent_removes_the_entry():
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


def test_job_enqueued_again_with_its_id_is_a_new_dependent():
    tracker = DependencyTracker()
    old, new = make_job("same"), make_job("same")
    tracker.add(A, old)
    tracker.add(A, new)

    tracker.let_go(A, old)

    assert tracker.of(A) == [new]


def test_releasing_the_last_hold_on_a_record_is_reported():
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


def test_removed_record_has_no_holds():
    tracker = DependencyTracker()
    tracker.hold(A, make_job())

    tracker.forget(A)
    tracker.forget(B)

    assert len(tracker) == 0
