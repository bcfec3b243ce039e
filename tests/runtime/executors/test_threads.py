"""The thread pool of sync handlers."""

import sys
import threading
import weakref

from djqueue.runtime.executors import threadpool as pool_module
from djqueue.runtime.executors.threadpool import ThreadPool
from tests.runtime.running import HANDLER, messages, reached, working
from tests.support import PATIENCE, eventually


def test_each_submitted_call_runs_once():
    pool = ThreadPool(4, "test")
    done: list[int] = []

    for number in range(5_000):
        pool.submit(done.append, number)
    eventually(lambda: len(done) == 5_000)
    pool.close()

    assert sorted(done) == list(range(5_000))


def test_calls_that_wait_for_each_other_run_concurrently():
    pool = ThreadPool(8, "test")
    together = threading.Barrier(9)

    for _ in range(8):
        pool.submit(lambda _: together.wait(PATIENCE), None)
    together.wait(PATIENCE)
    pool.close()


def test_thread_count_never_exceeds_the_limit():
    pool = ThreadPool(3, "test")
    go_on = threading.Event()
    names: set[str] = set()

    def work(_):
        names.add(threading.current_thread().name)
        go_on.wait(PATIENCE)

    for _ in range(20):
        pool.submit(work, None)
    eventually(lambda: len(names) == 3)
    go_on.set()
    pool.close()
    eventually(lambda: not live("test"))

    assert names == {"test-1", "test-2", "test-3"}


def test_calls_run_although_the_system_has_no_further_thread(monkeypatch):
    missing = []
    pool = ThreadPool(3, "test", on_starved=missing.append)
    go_on, busy = threading.Event(), threading.Event()
    done: list[str] = []

    def wait(_):
        busy.set()
        go_on.wait(PATIENCE)

    pool.submit(wait, None)
    busy.wait(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.submit(done.append, "needs a second thread")
        assert ["can't start new thread" in str(error) for error in missing] == [True]
    pool.wake()
    eventually(lambda: done == ["needs a second thread"])
    go_on.set()
    pool.submit(done.append, "after it")
    eventually(lambda: len(done) == 2)
    pool.close()


async def test_job_waits_while_the_system_has_no_thread_at_all(storage, queue, monkeypatch, caplog):
    monkeypatch.setattr("djqueue.runtime.executors.threads.RETRY", 0.01)
    tries, start = [], threading.Thread.start

    def start_late(thread):
        if thread.name.startswith("djqueue-job"):
            tries.append(thread)
            if len(tries) < 4:
                refuse(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    job_id = queue.enqueue(name=HANDLER).id

    async with working(storage, lambda job: "done"):
        await reached(queue, job_id, "completed")

    assert len(tries) == 4
    assert sum("cannot start a thread for its jobs" in line for line in messages(caplog)) == 1


def refuse(thread):
    raise RuntimeError("can't start new thread")


def test_short_calls_reuse_few_threads():
    pool = ThreadPool(100, "test")
    names: set[str] = set()
    done = []

    def work(number):
        names.add(threading.current_thread().name)
        done.append(number)

    for _ in range(50):
        for number in range(100):
            pool.submit(work, number)
        eventually(lambda: len(done) % 100 == 0)
    pool.close()

    assert len(names) < 20


def test_idle_thread_ends_and_a_new_thread_starts_when_needed(monkeypatch):
    monkeypatch.setattr(pool_module, "IDLE", 0.01)
    ended = []
    pool = ThreadPool(2, "test", on_exit=lambda: ended.append(threading.current_thread().name))
    done: list[int] = []

    for number in range(10):
        pool.submit(done.append, number)
        eventually(lambda n=number: len(ended) == n + 1)

    assert done == list(range(10))
    assert not live("test")


def test_call_submitted_while_a_thread_times_out_runs(monkeypatch):
    done: list[str] = []
    late = ["comes just after the time was over"]

    class Gate:
        """A lock that has a call come when somebody has waited long enough."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.release = self._lock.release

        def acquire(self, timeout: float = -1) -> bool:
            acquired = self._lock.acquire(timeout=-1 if timeout < 0 else 0)
            if not acquired and late:
                pool.submit(done.append, late.pop())
            return acquired

    plain = pool_module.Lock
    pool = ThreadPool(1, "test")
    monkeypatch.setattr(pool_module, "Lock", Gate)
    pool.submit(done.append, "first")

    eventually(lambda: len(done) == 2)
    monkeypatch.setattr(pool_module, "Lock", plain)
    pool.submit(done.append, "third")
    eventually(lambda: len(done) == 3)
    pool.close()

    assert done == ["first", "comes just after the time was over", "third"]


def test_call_submitted_while_the_only_thread_becomes_idle_runs():
    pool = ThreadPool(1, "test")
    done: list[int] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(3_000):
            pool.submit(done.append, number)
            if not spun(lambda n=number: len(done) > n):
                eventually(lambda n=number: len(done) > n)
    finally:
        sys.setswitchinterval(interval)
    pool.close()


def test_thread_that_takes_one_of_many_calls_wakes_the_next_thread():
    pool = ThreadPool(8, "test")
    together = threading.Barrier(9)
    for _ in range(8):
        pool.submit(lambda _: together.wait(PATIENCE), None)
    together.wait(PATIENCE)
    eventually(lambda: len(pool._idle) == 8)

    # All calls come before any thread has had its turn.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5)
    try:
        for _ in range(8):
            pool.submit(lambda _: together.wait(PATIENCE), None)
    finally:
        sys.setswitchinterval(interval)
    together.wait(PATIENCE)
    pool.close()


def test_closing_the_pool_lets_running_calls_end():
    pool = ThreadPool(1, "test")
    started, go_on = threading.Event(), threading.Event()
    done = []

    def work(_):
        started.set()
        go_on.wait(PATIENCE)
        done.append(True)

    pool.submit(work, None)
    pool.submit(done.append, "queued")
    assert started.wait(PATIENCE)
    pool.close()
    go_on.set()
    eventually(lambda: not live("test"))

    assert done == [True, "queued"]


def test_arguments_are_released_after_the_call():
    class Payload:
        pass

    pool = ThreadPool(1, "test")
    payload = Payload()
    reference = weakref.ref(payload)
    pool.submit(lambda _: None, payload)
    del payload

    eventually(lambda: reference() is None)
    pool.close()


def spun(predicate) -> bool:
    """Whether it becomes true while nothing but this is done: the next step follows at once."""
    return any(predicate() for _ in range(10_000))


def live(prefix: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(prefix)]


def test_calls_go_on_after_a_thread_ended_when_it_was_woken(monkeypatch):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    endings = [SystemExit("closed"), None]

    def end():
        if (error := endings.pop(0) if endings else None) is not None:
            raise error

    pool = ThreadPool(1, "test", on_wake=end)
    done: list[int] = []
    pool.submit(done.append, 1)
    eventually(lambda: pool._idle)

    for number in (2, 3):
        pool.submit(done.append, number)

    eventually(lambda: done == [1, 2, 3] and raised)
    pool.close()


def test_calls_go_on_after_a_thread_ended_before_its_first_call(monkeypatch):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def hook(*_):
        if threading.current_thread().name.startswith("test-"):
            raise RuntimeError("a hook for all threads")

    before = threading.gettrace(), threading.getprofile()
    pool = ThreadPool(1, "test")
    done: list[int] = []
    threading.settrace(hook)
    try:
        pool.submit(done.append, 1)
        eventually(lambda: pool._start.is_lost)
        pool.submit(done.append, 2)
        eventually(lambda: done == [1, 2] and raised)
    finally:
        threading.settrace(before[0])
        threading.setprofile(before[1])
        pool.close()
