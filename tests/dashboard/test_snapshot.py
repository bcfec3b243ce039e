"""What all viewers of a process share."""

from threading import Barrier, Event, Thread

import pytest

from djqueue.core.deadline import remaining, within
from djqueue.core.errors import StorageUnavailableError
from djqueue.dashboard.snapshot import FRESH, MAX_ENTRIES, SLOW, ReadCache
from djqueue.testing.clock import FakeClock
from tests.support import eventually


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def snapshots(clock):
    return ReadCache(clock)


def test_what_was_read_is_shown_for_a_second(snapshots, clock):
    values = iter("abc")
    assert snapshots.read("k", lambda: next(values)).value == "a"
    clock.advance(FRESH - 1)
    assert snapshots.read("k", lambda: next(values)).value == "a"
    clock.advance(1)
    cached = snapshots.read("k", lambda: next(values))
    assert (cached.value, cached.at, cached.error) == ("b", clock.now(), "")


def test_what_takes_long_is_read_more_seldom(snapshots, clock):
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


def test_of_many_viewers_one_reads_and_the_others_take_what_there_was(snapshots, clock):
    snapshots.read("k", lambda: "old")
    clock.advance(FRESH)
    inside, go_on = Event(), Event()

    def slow():
        inside.set()
        assert go_on.wait(10)
        return "new"

    reader = Thread(target=snapshots.read, args=("k", slow))
    reader.start()
    assert inside.wait(10)
    try:
        assert snapshots.read("k", pytest.fail).value == "old"
    finally:
        go_on.set()
        reader.join()
    assert snapshots.read("k", pytest.fail).value == "new"


def test_while_the_storage_is_away_the_last_is_shown_with_the_reason(snapshots, clock):
    def away():
        raise StorageUnavailableError("no server")

    with pytest.raises(StorageUnavailableError):
        snapshots.read("k", away)
    at = clock.now()
    snapshots.read("k", lambda: "last")
    clock.advance(FRESH)
    assert snapshots.read("k", away)[:3] == ("last", at, "no server")
    clock.advance(FRESH)
    assert snapshots.read("k", lambda: "back").error == ""


def test_after_a_change_everything_is_read_anew(snapshots):
    snapshots.read("k", lambda: "old")
    snapshots.forget()
    assert snapshots.read("k", lambda: "new").value == "new"


def test_reads_that_nobody_asks_for_are_forgotten(snapshots):
    for number in range(MAX_ENTRIES + 1):
        snapshots.read(number, lambda: "old")
    assert snapshots.read(0, lambda: "new").value == "new"
    assert snapshots.read(MAX_ENTRIES, pytest.fail).value == "old"


def test_fifty_who_ask_at_once_cost_one_read_a_second(snapshots, clock):
    reads, all_at_once = [], Barrier(50)

    def fetch():
        reads.append(clock.now())
        return len(reads)

    def look():
        all_at_once.wait(10)
        answers.append(snapshots.read("k", fetch).value)

    for second in range(1, 4):
        answers: list[int] = []
        viewers = [Thread(target=look) for _ in range(50)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join()
        assert len(reads) == second
        assert len(answers) == 50
        assert set(answers) <= {second - 1, second}
        clock.advance(FRESH)


def test_what_was_read_last_is_known_however_long_ago(snapshots, clock):
    assert snapshots.last("k") is None
    snapshots.read("k", lambda: "old")
    clock.advance(100 * FRESH)
    snapshots.forget()
    assert snapshots.last("k").value == "old"
    snapshots.clear()
    assert snapshots.last("k") is None


def test_a_first_read_of_somebody_else_is_waited_for_until_the_deadline(snapshots):
    inside, go_on = Event(), Event()

    def slow():
        inside.set()
        assert go_on.wait(10)
        return "new"

    reader = Thread(target=snapshots.read, args=("k", slow))
    reader.start()
    assert inside.wait(10)
    try:
        with within(0.1), pytest.raises(StorageUnavailableError, match="in time"):
            snapshots.read("k", pytest.fail)
    finally:
        go_on.set()
        reader.join()


def test_what_takes_longer_than_a_page_may_is_read_for_the_next_page(snapshots, clock):
    deadlines = []

    def slow():
        deadlines.append(remaining(60))
        if remaining(60) < 5:
            clock.advance(SLOW)
            raise StorageUnavailableError("the time limit has passed")
        return "read"

    with within(1.5), pytest.raises(StorageUnavailableError):
        snapshots.read("k", slow)
    eventually(lambda: snapshots.last("k"))
    assert snapshots.read("k", pytest.fail)[:3] == ("read", clock.now(), "")
    assert [deadline > 5 for deadline in deadlines] == [False, True]


def test_a_read_that_failed_slowly_is_tried_again_after_a_second(snapshots, clock):
    snapshots.read("k", lambda: "old")
    clock.advance(FRESH)

    def slow():
        clock.advance(1_500)
        raise StorageUnavailableError("no answer")

    assert snapshots.read("k", slow).error == "no answer"
    clock.advance(FRESH)
    assert snapshots.read("k", lambda: "back")[:3] == ("back", clock.now(), "")
