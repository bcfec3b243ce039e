"""A step of the sweep that fails stops nothing else, and no step is one long transaction."""

import pytest

from djqueue import models
from djqueue.core.states import State
from djqueue.models import hot
from djqueue.storage.database import claim, dependencies, events, expiry, limiters, sweep
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, batch, enqueue, state

LOGGER = "djqueue.storage"


@pytest.fixture
def clock():
    return FakeClock()


def fail(*_, **__):
    raise ZeroDivisionError("poisoned")


# Steps that fail.


@pytest.mark.parametrize(
    ("module", "step", "name"),
    [
        (events, "forget_old", "remove old events"),
        (limiters, "pass_turns_on", "pass on turns at limiters"),
        (dependencies, "forget_expired_keys", "release expired unique keys"),
        (sweep, "_stall", "take back jobs of lost workers"),
        (sweep, "_expire", "fail expired jobs"),
        (expiry, "expire", "remove expired records"),
        (expiry, "exceeded", "find queues above their bounds"),
    ],
)
def test_step_that_fails_is_logged_once_and_stops_no_other(
    make, clock, monkeypatch, caplog, module, step, name
):
    storage = make(clock=clock)
    monkeypatch.setattr(module, step, fail)

    for id in ("a", "b"):
        enqueue(storage, id=id, delay=1)
        clock.advance(1)
        assert storage.sweep().promoted == 1

    assert models.QueueTally.objects.filter(queue=QUEUE).count() == 1
    [record] = [record for record in caplog.records if record.name == LOGGER]
    assert name in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_queue_whose_jobs_cannot_be_promoted_does_not_hold_up_others(make, clock, monkeypatch):
    storage = make(clock=clock)
    promote = claim.promote_due
    monkeypatch.setattr(
        claim, "promote_due", lambda tx, queue, limit: fail() if queue == "bad" else promote(tx, queue, limit)
    )
    for queue in ("bad", "good"):
        enqueue(storage, queue=queue, id="a", delay=1)
    clock.advance(1)

    assert storage.sweep().promoted == 1

    assert [state(storage, "a", queue) for queue in ("bad", "good")] == [State.DELAYED, State.WAITING]


def test_step_that_fails_again_after_it_worked_is_logged_again(make, monkeypatch, caplog):
    storage = make()
    forget_old = events.forget_old
    for step in (fail, forget_old, fail):
        monkeypatch.setattr(events, "forget_old", step)
        storage.sweep()

    assert len([record for record in caplog.records if record.name == LOGGER]) == 2


def test_leader_goes_on_when_a_step_fails(make, clock, monkeypatch):
    first, second = make(clock=clock), make(clock=clock)
    monkeypatch.setattr(events, "forget_old", fail)
    first.maintain()
    enqueue(first, id="a", delay=1)
    clock.advance(1)

    second.maintain()
    assert state(first, "a") is State.DELAYED
    first.maintain()
    assert state(first, "a") is State.WAITING


def test_sweep_whose_steps_all_fail_raises_the_first_error(make, monkeypatch, caplog):
    storage = make()
    for call in ("read", "write", "write_unless_locked"):
        monkeypatch.setattr(storage.database.transactions, call, fail)
    monkeypatch.setattr(storage._staging_sweep, "run", fail)

    with pytest.raises(ZeroDivisionError):
        storage.sweep()

    assert caplog.records == []


# Very many rows.


def test_old_events_are_deleted_in_transactions_of_limited_size(make, monkeypatch):
    storage = make()
    monkeypatch.setattr(sweep, "EVENTS", 2)
    models.JobEvent.objects.bulk_create(
        models.JobEvent(queue=QUEUE, job_id=str(n), name="n", event="enqueued", state="waiting", at=0)
        for n in range(5)
    )
    deleted = []
    forget_old = events.forget_old
    monkeypatch.setattr(
        events, "forget_old", lambda tx, limit: deleted.append(forget_old(tx, limit)) or deleted[-1]
    )

    storage.sweep()

    assert deleted == [2, 2, 1]
    assert not models.JobEvent.objects.exists()


def test_expired_keys_are_freed_in_transactions_of_limited_size(make, clock, monkeypatch):
    storage = make(clock=clock)
    monkeypatch.setattr(sweep, "LIMIT", 2)
    for n in range(5):
        storage.enqueue([batch(unique_key=f"key {n}", unique_ttl=1)])
    storage.enqueue([batch(unique_key="lasting", unique_ttl=10)])
    clock.advance(5)
    freed = []
    forget = dependencies.forget_expired_keys
    monkeypatch.setattr(
        dependencies, "forget_expired_keys", lambda tx, limit: freed.append(forget(tx, limit)) or freed[-1]
    )

    storage.sweep()

    assert freed == [2, 2, 1]
    assert [key.key for key in hot.UniqueKey.objects.all()] == ["lasting"]
