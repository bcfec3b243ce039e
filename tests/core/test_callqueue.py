"""The thread that calls the project's code."""

import threading

from djqueue.core import callqueue
from djqueue.core.callqueue import CallQueue
from tests.support import PATIENCE, eventually


def make(limit=100):
    errors, dropped = [], []
    return CallQueue("djqueue-calls", limit, on_error=errors.append, on_drop=dropped.append), errors, dropped


def test_functions_are_called_in_order_on_one_thread():
    queue, errors, _ = make()
    called = []

    for number in range(50):
        queue.put(lambda n=number: called.append((n, threading.current_thread().name)))

    assert queue.flush(PATIENCE)
    assert called == [(number, "djqueue-calls") for number in range(50)]
    assert errors == []


def test_function_that_raises_anything_does_not_stop_those_after_it():
    queue, errors, _ = make()
    called = []

    def refuse():
        raise SystemExit(3)

    queue.put(refuse)
    queue.put(lambda: called.append("after"))

    assert queue.flush(PATIENCE)
    assert called == ["after"]
    assert [type(error) for error in errors] == [SystemExit]


def test_functions_above_the_limit_are_dropped_and_counted():
    queue, _, dropped = make(limit=2)
    go_on, called = threading.Event(), []
    queue.put(lambda: go_on.wait(PATIENCE))
    eventually(lambda: not len(queue))

    for number in range(5):
        queue.put(lambda n=number: called.append(n))
    go_on.set()

    assert queue.flush(PATIENCE)
    assert called == [0, 1]
    assert dropped == [3]


def test_thread_that_cannot_start_is_started_by_the_next_call(monkeypatch):
    queue, errors, _ = make()
    called = []

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(callqueue.Thread, "start", refuse)
        queue.put(lambda: called.append("first"))
        assert not queue.flush(0)
    queue.put(lambda: called.append("second"))

    assert queue.flush(PATIENCE)
    assert called == ["first", "second"]
    assert ["can't start new thread" in str(error) for error in errors] == [True]


def test_idle_thread_ends_and_releases_what_it_used(monkeypatch):
    monkeypatch.setattr(callqueue, "IDLE", 0.01)
    queue, _, _ = make()
    released = threading.Event()
    queue.idle = released.set

    queue.put(lambda: None)

    assert released.wait(PATIENCE)
    eventually(lambda: "djqueue-calls" not in [thread.name for thread in threading.enumerate()])
