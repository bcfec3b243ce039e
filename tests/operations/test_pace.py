"""The mirror waits while many jobs change, up to a limit."""

from itertools import pairwise

import pytest

from djqueue.operations.throttle import BUSY_RATE, FULL_SHARE, LOOK_EVERY, SUSPECT_COUNT, BusyPause
from djqueue.storage.redis.changes import Backlog

LENGTH, MAX_LAG = 9_000, 10_000
CALM = BUSY_RATE // 10


class FakeTime:
    """A clock, and an event that nobody sets: its waits move the clock."""

    def __init__(self) -> None:
        self.at = 50_000

    def monotonic(self) -> int:
        return self.at

    def wait(self, seconds: float) -> bool:
        self.at += round(seconds * 1_000)
        return False


class Streams:
    """The stream of one queue, to which entries of a hundred changes are added while the clock runs."""

    def __init__(self, time: FakeTime, per_second: float) -> None:
        self.time = time
        self.per_second = per_second
        self.waiting = 0
        self.looks = 0

    def backlogs(self) -> dict[str, Backlog]:
        self.looks += 1
        return {"default": Backlog(int(self.time.at / 1_000 * self.per_second / 100), self.waiting, 100.0)}


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def streams(time: FakeTime) -> Streams:
    return Streams(time, BUSY_RATE * 4)


@pytest.fixture
def make_pause(time, streams):
    def make(**options) -> BusyPause:
        given = {
            "keep_lease": lambda: None,
            "length": LENGTH,
            "max_lag": MAX_LAG,
            "clock": time,
            "stop": time,
            **options,
        }
        return BusyPause(streams.backlogs, **given)

    return make


@pytest.fixture
def pause(make_pause) -> BusyPause:
    return make_pause()


def begin(pause: BusyPause, time: FakeTime) -> None:
    """Have it look for the first time, after which it can tell how many jobs change."""
    assert not pause.wait()
    time.at += LOOK_EVERY


def test_copies_wait_while_many_jobs_change_but_no_longer_than_the_bound(pause, time):
    start = time.at
    begin(pause, time)

    assert pause.wait()
    assert time.at - start == MAX_LAG


def test_copies_do_not_wait_after_the_bound_until_all_is_copied(pause, time):
    begin(pause, time)
    pause.wait()
    for _ in range(5):  # transactions of the copy
        time.at += LOOK_EVERY
        assert not pause.wait()

    began = time.at
    pause.caught_up(began)
    assert pause.wait()
    assert time.at - began == MAX_LAG


def test_copies_continue_when_fewer_jobs_change(pause, time, streams):
    begin(pause, time)

    def calm_down() -> None:
        streams.per_second = 0

    pause._keep_lease = calm_down
    began = time.at

    assert pause.wait()
    assert time.at - began <= 2 * LOOK_EVERY


def test_copies_do_not_wait_while_few_jobs_change(pause, time, streams):
    streams.per_second = CALM
    begin(pause, time)

    assert not pause.wait()


def test_copies_do_not_wait_when_a_stream_might_overflow(pause, time, streams):
    begin(pause, time)
    streams.waiting = int(LENGTH * FULL_SHARE)
    assert pause._is_waiting()

    streams.waiting += 1
    time.at += LOOK_EVERY
    assert not pause.wait()


def test_lease_is_renewed_while_copies_wait(make_pause, time):
    kept = []
    pause = make_pause(keep_lease=lambda: kept.append(time.at))
    begin(pause, time)
    pause.wait()

    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert max(gaps) <= LOOK_EVERY


def test_a_lost_lease_ends_the_wait(make_pause, time):
    def lose() -> None:
        raise RuntimeError("another process copies")

    pause = make_pause(keep_lease=lose)
    begin(pause, time)

    with pytest.raises(RuntimeError, match="another process copies"):
        pause.wait()


def test_a_stop_ends_the_wait(make_pause, time):
    pause = make_pause()
    begin(pause, time)
    pause._stop = Stopped()
    began = time.at

    assert not pause.wait()
    assert time.at == began


class Stopped:
    def wait(self, _: float) -> bool:
        return True


def test_a_bound_of_zero_never_waits(make_pause, time, streams):
    pause = make_pause(max_lag=0)
    time.at += LOOK_EVERY

    assert not pause.wait()
    assert streams.looks == 0


def test_rounds_that_copy_few_jobs_do_not_read_the_backlog(pause, time, streams):
    streams.per_second = CALM
    begin(pause, time)
    pause.before_round(0)
    looks = streams.looks
    for _ in range(10):
        time.at += LOOK_EVERY
        assert not pause.before_round(SUSPECT_COUNT - 1)
    assert streams.looks == looks

    pause.before_round(SUSPECT_COUNT)
    assert streams.looks == looks + 1


def test_new_or_obliterated_queue_does_not_count_as_busy(pause, time, streams):
    begin(pause, time)
    for backlogs in ({}, {"new": Backlog(100_000, 0, 1_000.0)}, {"new": Backlog(5, 0, 1_000.0)}):
        streams.backlogs = lambda found=backlogs: found
        pause._backlogs = streams.backlogs
        assert not pause.wait()
        time.at += LOOK_EVERY
