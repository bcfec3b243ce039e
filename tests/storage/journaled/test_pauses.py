"""A process that was frozen finds out by how much, and takes nobody's lease for that."""

from djqueue.storage.journaled.lease import PAUSE, PauseWatch
from djqueue.testing.clock import FakeClock
from tests.support import eventually


def watching(clock):
    """A watch, and what it has been called with."""
    pauses = []
    return PauseWatch(pauses.append, clock), pauses


def test_pause_is_reported_once_with_its_length():
    clock = FakeClock()
    watch, pauses = watching(clock)
    watch.start()
    try:
        clock.advance(5 * PAUSE)
        watch.check()
        watch.check()
    finally:
        watch.stop()

    assert pauses == [5 * PAUSE]


def test_pause_is_reported_without_explicit_check():
    clock = FakeClock()
    watch, pauses = watching(clock)
    watch.start()
    try:
        clock.advance(PAUSE)
        eventually(lambda: pauses == [PAUSE])
    finally:
        watch.stop()


def test_short_delay_is_not_reported_as_pause():
    clock = FakeClock()
    watch, pauses = watching(clock)
    watch.start()
    try:
        for _ in range(5):
            clock.advance(PAUSE - 1)
            watch.check()
    finally:
        watch.stop()

    assert pauses == []


def test_watch_that_was_not_started_reports_nothing():
    clock = FakeClock()
    watch, pauses = watching(clock)
    clock.advance(5 * PAUSE)

    watch.check()
    watch.stop()

    assert pauses == []
