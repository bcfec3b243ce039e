"""Rows of ended jobs that are kept for others: over restarts, and where no scheduler runs."""

import pytest
from django.db.models import Max

from djqueue import models
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import Keep, Retention
from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage
from djqueue.storage.journaled.pinned import PUT_OFF
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.case import swept_clean
from djqueue.testing.factories import (
    QUEUE,
    RESULT,
    UPSTREAM,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    finish,
    job,
    state,
)

from .conftest import MakeStorage

pytestmark = pytest.mark.dialect

BRIEF = 1_000
SLOW = "slow"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def started(make_storage: MakeStorage, clock: FakeClock, **options: object) -> JournaledStorage:
    storage = make_storage(clock=clock, **options)
    storage.connect()
    return storage


def a_family(storage: JournaledStorage, clock: FakeClock, **options: object) -> None:
    """A child that has completed, whose time is over, and a parent that waits for another."""
    enqueue(storage, id="child", queue=UPSTREAM, **{"result_ttl": BRIEF, **options})
    enqueue(storage, id="slow", queue=SLOW)
    needs = ((UPSTREAM, "child"), (SLOW, "slow"))
    enqueue(storage, id="parent", depends_on=needs, result_ttl=BRIEF)
    finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
    clock.advance(BRIEF + 1)
    swept_clean(storage)
    assert job(storage, "child", UPSTREAM).result == RESULT


def work_off(storage: JournaledStorage) -> None:
    while claimed := claim(storage, 9):
        finish(storage, *map(completing, claimed))
    swept_clean(storage)


def ends() -> set[int | None]:
    rows = (models.Job.objects.filter(queue=UPSTREAM), models.JobResult.objects.filter(queue=UPSTREAM))
    return {row.expires_at and round(row.expires_at.timestamp() * 1_000) for found in rows for row in found}


def test_postponed_expiry_hides_job_from_other_sweeps(make_storage: MakeStorage, clock: FakeClock) -> None:
    storage = started(make_storage, clock)
    done = clock.now()
    a_family(storage, clock)

    assert ends() == {done + BRIEF + PUT_OFF}

    storage.jobs.cancel(QUEUE, ["parent"])
    storage.sweep()
    assert state(storage, "child", UPSTREAM) is None


def test_postponed_expiry_is_restored_if_time_is_left(make_storage: MakeStorage, clock: FakeClock) -> None:
    storage = started(make_storage, clock)
    done = clock.now()
    a_family(storage, clock, retention=10 * BRIEF)
    assert ends() == {done + BRIEF + PUT_OFF, done + 10 * BRIEF + PUT_OFF}

    storage.jobs.cancel(QUEUE, ["parent"])
    swept_clean(storage)

    assert ends() == {done + 10 * BRIEF}
    assert job(storage, "child", UPSTREAM).result is None


@pytest.mark.parametrize("runs", [False, True], ids=["blocked", "active"])
def test_new_scheduler_pins_records_that_live_jobs_need(
    make_storage: MakeStorage, clock: FakeClock, runs: bool
) -> None:
    storage = started(make_storage, clock)
    a_family(storage, clock)
    if runs:
        finish(storage, completing(claim_one(storage, queues=[SLOW])))
        claim_one(storage)
    storage.close()

    again = started(make_storage, clock)
    clock.advance(BRIEF)
    swept_clean(again)
    assert job(again, "child", UPSTREAM).result == RESULT

    work_off(again)
    clock.advance(4_000_000)
    swept_clean(again)
    assert [counts(again, queue) for queue in (QUEUE, UPSTREAM, SLOW)] == [{}, {}, {}]


def test_new_scheduler_pins_no_unneeded_records(make_storage: MakeStorage, clock: FakeClock) -> None:
    storage = started(make_storage, clock)
    a_family(storage, clock)
    storage.close()
    client = make_storage(clock=clock)
    assert client.jobs.cancel(QUEUE, ["parent"])[0].status == "cancelled"
    assert state(client, "child", UPSTREAM) is State.COMPLETED

    again = started(make_storage, clock)
    swept_clean(again)

    assert state(again, "child", UPSTREAM) is None


def test_pinned_records_do_not_count_toward_limits(make_storage: MakeStorage, clock: FakeClock) -> None:
    policies = {UPSTREAM: QueuePolicy(retention=Retention(completed=Keep(count=1)))}
    storage = started(make_storage, clock, policies=policies)
    a_family(storage, clock, result_ttl=None)
    for number in range(3):
        enqueue(storage, id=str(number), queue=UPSTREAM, result_ttl=None)
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        clock.advance(1)
    swept_clean(storage)
    assert storage.reads.states(UPSTREAM, ["child", "0", "1", "2"]) == [
        State.COMPLETED,
        None,
        None,
        State.COMPLETED,
    ]

    storage.close()
    again = started(make_storage, clock, policies=policies)
    work_off(again)

    assert counts(again, UPSTREAM) == {State.COMPLETED: 1}
    assert models.Job.objects.filter(queue=UPSTREAM).aggregate(Max("expires_at")) == {"expires_at__max": None}


def test_many_pinned_records_do_not_delay_deletion_of_others(
    make_storage: MakeStorage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djqueue.storage.journaled.purging.LIMIT", 3)
    storage = started(make_storage, clock)
    ids = [f"child {number}" for number in range(10)]
    for job_id in [*ids, "other"]:
        enqueue(storage, id=job_id, queue=UPSTREAM, result_ttl=BRIEF)
    enqueue(storage, id="parent", depends_on=tuple((UPSTREAM, job_id) for job_id in ids))
    finish(storage, *map(completing, claim(storage, 11)))
    clock.advance(BRIEF + 1)

    for _ in range(5):
        storage.sweep()

    assert counts(storage, UPSTREAM) == {State.COMPLETED: 10}
    assert {record.result for record in storage.reads.jobs(UPSTREAM, ids) if record} == {RESULT}
