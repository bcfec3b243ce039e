"""Tests of the conformance suite itself and its tools."""

import logging
from contextlib import closing
from queue import SimpleQueue
from threading import Event as ThreadEvent
from threading import Thread

import pytest

from djqueue.core.engine import EngineEvents
from djqueue.core.job import Event
from djqueue.core.states import State
from djqueue.storage.memory import MemoryStorage
from djqueue.testing import waiting
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import (
    POLICIES,
    CancellingContract,
    ClaimsContract,
    DelayedContract,
    EventsContract,
    OutcomesContract,
    ResultsContract,
    StallsContract,
    StorageCase,
    StorageContract,
    TransitionTableContract,
)
from djqueue.testing.contract.transitions import TransitionLog, marks_of, shows
from djqueue.testing.factories import JOB_IN, enqueue, state
from djqueue.testing.waiting import Recorder, Wakes, together

logger = logging.getLogger(__name__)


class LateStorage(MemoryStorage):
    """Tells of everything from a thread of its own, a little later: as storages over a network do."""

    def __init__(self, **given):
        super().__init__(**given)
        self._news = SimpleQueue()
        self._thread = Thread(target=self._deliver)
        self._thread.start()
        self.events = LateEvents(self)

    def close(self):
        self._news.put(None)
        self._thread.join()

    def listen(self, queues, wake):
        return self.later(wake, lambda late: super(LateStorage, self).listen(queues, late))

    def later(self, handler, subscribe):
        subscribed = ThreadEvent()
        subscribed.set()
        stop = subscribe(lambda *news: self._news.put((subscribed, handler, news)))

        def unsubscribe():
            subscribed.clear()
            stop()

        return unsubscribe

    def _deliver(self):
        while (entry := self._news.get()) is not None:
            subscribed, handler, news = entry
            ThreadEvent().wait(0.0005)
            try:
                if subscribed.is_set():
                    handler(*news)
            except RuntimeError as error:
                logger.warning("a handler failed: %s", error)


class LateEvents(EngineEvents):
    """Events, told by the storage's thread."""

    def __init__(self, storage):
        super().__init__(storage.engine.context)
        self._storage = storage

    def subscribe(self, queue, handler, job_id=None):
        told = super().subscribe
        return self._storage.later(handler, lambda late: told(queue, late, job_id))


class TestWithEventsFromAnotherThread(
    EventsContract,
    ClaimsContract,
    OutcomesContract,
    StallsContract,
    ResultsContract,
    CancellingContract,
    DelayedContract,
):
    """These parts look at events."""

    @pytest.fixture
    def storage(self):
        self.clock = FakeClock()
        with closing(LateStorage(clock=self.clock, policies=POLICIES, cores=1)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


# The table.


def test_suite_without_a_part_fails_for_missing_transitions():
    class Partial(TransitionTableContract, ClaimsContract):
        pass

    with pytest.raises(AssertionError):
        Partial().test_every_transition_of_the_table_has_a_case()


def test_case_with_an_unknown_transition_fails():
    class Odd(StorageContract):
        @shows("complete", State.WAITING, State.COMPLETED)
        def test_something_that_must_not_be(self):
            """A waiting job completes."""

    with pytest.raises(AssertionError):
        Odd().test_every_case_shows_a_transition_of_the_table()


def test_transition_marks_of_a_case_are_combined():
    @shows("cancel", [State.WAITING, State.DELAYED], State.CANCELLED)
    @shows("claim", State.WAITING, State.ACTIVE)
    def case():
        """Nothing."""

    assert marks_of(case) == {
        ("cancel", State.WAITING, State.CANCELLED),
        ("cancel", State.DELAYED, State.CANCELLED),
        ("claim", State.WAITING, State.ACTIVE),
    }


def told(*words: str) -> TransitionLog:
    """A log of the events of one job, given as `word:state`."""
    log = TransitionLog()
    pairs = (word.split(":") for word in words)
    log.follow(Event("q", "a", "n", word, State(there), 0) for word, there in pairs)
    return log


@pytest.mark.parametrize(
    "words",
    [
        ["enqueued:active"],
        ["enqueued:waiting", "started:waiting"],
        ["enqueued:waiting", "completed:completed"],
        ["enqueued:delayed", "started:active"],
        ["enqueued:waiting", "enqueued:waiting"],
        ["enqueued:waiting", "started:active", "completed:completed", "failed:failed"],
        ["enqueued:waiting", "started:active", "completed:completed", "enqueued:waiting"],
        ["enqueued:waiting", "started:active", "stalled:failed", "failed:waiting"],
        ["enqueued:waiting", "progress:waiting"],
        ["enqueued:waiting", "started:active", "teleported:waiting"],
    ],
)
def test_event_outside_the_transition_table_is_recorded(words):
    assert len(told(*words).outside) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["enqueued:waiting", "started:active", "progress:active", "completed:completed", "removed:completed"],
        ["enqueued:waiting", "started:active", "stalled:failed", "failed:failed", "requeued:waiting"],
        ["enqueued:blocked", "cancelled:cancelled", "removed:cancelled", "enqueued:delayed"],
        ["enqueued:waiting", "removed:waiting", "enqueued:waiting"],
        ["enqueued:waiting", "started:active", "failed:failed", "enqueued:waiting"],
    ],
)
def test_events_of_the_transition_table_are_accepted(words):
    assert told(*words).outside == []


def test_transition_log_uses_the_names_of_the_transition_table():
    log = told("enqueued:waiting", "started:active", "retried:delayed", "promoted:waiting")

    assert log.seen == {
        ("claim", State.WAITING, State.ACTIVE),
        ("retry", State.ACTIVE, State.DELAYED),
        ("promote", State.DELAYED, State.WAITING),
    }


# The tools.


@pytest.mark.parametrize("there", sorted(State))
def test_factories_make_a_job_in_every_state(there):
    storage = MemoryStorage()

    assert state(storage, JOB_IN[there](storage)) is there


def test_recorder_waits_for_events_of_another_thread():
    storage, recorder = MemoryStorage(), Recorder()
    storage.events.subscribe("default", recorder)
    thread = Thread(target=lambda: enqueue(storage, id="a"))
    thread.start()

    assert recorder.until("enqueued", "a").id == "a"
    thread.join()


def test_recorder_timeout_names_the_missing_event(monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE", 0.01)
    storage, recorder = MemoryStorage(), Recorder()
    storage.events.subscribe("default", recorder)
    enqueue(storage, id="a")

    with pytest.raises(AssertionError, match=r"timed out after 0\.01 s: event 'completed'.*'enqueued'"):
        recorder.until("completed", "a")
    assert not Wakes().arrived()


def test_concurrent_actions_return_results_in_order():
    assert together([lambda n=n: n for n in range(8)]) == list(range(8))


def test_error_of_a_concurrent_action_is_raised():
    def fail():
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        together([fail, lambda: 1])


def test_deadlock_of_concurrent_actions_is_an_error():
    never = ThreadEvent()

    with pytest.raises(AssertionError, match="deadlock"):
        together([lambda: never.wait(10), lambda: 1], within=0.02)
    never.set()


def test_case_without_a_fake_clock_waits_in_real_time():
    storage = MemoryStorage()
    job_id = enqueue(storage, delay=20)

    StorageCase().pass_time(storage, 25)

    assert state(storage, job_id) is State.WAITING
