"""Sources of time."""

import time

import pytest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.testing.clock import FakeClock


def test_system_clock_counts_whole_milliseconds_since_1970():
    before = time.time()
    now = SYSTEM_CLOCK.now()

    assert isinstance(now, int)
    assert before * 1_000 - 1 <= now <= time.time() * 1_000


def test_monotonic_clock_never_goes_back():
    ticks = [SYSTEM_CLOCK.monotonic() for _ in range(1_000)]

    assert ticks == sorted(ticks)


def test_fake_clock_advances_only_when_moved():
    clock = FakeClock(now=5_000, monotonic=10)
    assert (clock.now(), clock.monotonic()) == (5_000, 10)

    clock.advance(7)
    assert (clock.now(), clock.monotonic()) == (5_007, 17)

    clock.jump(-4_000)
    assert (clock.now(), clock.monotonic()) == (1_007, 17)


def test_fake_clock_rejects_negative_advance():
    with pytest.raises(ValueError, match="does not accept a negative time"):
        FakeClock().advance(-1)
