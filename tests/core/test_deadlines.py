"""Deadlines: all the time counts, or only the time for which a thread waits."""

import threading
from typing import Any

import pytest

from djqueue.core import deadlines, procfs
from djqueue.core.deadlines import remaining, waiting_within, within


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Milliseconds that have passed, and those for which the thread was busy."""
    time = {"passed": 0, "busy": 0}

    class StoppedClock:
        def monotonic(self) -> int:
            return time["passed"]

    monkeypatch.setattr(deadlines, "SYSTEM_CLOCK", StoppedClock())
    monkeypatch.setattr(procfs, "busy_time", lambda _thread: 5_000 + time["busy"])
    return time


def test_earlier_of_two_deadlines_applies(now: dict[str, int]) -> None:
    with within(3):
        with within(2):
            assert remaining(9) == 2
        with waiting_within(5):
            assert remaining(9) == 3
        now["passed"] = 4_000
        assert remaining(9) == 0
    assert remaining(9) == 9


def test_time_for_which_a_thread_is_busy_does_not_count_as_waiting(now: dict[str, int]) -> None:
    with waiting_within(1.5):
        now.update(passed=4_000, busy=3_500)
        assert remaining(9) == 1.0
        now.update(passed=5_200)
        assert remaining(9) == 0


def test_thread_that_computes_is_busy_and_one_that_waits_is_not() -> None:
    found: dict[str, Any] = {}

    def compute() -> None:
        began = procfs.busy_time(threading.get_native_id())
        while procfs.busy_time(threading.get_native_id()) < began + 20:
            pass
        found["busy"] = True

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == {"busy": True}
    assert procfs.busy_time(0) == 0
