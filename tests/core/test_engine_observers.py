"""Listeners and subscribers: their events, and isolation of their failures."""

import logging

import pytest

from djqueue.core.states import State
from tests.core.making import Bench


def told(events):
    return [(event.id, event.event, event.state) for event in events]


def test_subscriber_receives_each_transition_with_its_state():
    bench = Bench(lease=100)
    events = bench.events()
    bench.enqueue("a", delay=50)
    bench.engine.jobs.promote("q", ["a"])
    bench.finish(bench.claim_one(), "retry", delay=10)
    bench.sweep(10)
    bench.claim_one()
    bench.sweep(100)
    bench.finish(bench.claim_one())

    assert told(events) == [
        ("a", "enqueued", State.DELAYED),
        ("a", "promoted", State.WAITING),
        ("a", "started", State.ACTIVE),
        ("a", "retried", State.DELAYED),
        ("a", "promoted", State.WAITING),
        ("a", "started", State.ACTIVE),
        ("a", "stalled", State.WAITING),
        ("a", "started", State.ACTIVE),
        ("a", "completed", State.COMPLETED),
    ]
    assert {event.queue for event in events} == {"q"}
    assert events[-1].at == bench.clock.now()


def test_subscriber_of_one_job_receives_no_other():
    bench = Bench()
    heard = []
    unsubscribe = bench.engine.events.subscribe("q", heard.append, "a")
    bench.enqueue("a")
    bench.enqueue("b")
    bench.finish(bench.claim_one())

    assert [event.event for event in heard] == ["enqueued", "started", "completed"]
    unsubscribe()
    unsubscribe()
    bench.engine.jobs.remove("q", ["a"])
    assert len(heard) == 3
    assert not bench.engine.context.shard("q").subscribers
    assert not bench.engine.context.existing("q").observed


def test_unsubscribing_leaves_other_subscribers():
    bench = Bench()
    one, two = [], []
    leave = bench.engine.events.subscribe("q", one.append)
    bench.engine.events.subscribe("q", two.append)
    leave()
    bench.enqueue("a")

    assert (len(one), len(two)) == (0, 1)


def test_event_handler_can_call_the_engine():
    bench = Bench()
    seen = []

    def look(event):
        seen.append((event.event, bench.record(event.id).state))
        if event.event == "completed":
            bench.enqueue("next")

    bench.engine.events.subscribe("q", look)
    bench.enqueue("a")
    bench.finish(bench.claim_one())

    assert seen == [
        ("enqueued", State.WAITING),
        ("started", State.ACTIVE),
        ("completed", State.COMPLETED),
        ("enqueued", State.WAITING),
    ]


def test_failing_handler_affects_neither_the_operation_nor_other_handlers(caplog):
    bench = Bench()
    heard = []

    def fail(event):
        raise RuntimeError("of the handler")

    bench.engine.events.subscribe("q", fail)
    bench.engine.events.subscribe("q", heard.append)
    with caplog.at_level(logging.ERROR, "djqueue.engine"):
        bench.enqueue("a")
        assert bench.finish(bench.claim_one())

    assert [event.event for event in heard] == ["enqueued", "started", "completed"]
    assert len(caplog.records) == 3
    assert "of the handler" in caplog.text


def test_failing_listener_affects_neither_the_operation_nor_other_listeners(caplog):
    bench = Bench()
    woken = []

    def fail():
        raise RuntimeError("the loop is closed")

    bench.engine.listen(None, fail)
    bench.engine.listen(["q"], lambda: woken.append(1))
    with caplog.at_level(logging.ERROR, "djqueue.engine"):
        assert bench.enqueue("a").status == "queued"

    assert woken == [1]
    assert "the loop is closed" in caplog.text


def test_listener_is_woken_for_its_queues_only_until_removed():
    bench = Bench()
    mine, every = [], []
    leave = bench.engine.listen(["q"], lambda: mine.append(1))
    bench.engine.listen(None, lambda: every.append(1))
    bench.enqueue("a")
    bench.enqueue("a", queue="other")
    assert (len(mine), len(every)) == (1, 2)

    leave()
    leave()
    bench.enqueue("b")
    assert (len(mine), len(every)) == (1, 3)


WAKING = {
    "enqueue": lambda bench: bench.enqueue("new"),
    "enqueue later": lambda bench: bench.enqueue("new", delay=5),
    "promote": lambda bench: bench.engine.jobs.promote("q", ["late"]),
    "reschedule": lambda bench: bench.engine.jobs.reschedule("q", ["late"], 0),
    "retry": lambda bench: bench.finish(bench.running, "retry"),
    "release": lambda bench: bench.finish(bench.running, "release"),
    "retry a dead letter": lambda bench: bench.engine.jobs.retry("q", ["dead"]),
    "resume": lambda bench: bench.engine.queues.resume("q"),
    "limits": lambda bench: bench.engine.queues.set_limits("q", None, 9),
    "a lost lease": lambda bench: bench.sweep(30_000),
    "due": lambda bench: bench.sweep(100),
}


@pytest.mark.parametrize("act", WAKING.values(), ids=WAKING.keys())
def test_every_operation_that_makes_jobs_ready_wakes_workers(act):
    bench = Bench()
    bench.fail("dead")
    bench.enqueue("running")
    bench.running = bench.claim_one()
    bench.enqueue("late", delay=100)
    woken = []
    bench.engine.listen(["q"], lambda: woken.append(1))
    act(bench)

    assert woken
