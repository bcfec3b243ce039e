"""The clock of the database server, which all hosts share."""

from contextlib import closing

import pytest
from django.db import connection

from djqueue.storage.database import DatabaseStorage
from djqueue.storage.tables import clock as clocks
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import StorageCase
from tests.storage.setclocks import SET_CLOCK_POLICIES, MonotonicCase, SetClocksCase


@pytest.fixture
def here(tables, monkeypatch):
    here = FakeClock()
    monkeypatch.setattr(clocks, "SYSTEM_CLOCK", here)
    return here


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite has no clock of its own")
@pytest.mark.parametrize("jump", [-3_600_000, 3_600_000])
def test_setting_the_clock_of_one_host_does_not_change_the_time_of_the_server(here, jump):
    clock = clocks.DatabaseClock("default")
    clock.measure()
    before = clock.now()

    here.jump(jump)
    here.advance(1_000)

    assert clock.now() == before + 1_000


def test_wall_clock_of_the_machine_counts_without_a_server(here):
    if connection.vendor == "postgresql":
        pytest.skip("measures the clock of a server")
    clock = clocks.DatabaseClock("default")
    clock.measure()

    here.jump(-3_600_000)

    assert clock.now() == here.now()


def test_slow_reading_of_the_servers_clock_is_repeated(monkeypatch):
    clock, readings = clocks.DatabaseClock("default"), iter([(11_000, 1), (2, 5), (1, 9)])
    monkeypatch.setattr(clock, "_started_by", lambda _: next(readings))

    clock.measure()

    assert clock._started == (5 if connection.vendor == "postgresql" else None)


class OnASetClock(StorageCase):
    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        with closing(DatabaseStorage(clock=self.clock, policies=SET_CLOCK_POLICIES)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestSetClocks(OnASetClock, SetClocksCase):
    """On PostgreSQL, the injected clock stands for that of the server."""


@pytest.mark.skipif(
    connection.vendor == "postgresql", reason="its leases and rates are by the clock of the server"
)
class TestLeasesAndRates(OnASetClock, MonotonicCase):
    """On SQLite, they are by the time since the machine started."""
