"""The leader lease of the mirror: one holder at a time, and takeover from dead ones."""

import os

import pytest

from djqueue import models
from djqueue.core.procfs import host_name, start_mark
from djqueue.storage.tables.leaderlease import TTL, LeaderLease, LeaderLeaseLostError
from djqueue.testing.clock import FakeClock

pytestmark = [pytest.mark.django_db, pytest.mark.dialect]

HOUR = 3_600_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def held(clock: FakeClock) -> LeaderLease:
    lease = LeaderLease("default", clock, "mirror")
    assert lease.acquire()
    return lease


def test_lease_row_names_the_process_and_its_start(clock: FakeClock) -> None:
    held(clock)

    row = models.LeaderLeaseRow.objects.get(name="mirror")
    assert (row.pid, row.host) == (os.getpid(), host_name() + start_mark(os.getpid()))


def test_process_with_a_reused_id_is_not_mistaken_for_a_dead_one(clock: FakeClock) -> None:
    held(clock)
    assert not LeaderLease("default", clock, "mirror").acquire()
    models.LeaderLeaseRow.objects.filter(name="mirror").update(host=f"{host_name()}@1")

    assert LeaderLease("default", clock, "mirror").acquire()


def test_clock_set_back_does_not_extend_the_lease(clock: FakeClock) -> None:
    first = held(clock)
    clock.jump(-HOUR)

    assert LeaderLease("default", clock, "mirror").acquire()
    with pytest.raises(LeaderLeaseLostError):
        first.renew()


def test_renewing_holder_keeps_the_lease(clock: FakeClock) -> None:
    first = held(clock)
    for _ in range(3):
        clock.advance(TTL - 1)
        first.renew()
        assert not LeaderLease("default", clock, "mirror").acquire()


def test_holder_is_known_to_others_until_it_releases_the_lease(clock: FakeClock) -> None:
    other = LeaderLease("default", clock, "mirror")
    assert other.holder() is None
    first = held(clock)

    holder = other.holder()
    assert holder is not None
    assert holder.pid == os.getpid()

    first.release()
    assert other.holder() is None
