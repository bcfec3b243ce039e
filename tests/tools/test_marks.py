"""Counting what handlers have done, from outside."""

import struct
from threading import Thread, Timer

import pytest

from tools.benchmarks.marks import Marks, StuckError


def handlers(marks: Marks, count: int) -> Thread:
    """Leave marks, one by one, from another thread."""

    def work() -> None:
        with marks.path.open("ab", buffering=0) as file:
            for _ in range(count):
                file.write(b"x")

    return Thread(target=work)


def test_the_rate_and_the_cpu_time_are_those_after_the_warm_up(tmp_path):
    marks, used = Marks(tmp_path / "marks"), iter([{"worker": 1.0}, {"worker": 3.0, "redis": 1.0}])
    marks.path.write_bytes(b"x" * 10)
    later = Timer(0.05, handlers(marks, 90).run)
    later.start()

    drained = marks.drain(100, lambda: next(used), lambda: None)
    later.join()

    took = 2 / drained.cores["worker"]
    assert drained.rate * took == pytest.approx(90)
    assert drained.cpu == pytest.approx({"worker": 2e6 / 90, "redis": 1e6 / 90})


def test_a_measurement_ends_at_its_limit(tmp_path):
    marks = Marks(tmp_path / "marks")
    marks.path.write_bytes(b"x" * 10)
    later = Timer(0.05, handlers(marks, 20).run)
    later.start()

    drained = marks.drain(100, dict, lambda: None, limit=0.5)
    later.join()

    assert 0 < drained.rate <= 20 / 0.5


def test_a_worker_that_has_ended_is_not_waited_for(tmp_path):
    marks = Marks(tmp_path / "marks")

    def alive():
        raise RuntimeError("it has ended")

    with pytest.raises(RuntimeError, match="it has ended"):
        marks.wait_for(1, alive)


def test_a_backlog_that_was_gone_at_once_is_no_measurement(tmp_path):
    marks = Marks(tmp_path / "marks")
    marks.path.write_bytes(b"x" * 10)

    with pytest.raises(StuckError, match="too small"):
        marks.drain(10, dict, lambda: None)


def test_times_are_read_as_handlers_left_them(tmp_path):
    marks = Marks(tmp_path / "marks")
    marks.path.write_bytes(struct.pack("2d", 0.5, 0.25))

    assert marks.times() == [0.5, 0.25]
