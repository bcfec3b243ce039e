"""Payloads that stay in the tables until their jobs are claimed."""

import logging
from collections.abc import Callable
from random import Random

import pytest
from django.db import OperationalError

from djqueue import models
from djqueue.core.engine.claimer import PREFETCH
from djqueue.core.enginejob import EngineJob
from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage, inbox
from djqueue.testing.factories import (
    QUEUE,
    claim,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    releasing,
)

from .conftest import MakeStorage

pytestmark = pytest.mark.dialect

COUNT = 2 * PREFETCH + 100

Restart = Callable[[], JournaledStorage]


@pytest.fixture
def restart(make_storage: MakeStorage, scheduler: JournaledStorage) -> Restart:
    """The next scheduler, in the place of the last one."""
    latest = [scheduler]

    def again() -> JournaledStorage:
        latest[-1].close()
        latest.append(make_storage())
        latest[-1].connect()
        return latest[-1]

    return again


def fill(storage: JournaledStorage, count: int = COUNT) -> list[bytes]:
    payloads = [b"payload %d" % number for number in range(count)]
    for payload in payloads:
        enqueue(storage, payload=payload, durable=False)
    return payloads


def engine_jobs(storage: JournaledStorage) -> list[EngineJob]:
    scheduler = storage._scheduler
    assert scheduler is not None
    queue = scheduler.engine.context.existing(QUEUE)
    assert queue is not None
    return list(queue.jobs.values())


def loaded(storage: JournaledStorage) -> int:
    return sum(job.unloaded is None for job in engine_jobs(storage))


def test_claims_read_payloads_of_next_jobs_too(scheduler: JournaledStorage, restart: Restart) -> None:
    payloads = fill(scheduler)
    storage = restart()
    assert loaded(storage) == 0

    first = claim(storage, 10)
    assert loaded(storage) == 10 + PREFETCH

    rest = [one for _ in range(COUNT // 10) for one in claim(storage, 10)]
    assert [one.payload for one in [*first, *rest]] == payloads


def test_jobs_without_their_payloads_can_be_read_and_changed(
    scheduler: JournaledStorage, restart: Restart
) -> None:
    ids = [enqueue(scheduler, payload=b"old %d" % number) for number in range(6)]
    storage = restart()

    assert job(storage, ids[0]).payload == b"old 0"
    assert storage.jobs.replace_payload(QUEUE, ids[1], b"new 1", b"wrong") == "changed"
    assert storage.jobs.replace_payload(QUEUE, ids[1], b"new 1", b"old 1") == "updated"
    assert storage.jobs.update(QUEUE, [ids[2]], priority=5) == [True]
    assert storage.jobs.move(QUEUE, [ids[3]], "elsewhere") == ["moved"]
    assert storage.jobs.cancel(QUEUE, [ids[4]])[0].status == "cancelled"
    storage = restart()

    assert job(storage, ids[3], "elsewhere").payload == b"old 3"
    assert job(storage, ids[4]).payload == b"old 4"
    here = [one.payload for one in claim(storage, 9) if one.queue == QUEUE]
    assert here == [b"old 2", b"old 0", b"new 1", b"old 5"]


def test_nothing_is_claimed_while_payloads_cannot_be_read(
    scheduler: JournaledStorage, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = fill(scheduler, 20)
    storage = restart()

    def fails(_: object) -> None:
        raise OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        assert storage._scheduler is not None
        patched.setattr(storage._scheduler._payloads, "_read", fails)
        assert claim(storage, 10) == []
        assert counts(storage)[State.WAITING] == 20

    assert [one.payload for one in claim(storage, 20)] == payloads


def test_job_whose_row_was_deleted_does_not_hold_up_others(
    scheduler: JournaledStorage, restart: Restart, caplog: pytest.LogCaptureFixture
) -> None:
    payloads = fill(scheduler, 3)
    storage = restart()
    models.Job.objects.filter(job_id=engine_jobs(storage)[1].id).delete()

    with caplog.at_level(logging.ERROR, "djqueue.scheduler"):
        found = claim(storage, 3)

    assert [one.payload for one in found] == [payloads[0], b"", payloads[2]]
    assert "its payload is lost" in caplog.text


def test_payloads_of_long_inbox_stay_in_table(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "PAGE", 10)
    client = make_storage()
    enqueue_many(client, 35)
    storage = make_storage()
    storage.connect()

    assert loaded(storage) == 10
    assert not models.Job.objects.filter(inbox=True).exists()
    expected = list(models.Job.objects.order_by("id").values_list("payload", flat=True))
    assert [one.payload for one in claim(storage, 40)] == [bytes(payload) for payload in expected]


@pytest.mark.parametrize("seed", range(3))
def test_each_job_runs_once_with_its_payload_over_many_schedulers(
    scheduler: JournaledStorage, restart: Restart, seed: int
) -> None:
    random = Random(seed)
    payloads = fill(scheduler, 300)
    done: list[bytes] = []
    storage = scheduler
    while len(done) < 300:
        storage = restart()
        for claimed in claim(storage, random.randrange(1, 80)):
            if random.random() < 0.8:
                finish(storage, completing(claimed))
                done.append(claimed.payload)
            else:
                finish(storage, releasing(claimed))

    assert sorted(done) == sorted(payloads)
