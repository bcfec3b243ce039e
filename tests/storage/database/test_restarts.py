"""The machine of a SQLite database is restarted: its clock of leases and rates starts again."""

import pytest
from django.db import connection

from djqueue import models
from djqueue.core.policies import LimiterPolicy, QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.storage.database import transaction
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, claim, claim_ids, enqueue_many, state

pytestmark = pytest.mark.skipif(connection.vendor != "sqlite", reason="of SQLite")
LONG_RUNNING, JUST_STARTED = 1_000_000_000, 5_000


def restart():
    """Let the database look as if it was last used before a restart of the machine."""
    assert models.LeaderLeaseRow.objects.filter(name="boot").update(host="this-machine/an-earlier-boot/pid:1")


def test_leases_of_before_end_with_the_restart(make):
    before = make(clock=FakeClock(monotonic=LONG_RUNNING))
    enqueue_many(before, 2)
    lost = claim(before, 2)
    before.close()
    restart()

    after = make(clock=FakeClock(monotonic=JUST_STARTED))

    assert after.sweep().stalled == 2
    assert {state(after, job.id) for job in lost} == {State.WAITING}
    assert len(claim_ids(after)) == 1


def test_rates_of_before_hold_nothing_back(make):
    options = {
        "policies": {
            QUEUE: QueuePolicy(rate=Rate(1, 60_000), limiter="api"),
            "grouped": QueuePolicy(key_rate=Rate(1, 60_000)),
        },
        "limiters": {"api": LimiterPolicy(rate=Rate(1, 60_000))},
    }
    before = make(clock=FakeClock(monotonic=LONG_RUNNING), **options)
    enqueue_many(before, 2)
    enqueue_many(before, 2, queue="grouped", concurrency_key="g")
    assert len(claim(before, 2, queues=[QUEUE])) == 1
    assert len(claim(before, 2, queues=["grouped"])) == 1
    before.close()
    restart()

    after = make(clock=FakeClock(monotonic=JUST_STARTED), **options)
    after.sweep()

    assert len(claim(after, 2, queues=[QUEUE])) == 1
    assert len(claim(after, 2, queues=["grouped"])) == 1


def test_leases_last_while_the_machine_runs(make):
    clock = FakeClock(monotonic=LONG_RUNNING)
    first = make(clock=clock)
    enqueue_many(first, 1)
    claim(first)

    second = make(clock=clock)

    assert second.sweep().stalled == 0
    assert first.sweep().stalled == 0


def test_wall_clock_decides_where_the_boot_is_unknown(make, monkeypatch):
    monkeypatch.setattr(transaction, "boot_of", lambda: "")
    clock = FakeClock(now=1_700_000_000_000, monotonic=JUST_STARTED)

    storage = make(clock=clock)

    assert storage.database.tick() == clock.now()
    assert not models.LeaderLeaseRow.objects.filter(name="boot").exists()
