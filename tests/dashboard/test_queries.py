"""Reads of the board: only minutes that are new are read."""

from itertools import pairwise

import pytest

from djqueue import Queue
from djqueue.core.metrics import HOUR, MINUTE, NO_TIMES, PARTS, Histogram, RunStats
from djqueue.core.options import DAY
from djqueue.dashboard import boards
from djqueue.dashboard.boards import CHART_MINUTES, OPEN_MINUTES
from djqueue.dashboard.reading import read_cache
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock

NOON = 1_800_000_000_000 // DAY * DAY + DAY // 2
TIMES = Histogram((1,) * PARTS)


class Viewer:
    """Somebody who looks, at a storage that notes which minutes it is asked for."""

    def __init__(self) -> None:
        self.clock = FakeClock(now=NOON)
        self.storage = MemoryStorage(clock=self.clock)
        self.minutes: list[int] = []
        self._series = self.storage.reads.series
        self.storage.reads.series = self.noted  # type: ignore[method-assign]

    def noted(self, queues, start, end, step, by_name=False):
        self.minutes.append((end - start) // MINUTE * len(queues))
        return self._series(queues, start, end, step, by_name)

    def run(self, queue: str) -> None:
        """Something happens now."""
        self.storage.workers.record_runs([RunStats(queue, "job", 1, 0, 0, 0, TIMES, TIMES)])
        self.storage.sweep()

    def pass_minutes(self, many: int = 1) -> None:
        self.clock.advance(many * MINUTE)

    def look(self) -> boards.Board:
        """A new read, which has to be what the storage says of the whole hour."""
        self.minutes.clear()
        read_cache.forget()
        board = read_cache.read("board", boards.read_board).value
        end = board.at // MINUTE * MINUTE + MINUTE
        for line in board.lines:
            assert list(line.buckets) == self._series([line.name], end - HOUR, end, MINUTE)
        whole = [
            one._replace(wait=NO_TIMES, run=NO_TIMES) for one in self._series(None, end - HOUR, end, MINUTE)
        ]
        assert board.series() == (whole if board.lines else [])
        assert board._replace(past=None).series() == board.series()
        return board


@pytest.fixture
def viewer(monkeypatch):
    viewer = Viewer()
    monkeypatch.setattr(boards, "get_storage", lambda: viewer.storage)
    for name in ("a", "b"):
        Queue(name, storage=viewer.storage).enqueue(1)
        viewer.run(name)
    return viewer


def test_completed_minutes_are_read_once(viewer):
    viewer.look()
    assert sum(viewer.minutes) == 2 * CHART_MINUTES
    viewer.run("a")
    viewer.look()
    assert sum(viewer.minutes) == 2 * OPEN_MINUTES


def test_read_after_a_minute_adds_only_the_new_minute(viewer):
    viewer.look()
    for _ in range(CHART_MINUTES + 2):
        viewer.run("b")
        viewer.pass_minutes()
        viewer.look()
        assert sum(viewer.minutes) == 2 * (OPEN_MINUTES + 1)


def test_whole_hour_is_read_after_minutes_without_a_read(viewer):
    viewer.look()
    viewer.pass_minutes(2)
    viewer.look()
    assert sum(viewer.minutes) == 2 * CHART_MINUTES


def test_new_and_deleted_queues_are_seen_at_once(viewer):
    viewer.look()
    Queue("new", storage=viewer.storage).enqueue(1)
    viewer.run("new")
    viewer.storage.queues.obliterate("a")
    assert [line.name for line in viewer.look().lines] == ["b", "new"]
    viewer.storage.queues.obliterate("b")
    viewer.storage.queues.obliterate("new")
    assert (viewer.look().lines, viewer.minutes) == ((), [])


def test_current_rates_and_times_cover_the_minutes_shown(viewer):
    for _ in range(4):
        viewer.pass_minutes()
        viewer.run("a")
    line = viewer.look().line("a")
    assert line is not None
    assert sum(bucket.wait.total for bucket in line.buckets) == 5 * PARTS
    assert line.wait_p95 == boards.sum_of(line.buckets).wait.percentile(0.95)
    assert all(later.start - earlier.start == MINUTE for earlier, later in pairwise(line.buckets))
