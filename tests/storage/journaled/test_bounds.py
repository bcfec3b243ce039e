"""What a queue keeps: the book of the database, its sums, and what is taken away at a time."""

from contextlib import closing, suppress
from random import Random

import pytest
from django.db import connection, transaction

from djqueue import models
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import Keep, KeepOfJob, KeepResults, Retention
from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage, purging
from djqueue.storage.journaled.inbox import NO_LIMIT
from djqueue.testing import factories as f
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES
from djqueue.testing.contract.case import MEASURED
from tests.storage.measured import sums, walk

pytestmark = pytest.mark.dialect

QUEUE = "bounded"
COUNTED = ("completed", "cancelled", "results")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make(tables, make_storage, clock):
    def make(retention):
        storage = make_storage(clock=clock, policies={QUEUE: QueuePolicy(retention=retention)})
        storage.connect()
        return storage

    return make


def the_scheduler(storage):
    return storage.active


def totals(storage, queue=MEASURED):
    found = the_scheduler(storage).journal.book.totals(queue)
    return {kind: found.get(kind, (0, 0)) for kind in COUNTED}


def expected(storage):
    storage.reads.counts(MEASURED)  # writes what is noted
    held = {*models.RetainedJob.objects.filter(queue=MEASURED, pinned=True).values_list("job_id", flat=True)}
    found = sums(storage, held)
    results = models.JobResult.objects.filter(queue=MEASURED).exclude(result=b"").exclude(job_id__in=held)
    free = models.Job.objects.filter(queue=MEASURED).exclude(job_id__in=held)
    numbers = {state: free.filter(state=state).count() for state in ("completed", "cancelled")}
    numbers["results"] = results.count()
    return {kind: (numbers[kind], found[kind]) for kind in COUNTED}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 6))]
)
def test_retained_totals_match_tables_after_random_steps(tables, seed):
    clock, random = FakeClock(), Random(seed)
    for begun in range(2):
        with closing(JournaledStorage(clock=clock, policies=POLICIES)) as storage:
            storage.connect()
            for _ in walk(storage, 10 * seed + begun, clock.advance, 60):
                the_scheduler(storage).inbox.take_in_all()
                held = the_scheduler(storage).engine.persistence.put_off(MEASURED)
                known = expected(storage)
                assert totals(storage) == known
                assert held == {
                    *models.RetainedJob.objects.filter(queue=MEASURED, pinned=True).values_list(
                        "job_id", flat=True
                    )
                }
                queue = the_scheduler(storage).engine.context.existing(MEASURED)
                assert (queue.dead.bytes if queue else 0) == sums(storage, ())["failed"]
                with transaction.atomic():
                    storage.enqueue([f.batch(ids=[random.choice("ab")], queue=MEASURED)])
        clock.advance(1)
    assert (
        models.RetainedJob.objects.count()
        == models.Job.objects.filter(queue=MEASURED, state__in=["completed", "cancelled"]).count()
    )


def test_commit_whose_answer_was_lost_counts_nothing_twice(make, monkeypatch):
    storage = make(Retention(completed=Keep(bytes=1_000)))
    journal = the_scheduler(storage).journal
    write, failed = journal._write, []

    def writing(buffer):
        write(buffer)
        if buffer.kept and not failed:
            failed.append(True)
            raise OSError("the answer was lost")

    monkeypatch.setattr(journal, "_write", writing)
    monkeypatch.setattr("djqueue.storage.journaled.journal.FIRST_RETRY", 0.01)
    f.a_completed_job(storage, queue=QUEUE, payload=bytes(100), result=bytes(50))
    with suppress(StorageUnavailableError):
        storage.reads.counts(QUEUE)
    storage.reads.counts(QUEUE)

    assert failed
    assert totals(storage, QUEUE) == {"completed": (1, 100), "cancelled": (0, 0), "results": (1, 50)}


def test_jobs_that_ended_before_queue_was_bounded_count(make, monkeypatch):
    monkeypatch.setattr("djqueue.storage.journaled.retentionindex.PAGE", 3)
    with closing(make(Retention())) as storage:
        for number in range(8):
            f.a_completed_job(storage, queue=QUEUE, id=str(number), payload=bytes(10), result=bytes(5))
        f.a_cancelled_job(storage, queue=QUEUE, payload=bytes(7))
        assert models.RetainedJob.objects.count() == models.RetainedTotal.objects.count() == 0

    with closing(make(Retention(completed=Keep(bytes=45)))) as storage:
        assert totals(storage, QUEUE) == {"completed": (8, 80), "cancelled": (1, 7), "results": (8, 40)}
        while any(storage.sweep()):
            pass
        assert storage.reads.counts(QUEUE)[State.COMPLETED] == 3

    with closing(make(Retention(logs=KeepOfJob(age=1_000)))):
        assert models.RetainedJob.objects.count() == models.RetainedTotal.objects.count() == 0


def test_great_surplus_is_worked_off_in_steps_while_jobs_go_on(make, monkeypatch):
    storage = make(Retention(completed=Keep(count=10), results=KeepResults(bytes=100)))
    monkeypatch.setattr(purging, "LIMIT", 50)
    f.enqueue_many(storage, 1_000, queue=QUEUE)
    f.finish(storage, *(f.completing(one, bytes(10)) for one in f.claim(storage, 1_000)))
    scheduler = the_scheduler(storage)
    remove, taken = scheduler.jobs.remove_unwritten, []

    def removing(queue, ids, *args):
        taken.append(len(ids))
        f.a_completed_job(storage, queue="other")
        return remove(queue, ids, *args)

    monkeypatch.setattr(scheduler.jobs, "remove_unwritten", removing)
    left = []
    while any(storage.sweep()):
        left.append(storage.reads.counts(QUEUE)[State.COMPLETED])

    assert left == [500, 10]
    assert max(taken) == 50
    assert storage.reads.counts("other")[State.COMPLETED] == len(taken)
    assert totals(storage, QUEUE)["results"] == (10, 100)


def test_surplus_jobs_are_found_by_index(make):
    storage = make(Retention(completed=Keep(bytes=1)))
    book = the_scheduler(storage).journal.book
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET enable_seqscan = off")
            cursor.execute("SET enable_bitmapscan = off")
            cursor.execute("SET enable_sort = off")  # whatever the table has had in it before

    in_order = book.in_order(QUEUE, State.COMPLETED)[:1_000].explain()
    results = book.results_in_order(QUEUE)[:1_000].explain()

    assert "djqueue_retained_order" in in_order
    assert "djqueue_retained_results" in results
    for plan in (in_order, results):
        assert "TEMP B-TREE" not in plan.upper()
        assert "Sort" not in plan


@pytest.mark.parametrize("sweep", ["expired", "surplus", "clean"])
def test_sweep_keeps_job_that_is_enqueued_again_meanwhile(make, make_storage, monkeypatch, sweep):
    storage, client = make(Retention(cancelled=Keep(count=1))), make_storage()
    old, _ = (f.a_cancelled_job(storage, queue=QUEUE) for _ in range(2))
    storage.reads.counts(QUEUE)
    active = the_scheduler(storage)
    remove = active.jobs.remove_unwritten

    def remove_later(queue, ids, *args):
        if old in ids and client.reads.states(queue, [old]) == [State.CANCELLED]:
            f.enqueue(client, queue=queue, id=old)
        return remove(queue, ids, *args)

    monkeypatch.setattr(active.jobs, "remove_unwritten", remove_later)
    if sweep == "expired":
        models.Job.objects.filter(job_id=old).update(expires_at=1)
        active._purge._purge_jobs(storage._clock.now())
    elif sweep == "surplus":
        active._purge._trim(QUEUE, State.CANCELLED)
    else:
        active.queues._clean_ended(QUEUE, frozenset({State.CANCELLED}), NO_LIMIT, 10)

    assert storage.reads.states(QUEUE, [old]) == [State.WAITING]
