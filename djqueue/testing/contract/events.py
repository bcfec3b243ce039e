"""Events: subscribers receive every transition, listeners wake for every job that may be claimable."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Event
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    NAME,
    QUEUE,
    UPSTREAM,
    a_blocked_job,
    a_delayed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    finish,
    job,
    releasing,
    report_of,
    retrying,
    state,
)
from ..waiting import Recorder, Wakes
from .case import SOON, StorageCase, recorded, so_far

Doing = Callable[[], object]
Prepare = Callable[["EventsContract", Storage], Doing]


def an_enqueue(_: "EventsContract", storage: Storage) -> Doing:
    """A new job."""
    return lambda: enqueue(storage)


def an_enqueue_of_an_id(_: "EventsContract", storage: Storage) -> Doing:
    """A new job with a given id."""
    return lambda: enqueue(storage, id="order:1")


def a_delayed_enqueue(_: "EventsContract", storage: Storage) -> Doing:
    """A delayed job: a worker that sleeps until a known time must check again."""
    return lambda: enqueue(storage, delay=SOON)


def a_promotion(_: "EventsContract", storage: Storage) -> Doing:
    """A delayed job promoted."""
    job_id = a_delayed_job(storage)
    return lambda: storage.jobs.promote(QUEUE, [job_id])


def an_earlier_time(case: "EventsContract", storage: Storage) -> Doing:
    """A delayed job that is rescheduled to an earlier time."""
    job_id = a_delayed_job(storage)
    at = case.now(storage) + SOON
    return lambda: storage.jobs.reschedule(QUEUE, [job_id], at)


def a_time_that_has_come(case: "EventsContract", storage: Storage) -> Doing:
    """A delayed job that is due, found by a sweep."""
    enqueue(storage, delay=SOON)
    case.advance(SOON + 1)
    return storage.sweep


def a_retry(_: "EventsContract", storage: Storage) -> Doing:
    """A failed attempt, with attempts left."""
    claimed = an_active_job(storage)
    return lambda: finish(storage, retrying(claimed))


def a_retry_with_a_wait(_: "EventsContract", storage: Storage) -> Doing:
    """A failed attempt, with a backoff."""
    claimed = an_active_job(storage)
    return lambda: finish(storage, retrying(claimed, SOON))


def a_release(_: "EventsContract", storage: Storage) -> Doing:
    """A released job."""
    claimed = an_active_job(storage)
    return lambda: finish(storage, releasing(claimed))


def a_stall(case: "EventsContract", storage: Storage) -> Doing:
    """An expired lease, found by a sweep."""
    claimed = an_active_job(storage)
    case.advance(claimed.lease + 1)
    return storage.sweep


def a_retried_dead_letter(_: "EventsContract", storage: Storage) -> Doing:
    """A dead letter retried."""
    job_id = a_failed_job(storage)
    return lambda: storage.jobs.retry(QUEUE, [job_id])


def a_resume(_: "EventsContract", storage: Storage) -> Doing:
    """The end of a pause."""
    storage.queues.pause(QUEUE)
    enqueue(storage)
    return lambda: storage.queues.resume(QUEUE)


def a_hold_released(_: "EventsContract", storage: Storage) -> Doing:
    """The end of a hold."""
    storage.queues.hold(QUEUE, NAME, None, "")
    enqueue(storage)
    return lambda: storage.queues.release(QUEUE, NAME)


def a_dependency_met(_: "EventsContract", storage: Storage) -> Doing:
    """The end of a blocked job's dependency in another queue."""
    a_blocked_job(storage)
    claimed = claim_one(storage, queues=[UPSTREAM])
    return lambda: finish(storage, completing(claimed))


def a_group_freed(_: "EventsContract", storage: Storage) -> Doing:
    """The end of an attempt whose group has another job."""
    enqueue_many(storage, 2, concurrency_key="g")
    claimed = claim_one(storage)
    return lambda: finish(storage, completing(claimed))


def a_groups_head_cancelled(_: "EventsContract", storage: Storage) -> Doing:
    """The end of a waiting job whose group has another job, with another name."""
    first = enqueue(storage, concurrency_key="g", name="unhandled")
    enqueue(storage, concurrency_key="g")
    return lambda: storage.jobs.cancel(QUEUE, [first])


def a_place_freed(_: "EventsContract", storage: Storage) -> Doing:
    """The end of an attempt in a queue that was at its limit."""
    storage.queues.set_limits(QUEUE, None, 1)
    enqueue_many(storage, 2)
    claimed = claim_one(storage)
    return lambda: finish(storage, completing(claimed))


def a_limit_raised(_: "EventsContract", storage: Storage) -> Doing:
    """A higher limit for a queue that was at its limit."""
    storage.queues.set_limits(QUEUE, None, 1)
    enqueue_many(storage, 2)
    claim_one(storage)
    return lambda: storage.queues.set_limits(QUEUE, None, 2)


WAKING: list[Prepare] = [
    an_enqueue,
    an_enqueue_of_an_id,
    a_delayed_enqueue,
    a_promotion,
    an_earlier_time,
    a_time_that_has_come,
    a_retry,
    a_retry_with_a_wait,
    a_release,
    a_stall,
    a_retried_dead_letter,
    a_resume,
    a_hold_released,
    a_dependency_met,
    a_group_freed,
    a_groups_head_cancelled,
    a_place_freed,
    a_limit_raised,
]
"""Everything that may make a job claimable."""


class EventsContract(StorageCase):
    """Cases about events and wake-ups."""

    def test_job_events_are_sent_in_order(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            job_id = enqueue(storage, name="pay", delay=SOON)
            storage.jobs.promote(QUEUE, [job_id])
            claimed = claim_one(storage, names=["pay"])
            storage.report([report_of(claimed, 50)])
            finish(storage, retrying(claimed))
            claimed = claim_one(storage, names=["pay"])
            finish(storage, completing(claimed))
            events = so_far(storage, recorder)

        assert [(event.event, event.state) for event in events] == [
            ("enqueued", State.DELAYED),
            ("promoted", State.WAITING),
            ("started", State.ACTIVE),
            ("progress", State.ACTIVE),
            ("retried", State.WAITING),
            ("started", State.ACTIVE),
            ("completed", State.COMPLETED),
        ]
        assert {(event.queue, event.id, event.name) for event in events} == {(QUEUE, job_id, "pay")}
        times = [event.at for event in events]
        assert times == sorted(times)
        assert times[0] == job(storage, job_id).created_at

    def test_each_job_of_a_batch_sends_events(self, storage: Storage) -> None:
        with recorded(storage) as recorder:
            ids = enqueue_many(storage, 500)
            claim(storage, 500)
            events = so_far(storage, recorder)

        assert [event.id for event in events if event.event == "enqueued"] == ids
        assert {event.id for event in events if event.event == "started"} == set(ids)
        assert len(events) == 1_000

    def test_duplicates_send_no_events(self, storage: Storage) -> None:
        enqueue(storage, id="a", unique_key="k")

        with recorded(storage) as recorder:
            storage.enqueue([batch(ids=[job_id], unique_key="k") for job_id in "ab"])

            assert so_far(storage, recorder) == []

    def test_queue_subscriber_receives_only_events_of_its_queue(self, storage: Storage) -> None:
        with recorded(storage, "left") as left, recorded(storage, "right") as right:
            enqueue(storage, queue="left", id="same")
            enqueue(storage, queue="right", id="same")

            assert [event.queue for event in so_far(storage, left, "left")] == ["left"]
            assert [event.queue for event in so_far(storage, right, "right")] == ["right"]

    def test_job_subscriber_receives_only_events_of_its_job(self, storage: Storage) -> None:
        with recorded(storage, job_id="b") as one, recorded(storage) as everything:
            enqueue_many(storage, 3, ids=["a", "b", "c"])
            finish(storage, *map(completing, claim(storage, 3)))
            one.until("completed", "b")
            so_far(storage, everything)

        assert {event.id for event in one.events()} == {"b"}
        assert one.words() == ["enqueued", "started", "completed"]

    def test_subscription_can_precede_its_queue_and_job(self, storage: Storage) -> None:
        with recorded(storage, "not yet", job_id="not:yet") as recorder:
            enqueue(storage, queue="not yet", id="not:yet")

            assert recorder.until("enqueued").id == "not:yet"

    def test_no_events_arrive_after_unsubscribing(self, storage: Storage) -> None:
        left, stays, of_one = Recorder(), Recorder(), Recorder()
        unsubscribe = storage.events.subscribe(QUEUE, left)
        unsubscribe_one = storage.events.subscribe(QUEUE, of_one, "a")
        storage.events.subscribe(QUEUE, stays)
        enqueue(storage, id="a")
        left.until("enqueued", "a")
        of_one.until("enqueued", "a")
        so_far(storage, stays)

        for stop in (unsubscribe, unsubscribe_one, unsubscribe):
            stop()
        before = len(left.events()), len(of_one.events())
        storage.jobs.cancel(QUEUE, ["a"])
        enqueue(storage, id="b")
        so_far(storage, stays)

        assert (len(left.events()), len(of_one.events())) == before
        assert "cancelled" in stays.words("a")

    def test_two_subscriptions_of_one_handler_are_independent(self, storage: Storage) -> None:
        recorder, fence = Recorder(), Recorder()
        first = storage.events.subscribe(QUEUE, recorder)
        storage.events.subscribe(QUEUE, recorder)
        storage.events.subscribe(QUEUE, fence)
        first()
        first()

        enqueue(storage, id="a")
        so_far(storage, fence)

        assert recorder.words("a") == ["enqueued"]

    def test_failing_subscriber_does_not_affect_operations(
        self, storage: Storage, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(event: Event) -> None:
            raise RuntimeError(f"cannot take {event.event}")

        storage.events.subscribe(QUEUE, broken)
        with recorded(storage) as recorder:
            claimed = an_active_job(storage)
            assert finish(storage, completing(claimed)) == [True]
            recorder.until("completed", claimed.id)

        assert state(storage, claimed.id) is State.COMPLETED
        assert "cannot take" in caplog.text

    def test_subscriber_can_use_the_storage(self, storage: Storage) -> None:
        def follow_up(event: Event) -> None:
            if event.event == "completed" and event.id == "first":
                enqueue(storage, id="second")

        storage.events.subscribe(QUEUE, follow_up)
        with recorded(storage) as recorder:
            finish(storage, completing(an_active_job(storage, id="first")))
            recorder.until("enqueued", "second")

        assert claim_one(storage).id == "second"

    def test_job_state_is_readable_when_its_event_arrives(self, storage: Storage) -> None:
        seen: list[tuple[str, State | None]] = []

        def look(event: Event) -> None:
            seen.append((event.event, storage.reads.states(QUEUE, [event.id])[0]))

        storage.events.subscribe(QUEUE, look)
        with recorded(storage) as recorder:
            a_failed_job(storage, id="dead")
            recorder.until("failed", "dead")

        assert ("failed", State.FAILED) in seen

    # Listeners.

    @pytest.mark.parametrize("prepare", WAKING, ids=lambda prepare: prepare.__name__)
    def test_operations_that_make_jobs_claimable_wake_listeners(
        self, storage: Storage, prepare: Prepare
    ) -> None:
        doing = prepare(self, storage)
        of_the_queue, of_all = Wakes(), Wakes()
        stops = [storage.listen([QUEUE, "other"], of_the_queue), storage.listen(None, of_all)]

        doing()

        assert of_the_queue.arrived()
        assert of_all.arrived()
        for stop in stops:
            stop()

    def test_listener_is_not_woken_by_other_queues(self, storage: Storage) -> None:
        other, own = Wakes(), Wakes()
        storage.listen(["other"], other)
        storage.listen([QUEUE], own)

        enqueue(storage)
        assert own.arrived()
        assert other.count == 0

    def test_stopped_listener_is_not_woken(self, storage: Storage) -> None:
        left, stays = Wakes(), Wakes()
        stop = storage.listen([QUEUE], left)
        storage.listen([QUEUE], stays)
        stop()
        stop()

        enqueue(storage)

        assert stays.arrived()
        assert left.count == 0

    def test_job_is_claimable_when_its_listener_is_woken(self, storage: Storage) -> None:
        """A lost wake-up: it arrives before the job is claimable, and no other follows."""
        wakes = Wakes()
        storage.listen([QUEUE], wakes)

        for _ in range(50):
            wakes.forget()
            job_id = enqueue(storage)
            assert wakes.arrived()
            assert claim_one(storage).id == job_id
