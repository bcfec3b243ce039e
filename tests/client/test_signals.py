"""Signals: sent by the process that made the change, after it, and without affecting it."""

import asyncio
import threading
from contextlib import ExitStack, contextmanager

import pytest
from django.contrib.auth.models import User
from django.db import transaction

from djqueue import Queue, Worker, flow, job, signals
from djqueue.client import announcing
from djqueue.client.announcing import announcer
from djqueue.core.job import Incident
from djqueue.testing.factories import an_active_job, enqueue
from tests.support import PATIENCE, eventually


@contextmanager
def receiving(*names):
    """What the signals of these names say: (name, what it says)."""
    received = []
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(connected(signals.ALL[name], _noting(name, received)))
        yield received


def _noting(word, received):
    def receiver(sender, signal, **said):
        received.append((word, {"sender": sender, **said}))

    return receiver


@contextmanager
def connected(signal, receiver, **given):
    signal.connect(receiver, weak=False, **given)
    try:
        yield
    finally:
        signal.disconnect(receiver, **given)


@contextmanager
def working(**handlers):
    with Worker(handlers=handlers, concurrency=4, until_empty=True) as worker:
        assert worker.join(PATIENCE)
        yield worker


@pytest.fixture
def queue():
    return Queue("orders")


def words(received):
    return [word for word, _ in received]


# Producers.


def test_job_enqueued_signal_has_the_job_and_its_type(do):
    @job(name="tests.client.test_signals.pack", queue="orders", priority=3)
    def pack():
        return 1

    with receiving("job_enqueued") as received:
        result = do(pack, "enqueue")

    [(_, said)] = received
    assert (said["sender"], said["queue"], said["job_id"]) == (pack, "orders", result.id)
    assert said["name"] == pack.name
    assert said["options"].priority == 3


def test_job_enqueued_signal_is_sent_for_new_jobs_only(queue, do):
    queue.enqueue(id="b")
    with receiving("job_enqueued") as received:
        do(queue, "enqueue_many", [1, 2, 3], ids=["a", "b", "c"])

    assert [said["job_id"] for _, said in received] == ["a", "c"]
    assert received[0][1]["sender"] is None


def test_job_enqueued_signal_is_sent_for_jobs_of_a_flow(queue, do):
    first = queue.node(1)
    with receiving("job_enqueued") as received:
        result = do(flow(Queue("letters").node(2).after(first)), "enqueue")

    assert [(said["queue"], said["job_id"]) for _, said in received] == [
        ("orders", first.id),
        ("letters", result.ids[1]),
    ]


def test_job_enqueued_signal_is_sent_by_enqueue_and_wait(queue, do):
    with Worker(handlers={"orders": lambda job: 1}), receiving("job_enqueued") as received:
        assert do(queue, "enqueue_and_wait", 1, wait=PATIENCE) == 1

    assert words(received) == ["job_enqueued"]


def test_failing_signal_receiver_does_not_affect_enqueue(queue, do, caplog):
    def fail(**_):
        raise RuntimeError("no ears")

    with connected(signals.job_enqueued, fail), receiving("job_enqueued") as received:
        result = do(queue, "enqueue")

    assert result.status == "queued"
    assert words(received) == ["job_enqueued"]
    assert "no ears" in caplog.text


def test_signal_receiver_can_be_limited_to_one_job_type(queue):
    @job(name="tests.client.test_signals.pack", queue="orders")
    def pack():
        return 1

    received = []

    def receiver(**said):
        received.append(said["name"])

    with connected(signals.job_enqueued, receiver, sender=pack):
        queue.enqueue()
        pack.using(priority=1).enqueue()

    assert received == [pack.name]


def test_async_signal_receiver_is_awaited(queue):
    received = []

    async def receiver(**said):
        await asyncio.sleep(0)
        received.append(said["job_id"])

    with connected(signals.job_enqueued, receiver):
        asyncio.run(queue.aenqueue(id="a"))
        queue.enqueue(id="b")

    assert received == ["a", "b"]


# Workers.


def test_signals_report_start_and_completion_of_an_attempt(queue):
    queue.enqueue(id="a")
    with (
        receiving("job_started", "job_completed", "job_failed") as received,
        working(orders=lambda job: 1) as worker,
    ):
        pass

    assert words(received) == ["job_started", "job_completed"]
    for _, said in received:
        assert (said["queue"], said["job_id"], said["name"]) == ("orders", "a", "orders")
        assert (said["attempt"], said["worker"]) == (1, worker.id)
    assert received[1][1]["duration"] >= 0


def test_failed_attempts_are_retried_and_the_last_one_fails_the_job(queue):
    def fail(job):
        raise KeyError("price")

    queue.enqueue(id="a", max_attempts=2, backoff=0)
    names = ("job_retried", "job_failed", "job_completed")
    with receiving(*names) as received, working(orders=fail) as worker:
        pass

    assert words(received) == ["job_retried", "job_failed"]
    assert {said["error"].type for _, said in received} == {"builtins.KeyError"}
    assert [(said["attempt"], said["worker"]) for _, said in received] == [(1, worker.id), (2, worker.id)]
    assert received[0][1]["delay"] == 0
    assert received[1][1]["reason"] == "max_attempts_exceeded"


def test_worker_sends_job_cancelled_signal_for_active_job(queue):
    def stop(job):
        queue.cancel("a")
        assert job.cancelled.wait(PATIENCE)
        raise RuntimeError("stopped")

    queue.enqueue(id="a")
    with receiving("job_cancelled", "job_failed") as received, working(orders=stop):
        pass

    [(word, said)] = received
    assert (word, said["job_id"], said["reason"]) == ("job_cancelled", "a", "cancelled")


def test_signal_receivers_run_on_their_own_thread_without_event_loop(queue):
    seen = []

    def receiver(**said):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append(threading.current_thread().name)

    async def handle(job):
        return 1

    queue.enqueue()
    with connected(signals.job_started, receiver), working(orders=handle):
        pass

    assert seen == ["djqueue-signals"]
    eventually(lambda: "djqueue-signals" not in {thread.name for thread in threading.enumerate()})


def test_worker_stops_claiming_while_signal_receivers_are_behind(queue, monkeypatch):
    monkeypatch.setattr("djqueue.client.announcing.MAX_PENDING", 1)
    gate, entered = threading.Event(), threading.Event()

    def receiver(**said):
        entered.set()
        assert gate.wait(PATIENCE)

    queue.enqueue_many(range(50))
    with connected(signals.job_started, receiver):
        worker = Worker(handlers={"orders": lambda job: 1}, concurrency=2, until_empty=True)
        worker.start()
        assert entered.wait(PATIENCE)
        assert queue.counts()["waiting"] > 40
        gate.set()
        assert worker.join(PATIENCE)

    assert queue.counts()["completed"] == 50


# Storages.


def test_cancelling_process_sends_job_cancelled_signal(queue, do):
    queue.enqueue(id="a")
    with receiving("job_cancelled") as received:
        do(queue, "cancel", "a")
        assert announcer.flush(PATIENCE)

    [(_, said)] = received
    assert (said["queue"], said["job_id"], said["reason"]) == ("orders", "a", "cancelled")


def test_sweeping_process_sends_stalled_and_failed_signals(storage, monkeypatch):
    with receiving("job_stalled", "job_failed") as received:
        claimed = an_active_job(storage, max_stalls=0)
        gone = enqueue(storage, ttl=1)
        engine = storage.engine
        later, tick = engine.clock.now() + 3_600_000, engine.clock.monotonic() + 3_600_000
        ahead = Ahead(later, tick)
        monkeypatch.setattr(engine.context, "clock", ahead)
        storage.sweep()
        assert announcer.flush(PATIENCE)

    told = [(word, said["job_id"]) for word, said in received]
    assert told == [("job_stalled", claimed.id), ("job_failed", claimed.id), ("job_failed", gone)]
    assert [said["reason"] for _, said in received[1:]] == ["worker_lost", "ttl_expired"]
    assert {(said["attempt"], said["worker"]) for _, said in received[1:]} == {(0, "")}


class Ahead:
    """A clock that stands still, later."""

    def __init__(self, now, tick):
        self._now, self._tick = now, tick

    def now(self):
        return self._now

    def monotonic(self):
        return self._tick

    def elapsed(self):
        return self._tick


def test_signals_are_not_prepared_without_receivers(queue, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nobody listens")

    monkeypatch.setattr(announcer, "announce", refuse)
    monkeypatch.setattr("djqueue.client.announcing.enqueued", refuse)
    queue.enqueue(id="a")
    queue.enqueue(id="b")
    queue.cancel("b")
    with working(orders=lambda job: 1) as worker:
        pass

    assert worker.counters.completed == 1


def test_failure_that_no_worker_reports_is_logged(caplog):
    announcing.announce_incidents([Incident("emails", "a", "shop.send", "failed", "worker_lost")])

    assert "Job a (shop.send) of queue 'emails' failed permanently (worker_lost)." in caplog.messages


@pytest.mark.django_db(transaction=True)
def test_transaction_that_a_receiver_leaves_open_does_not_affect_later_receivers(caplog):
    counts = []

    def receiver(sender, signal, **said):
        counts.append(User.objects.count())
        if len(counts) == 1:
            transaction.atomic().__enter__()

    with connected(signals.job_cancelled, receiver):
        for _ in range(3):
            announcer.announce(signals.job_cancelled, "handler", reason="")
        assert announcer.flush(PATIENCE)

    assert counts == [0, 0, 0]
    [line] = [record.getMessage() for record in caplog.records if "transaction" in record.getMessage()]
    assert line == (
        "Code that djqueue has called has left a transaction of 'default' open; it has been rolled back."
    )
