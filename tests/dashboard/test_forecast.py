"""Estimates of when a queue drains, from how its size changes."""

import pytest

from djqueue import Queue
from djqueue.core.metrics import MINUTE
from djqueue.core.policies import Hold
from djqueue.core.states import State
from djqueue.dashboard import boards
from djqueue.dashboard.boards import (
    DRAINING,
    EMPTY,
    ESTIMATING,
    NEVER,
    NO_WORKER,
    PAUSED,
    STEADY,
    Sample,
)
from djqueue.dashboard.reading import read_cache
from djqueue.testing.clock import FakeClock
from tests.dashboard.acting import complete

SECOND = 1_000


def every(seconds, *sizes):
    return [Sample(number * seconds * SECOND, size) for number, size in enumerate(sizes)]


def test_estimate_requires_two_samples():
    assert boards.forecast(every(1, 150)).kind == ESTIMATING
    assert boards.forecast(every(1, 150, 146)).kind == ESTIMATING


def test_backlog_of_150_that_shrinks_by_four_per_second_drains_in_35_seconds():
    found = boards.forecast(every(1, 150, 146, 142))
    assert found.kind == DRAINING
    assert found.left == pytest.approx(35_500)
    assert boards.forecast(every(1, *range(150, 90, -4))).left == pytest.approx(23_500)


def test_burst_of_arrivals_is_not_reported_as_never_draining():
    sizes = [0, 150, *range(146, 100, -4)]
    kinds = {boards.forecast(every(1, *sizes[:many])).kind for many in range(2, len(sizes) + 1)}
    assert NEVER not in kinds
    assert boards.forecast(every(1, *sizes)).kind == DRAINING


def test_backlog_that_grows_over_several_windows_never_drains():
    growing = every(5, *range(10, 100, 10))
    assert boards.forecast(growing).kind == NEVER
    assert boards.forecast(growing[:5]).kind == STEADY
    pausing = every(5, 10, 20, 30, 40, 40, 40, 40, 40, 50)
    assert boards.forecast(pausing).kind == STEADY


def test_page_refreshed_every_minute_has_an_estimate_at_its_second_read():
    assert boards.forecast(every(60, 600, 540)) == (DRAINING, 540_000)
    assert boards.forecast(every(60, 10, 20, 30, 40)).kind == NEVER
    assert boards.forecast(every(600, 600, 540)).kind == ESTIMATING


def test_empty_queue_has_no_estimate():
    assert boards.forecast(every(1, 5, 0)).kind == EMPTY


@pytest.fixture
def clock(memory, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(boards, "SYSTEM_CLOCK", clock)
    return clock


def test_board_estimates_from_earlier_reads(clock):
    Queue("emails").enqueue_many(range(10), ids=[f"job-{number}" for number in range(10)])

    def look():
        read_cache.forget()
        return read_cache.read("board", boards.read_board).value.line("emails").forecast

    assert look().kind == ESTIMATING
    for number in range(2):
        clock.advance(2 * SECOND)
        complete(f"job-{number}")
        found = look()
        assert found.kind == DRAINING
    assert found.left == pytest.approx(16_000)
    read_cache.clear()
    assert look().kind == ESTIMATING


@pytest.mark.parametrize(
    ("leaving", "arriving", "about", "expected"),
    [
        (60, 0, {}, (DRAINING, 600_000)),
        (60, 30, {}, (DRAINING, 1_200_000)),
        (60, 60, {}, (STEADY, 0)),
        (60, 90, {"delayed": 100}, (ESTIMATING, 0)),
        (0, 0, {}, (ESTIMATING, 0)),
        (60, 0, {"forecast": boards.Forecast(NEVER)}, (NEVER, 0)),
        (60, 0, {"held": 300}, (DRAINING, 300_000)),
        (60, 0, {"held": 300, "forecast": boards.Forecast(DRAINING, 600_000)}, (DRAINING, 300_000)),
        (60, 60, {"held": 300, "forecast": boards.Forecast(DRAINING, 600_000)}, (STEADY, 0)),
        (60, 0, {"paused": True}, (PAUSED, 0)),
        (60, 0, {"workers": 0}, (NO_WORKER, 0)),
    ],
)
def test_first_page_estimates_from_the_counts_of_the_last_minutes(memory, leaving, arriving, about, expected):
    given = {"forecast": boards.Forecast(ESTIMATING), "workers": 1, "paused": False, "delayed": 0, "held": 0}
    given |= about
    minute = boards.empty_bucket("emails", 0, MINUTE)._replace(completed=leaving, enqueued=arriving)
    empty = boards.empty_row("emails", 0)
    counts = {State.WAITING: 600, State.DELAYED: given["delayed"]}
    names = {"mail": given["held"], "job": 600 - given["held"]}
    holds = (Hold("mail", 0),) if given["held"] else ()
    overview = empty.row._replace(counts=counts, paused=given["paused"], names=names, holds=holds)
    drain = empty._replace(
        row=overview, buckets=(minute,) * 60, workers=given["workers"], forecast=given["forecast"]
    ).drain
    assert (drain.kind, drain.soonest) == expected
    assert not drain.is_range
