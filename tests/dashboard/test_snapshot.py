"""The cache of reads that all users of a process share."""

from threading import Barrier, Event, Thread

import pytest

from djqueue.core.deadlines import remaining, within
from djqueue.core.errors import StorageUnavailableError
from djqueue.dashboard.reading import FRESH_TIME, MAX_ENTRIES, SLOW_READ, ReadCache
from djqueue.testing.clock import FakeClock
from tests.support import PATIENCE, eventually


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def snapshots(clock):
    return ReadCache(clock)


def join(thread):
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_cached_value_is_used_for_one_second(snapshots, clock):
    values = iter("abc")
    assert snapshots.read("k", lambda: next(values)).value == "a"
    clock.advance(FRESH_TIME - 1)
    assert snapshots.read("k", lambda: next(values)).value == "a"
    clock.advance(1)
    cached = snapshots.read("k", lambda: next(values))
    assert (cached.value, cached.at, cached.error) == ("b", clock.now(), "")


def test_slow_read_is_cached_longer(snapshots, clock):
    def slow():
        clock.advance(400)
        return clock.now()

    first = snapshots.read("k", slow).value
    clock.advance(3_999)
    assert snapshots.read("k", slow).value == first
    clock.advance(1)
    assert snapshots.read("k", slow).value > first
    snapshots.forget()
    assert snapshots.read("k", slow).at == clock.now()


def test_concurrent_callers_get_the_previous_value_during_a_read(snapshots, clock):
    snapshots.read("k", lambda: "old")
    clock.advance(FRESH_TIME)
    inside, go_on = Event(), Event()

    def slow():
        inside.set()
        assert go_on.wait(PATIENCE)
        return "new"

    reader = Thread(target=snapshots.read, args=("k", slow))
    reader.start()
    assert inside.wait(PATIENCE)
    try:
        assert snapshots.read("k", pytest.fail).value == "old"
    finally:
        go_on.set()
        join(reader)
    assert snapshots.read("k", pytest.fail).value == "new"


def test_last_value_is_returned_with_the_error_during_an_outage(snapshots, clock):
    def away():
        raise StorageUnavailableError("no server")

    with pytest.raises(StorageUnavailableError):
        snapshots.read("k", away)
    at = clock.now()
    snapshots.read("k", lambda: "last")
    clock.advance(FRESH_TIME)
    assert snapshots.read("k", away)[:3] == ("last", at, "no server")
    clock.advance(FRESH_TIME)
    assert snapshots.read("k", lambda: "back").error == ""


def test_forget_makes_every_key_read_again(snapshots):
    snapshots.read("k", lambda: "old")
    snapshots.forget()
    assert snapshots.read("k", lambda: "new").value == "new"


def test_least_recently_used_values_are_dropped(snapshots):
    for number in range(MAX_ENTRIES + 1):
        snapshots.read(number, lambda: "old")
    assert snapshots.read(0, lambda: "new").value == "new"
    assert snapshots.read(MAX_ENTRIES, pytest.fail).value == "old"


def test_fifty_concurrent_callers_cause_one_read_per_second(snapshots, clock):
    reads, all_at_once = [], Barrier(50)

    def fetch():
        reads.append(clock.now())
        return len(reads)

    def look():
        all_at_once.wait(PATIENCE)
        answers.append(snapshots.read("k", fetch).value)

    for second in range(1, 4):
        answers: list[int] = []
        viewers = [Thread(target=look) for _ in range(50)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            join(viewer)
        assert len(reads) == second
        assert len(answers) == 50
        assert set(answers) <= {second - 1, second}
        clock.advance(FRESH_TIME)


def test_last_returns_the_cached_value_at_any_age(snapshots, clock):
    assert snapshots.last("k") is None
    snapshots.read("k", lambda: "old")
    clock.advance(100 * FRESH_TIME)
    snapshots.forget()
    assert snapshots.last("k").value == "old"
    snapshots.clear()
    assert snapshots.last("k") is None


def test_first_read_of_another_thread_is_awaited_until_the_deadline(snapshots):
    inside, go_on = Event(), Event()

    def slow():
        inside.set()
        assert go_on.wait(PATIENCE)
        return "new"

    reader = Thread(target=snapshots.read, args=("k", slow))
    reader.start()
    assert inside.wait(PATIENCE)
    try:
        with within(0.1), pytest.raises(StorageUnavailableError, match="in time"):
            snapshots.read("k", pytest.fail)
    finally:
        go_on.set()
        join(reader)


def test_read_beyond_page_deadline_continues_in_the_background(snapshots, clock):
    deadlines = []

    def slow():
        deadlines.append(remaining(60))
        if len(deadlines) == 1:
            clock.advance(SLOW_READ)
            raise StorageUnavailableError("the time limit has passed")
        return "read"

    with within(1.5), pytest.raises(StorageUnavailableError):
        snapshots.read("k", slow)
    eventually(lambda: snapshots.last("k"))
    assert snapshots.read("k", pytest.fail)[:3] == ("read", clock.now(), "")
    page_deadline, background_deadline = deadlines
    assert page_deadline <= 1.5 < background_deadline


def test_slow_failed_read_is_repeated_after_one_second(snapshots, clock):
    snapshots.read("k", lambda: "old")
    clock.advance(FRESH_TIME)

    def slow():
        clock.advance(1_500)
        raise StorageUnavailableError("no answer")

    assert snapshots.read("k", slow).error == "no answer"
    clock.advance(FRESH_TIME)
    assert snapshots.read("k", lambda: "back")[:3] == ("back", clock.now(), "")
