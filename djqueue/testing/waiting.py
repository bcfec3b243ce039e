"""Waiting for what happens in other threads: on events, for as long as it takes and no longer."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Barrier, Condition, RLock, Thread
from typing import Any, TypeVar

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import Event

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds to wait for something that should happen soon: a busy machine may stop a thread for seconds."""
TURN = 1e-5
"""Seconds for which one of the racing threads runs before the next may."""


class Recorder:
    """A subscriber that keeps events in the order of their arrival, whatever thread brings them."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._counts: Counter[str] = Counter()
        self._changed = Condition(RLock())

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        with self._changed:
            self._events.append(event)
            self._counts[event.event] += 1
            self._changed.notify_all()

    def events(self, job_id: str | None = None) -> list[Event]:
        """Return what has arrived so far, of one job or of all."""
        with self._changed:
            return [event for event in self._events if job_id in (None, event.id)]

    def words(self, job_id: str | None = None) -> list[str]:
        """Return the words of the events that have arrived so far."""
        return [event.event for event in self.events(job_id)]

    def count(self, word: str) -> int:
        """Return how many events with this word have arrived so far."""
        with self._changed:
            return self._counts[word]

    def until(self, word: str, job_id: str | None = None) -> Event:
        """Wait for the first event with this word (of one job, or of any)."""

        def found() -> Event | None:
            fitting = (event for event in self._events if event.event == word)
            return next((event for event in fitting if job_id in (None, event.id)), None)

        return self.until_true(found, f"event {word!r}")

    def until_true(self, predicate: Callable[[], T | None], what: str) -> T:
        """Wait until a predicate, asked again after each event, answers something true."""
        with self._changed:
            value = self._changed.wait_for(predicate, PATIENCE)
            seen = [(event.id, event.event) for event in self._events[-20:]]
        assert value, f"timed out after {PATIENCE:g} s: {what}; last events: {seen}"
        return value


class Wakes:
    """A listener that counts how often it has been woken."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition()

    def __call__(self) -> None:
        """Be woken."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def forget(self) -> None:
        """Count from nothing again."""
        with self._changed:
            self._count = 0

    @property
    def count(self) -> int:
        """Wakes since the start or since `forget`."""
        with self._changed:
            return self._count

    def arrived(self) -> bool:
        """Wait to be woken; False if that does not happen."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count > 0, PATIENCE)


def together(actions: Iterable[Callable[[], Any]], *, within: float = 300.0) -> list[Any]:
    """Run actions in a thread each, started at one moment; their answers, in order.

    The threads take turns far more often than usual, so that what can go wrong between them does.
    The first error of any is raised here; an action that has not ended in time is an AssertionError.
    """
    started = list(actions)
    barrier = Barrier(len(started))
    answers: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(index: int, action: Callable[[], Any]) -> None:
        try:
            barrier.wait(PATIENCE)
            answers[index] = action()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(index, action), daemon=True) for index, action in enumerate(started)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        for thread in threads:
            thread.start()
        deadline = SYSTEM_CLOCK.monotonic() + within * 1_000
        for thread in threads:
            thread.join(max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000)
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert len(answers) == len(started), f"not finished within {within:g} s; possibly a deadlock"
    return [answers[index] for index in range(len(started))]
