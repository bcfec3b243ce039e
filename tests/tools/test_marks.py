"""Counting what handlers have done, from outside."""

import struct
from pathlib import Path

import pytest

from tools.benchmarks.marks import Marks, StuckError


class Counted(Marks):
    """Marks whose numbers, look by look, are given; the last one stays."""

    def __init__(self, path: Path, *counts: int) -> None:
        super().__init__(path)
        self._counts = list(counts)

    def count(self) -> int:
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]


def test_rate_and_cpu_time_are_measured_after_warm_up(tmp_path):
    marks, used = (
        Counted(tmp_path / "marks", 5, 10, 10, 40, 100),
        iter([{"w": 1.0}, {"w": 3.0, "redis": 1.0}]),
    )

    drained = marks.drain(100, lambda: next(used), lambda: None)

    took = 2 / drained.cores["w"]
    assert drained.rate * took == pytest.approx(90)
    assert drained.cpu == pytest.approx({"w": 2e6 / 90, "redis": 1e6 / 90})


def test_measurement_ends_at_its_limit(tmp_path):
    drained = Counted(tmp_path / "marks", 10, 10, 30).drain(100, dict, lambda: None, limit=0.05)

    assert 0 < drained.rate <= 20 / 0.05


def test_wait_raises_error_if_worker_has_ended(tmp_path):
    marks = Marks(tmp_path / "marks")

    def alive():
        raise RuntimeError("it has ended")

    with pytest.raises(RuntimeError, match="it has ended"):
        marks.wait_for(1, alive)


def test_backlog_without_warm_up_is_too_small_to_measure(tmp_path):
    marks = Marks(tmp_path / "marks")
    marks.path.write_bytes(b"x" * 10)

    with pytest.raises(StuckError, match="too small"):
        marks.drain(10, dict, lambda: None)


def test_times_written_by_handlers_are_read(tmp_path):
    marks = Marks(tmp_path / "marks")
    marks.path.write_bytes(struct.pack("2d", 0.5, 0.25))

    assert marks.times() == [0.5, 0.25]
