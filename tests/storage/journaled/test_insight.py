"""What other processes than the scheduler see of queues and jobs, while it lives and while none does."""

import os
import re
from collections.abc import Callable

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.explain import Dependency
from djqueue.core.limiter import Rate
from djqueue.core.metrics import ALL_TIME, NO_TIMES, RunStats, Tiers
from djqueue.core.options import DAY, MSGPACK
from djqueue.core.overview import Totals
from djqueue.core.pages import position_of
from djqueue.core.states import State
from djqueue.models import Job, MetricBucket
from djqueue.storage.journaled import JournaledStorage, capped
from djqueue.storage.tables.inspector import DatabaseInspector
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    enqueue,
    enqueue_many,
    job,
    worker,
)

from .conftest import MakeStorage

pytestmark = pytest.mark.dialect


def some_of_each(storage: JournaledStorage) -> None:
    an_active_job(storage)
    a_completed_job(storage)
    a_failed_job(storage)
    a_cancelled_job(storage)
    a_delayed_job(storage)
    enqueue_many(storage, 3, name="other")


def test_client_has_schedulers_numbers(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    some_of_each(scheduler)
    scheduler.queues.set_limits(QUEUE, Rate(10, 60_000), 5)

    found = client.reads.overview()

    assert found.queues == scheduler.reads.overview().queues
    assert not found.capped
    assert found.queues[0].totals.enqueued == 8


def test_cancelled_job_that_was_enqueued_again_is_counted_once_after_restart(
    scheduler: JournaledStorage, client: JournaledStorage, make_storage: MakeStorage
) -> None:
    again, _ = a_cancelled_job(scheduler), a_cancelled_job(scheduler)
    scheduler.close()
    assert enqueue(client, id=again) == again

    restarted = make_storage()
    restarted.connect()

    [found] = client.reads.overview().queues
    assert (found.counts[State.CANCELLED], found.counts[State.WAITING]) == (1, 1)
    assert found.counts == restarted.reads.counts(QUEUE)
    assert job(restarted, again).state is State.WAITING


def test_without_scheduler_tables_are_read(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    some_of_each(scheduler)
    scheduler.queues.pause(QUEUE)
    scheduler.queues.set_limits(QUEUE, Rate(10, 60_000), 5)
    oldest = job(scheduler, scheduler.reads.page(QUEUE, State.WAITING, 1)[0].id)
    [before] = scheduler.reads.overview().queues
    scheduler.close()

    found = client.reads.overview()

    assert found.capped
    assert found.queues == [before._replace(totals=Totals(), tokens=10, oldest_at=oldest.created_at, used=1)]


def test_counts_without_scheduler_are_capped(
    client: JournaledStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "CAP", 10)
    enqueue_many(client, 12)
    enqueue_many(client, 8, queue="few")

    with CaptureQueriesContext(
        connection,
    ) as captured:
        many, few = client.reads.overview([QUEUE, "few"]).queues

    assert (many.counts[State.WAITING], few.counts[State.WAITING]) == (10, 8)
    counting = [query["sql"] for query in captured if "COUNT(" in query["sql"]]
    assert len(counting) == 1
    assert counting[0].count("COUNT(") == counting[0].count("LIMIT 11")


def test_new_scheduler_knows_how_many_have_ended(make_storage: MakeStorage) -> None:
    first = make_storage()
    first.connect()
    some_of_each(first)
    first.close()
    second = make_storage()
    second.connect()
    ended = (State.COMPLETED, State.CANCELLED)
    assert [second.reads.overview().queues[0].counts[state] for state in ended] == [1, 1]

    a_completed_job(second, queue="another")
    second.queues.clean(QUEUE, frozenset({State.COMPLETED}), before=1 << 60)

    for found in second.reads.overview().queues:
        assert found.counts == second.reads.counts(found.name)


def test_overview_of_scheduler_asks_no_table(scheduler: JournaledStorage) -> None:
    a_waiting_job(scheduler)

    with CaptureQueriesContext(connection) as captured:
        scheduler.reads.overview()

    assert list(captured) == []


def test_client_has_schedulers_explanation(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    waiting = a_waiting_job(client)
    scheduler.workers.register(worker())

    found = client.reads.explain(QUEUE, waiting)

    assert found is not None
    assert (found.verdict, found.before) == ("waiting_turn", 0)
    assert client.reads.explain(QUEUE, "nobody") is None


def test_no_workers_are_shown_without_scheduler(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    scheduler.workers.register(worker())
    waiting, active = a_waiting_job(scheduler, priority=-1), an_active_job(scheduler).id
    blocked = enqueue(scheduler, depends_on=((QUEUE, waiting), (QUEUE, a_completed_job(scheduler))))
    delayed, done = a_delayed_job(scheduler), a_completed_job(scheduler)
    scheduler.close()

    def verdict(job_id: str) -> str:
        found = client.reads.explain(QUEUE, job_id)
        assert found is not None
        if job_id == blocked:
            assert found.unmet == (Dependency(QUEUE, waiting, State.WAITING),)
        return found.verdict

    assert [verdict(one) for one in (waiting, active, blocked, delayed, done)] == [
        "no_worker",
        "lease_of_dead_worker",
        "blocked",
        "delayed",
        "not_pending",
    ]
    assert client.reads.explain(QUEUE, "nobody") is None
    client.queues.pause(QUEUE)
    assert verdict(waiting) == "paused"


def test_every_process_reads_metrics_buckets(scheduler: JournaledStorage, client: JournaledStorage) -> None:
    enqueue_many(scheduler, 3)
    client.workers.record_runs([RunStats(QUEUE, "a", 1, 0, 0, 0, NO_TIMES, NO_TIMES)])
    scheduler.sweep()
    span = (scheduler.reads.overview().at, scheduler.reads.overview().at + 1, DAY)

    for queues in (None, [QUEUE]):
        for by_name in (False, True):
            expected = scheduler.reads.series(queues, *span, by_name=by_name)
            assert client.reads.series(queues, *span, by_name=by_name) == expected
            assert sum(one.enqueued + one.completed for one in expected) == (1 if by_name else 3)


def test_new_scheduler_continues_with_buckets(make_storage: MakeStorage) -> None:
    for _ in range(2):
        storage = make_storage()
        storage.connect()
        enqueue_many(storage, 3)
        storage.close()  # what has not been noted is noted at the end

    now = storage.reads.overview().at
    [bucket] = storage.reads.series([QUEUE], now, now + 1, DAY)
    [ever] = storage.reads.cumulative()

    assert bucket.enqueued == ever.enqueued == 6


def test_metrics_that_cannot_be_written_are_written_later(
    scheduler: JournaledStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OperationalError("away")

    enqueue_many(scheduler, 3)
    with monkeypatch.context() as patched:
        patched.setattr("djqueue.storage.journaled.metrics.DatabaseMetrics._load", broken)
        with pytest.raises(StorageUnavailableError):
            scheduler.sweep()
    scheduler.sweep()

    now = scheduler.reads.overview().at
    assert scheduler.reads.series([QUEUE], now, now + 1, DAY)[0].enqueued == 3


def test_old_buckets_are_removed_in_parts(make_storage: MakeStorage) -> None:
    clock = FakeClock()
    storage = make_storage(clock=clock, metrics=Tiers(minute=DAY, hour=DAY, day=3 * DAY))
    storage.connect()
    enqueue(storage)
    storage.sweep()
    clock.advance(2 * DAY)
    storage.sweep()

    assert set(MetricBucket.objects.values_list("tier", flat=True)) == {DAY, ALL_TIME}


@pytest.mark.parametrize("cursor", [None, ">50:", "<50:"])
def test_page_is_read_by_index(
    client: JournaledStorage, analyze: Callable[[], None], cursor: str | None
) -> None:
    place = position_of(cursor, newest_first=True)

    plan = DatabaseInspector("default").placed(QUEUE, State.COMPLETED, place)[:11].explain()

    if connection.vendor == "sqlite":
        assert "djqueue_job_state_id" in plan
        assert "TEMP B-TREE" not in plan
    else:
        # Of an empty table, or of one that it knows nothing of, it would take any index.
        about = {
            "name": "n",
            "state": "completed",
            "payload": b"",
            "options": b"\x80",
            "content_type": MSGPACK,
        }
        times = {"created_at": 1, "run_at": 1}
        for queue, many in (("other", 3_000), (QUEUE, 30)):
            rows = (Job(queue=queue, job_id=str(n), **about, **times) for n in range(many))
            Job.objects.bulk_create(rows)
        analyze()
        plan = DatabaseInspector("default").placed(QUEUE, State.COMPLETED, place)[:11].explain()
        # Where an id leaves few rows, the primary key serves as well.
        assert "djqueue_job_state_id" in plan or (cursor and "djqueue_job_pkey" in plan)
        assert "Sort" not in plan


def test_diagnostics_describe_scheduler_and_its_journal(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    enqueue(scheduler)
    scheduler.sweep()

    for storage in (scheduler, client):
        lines = {line.key: line for line in storage.reads.diagnostics().lines}
        assert lines["scheduler.holder"].value.startswith(f"process {os.getpid()} on ")
        assert lines["scheduler.tick"].level == lines["journal.flushed"].level == "ok"
        assert lines["journal.backlog"].value == "0"
        assert lines["server.version"].value


def test_diagnostics_state_that_no_scheduler_is_running(client: JournaledStorage) -> None:
    with CaptureQueriesContext(connection) as captured:
        lines = {line.key: line for line in client.reads.diagnostics().lines}

    assert lines["scheduler.holder"].level == "bad"
    assert "journal.backlog" not in lines
    assert not any("COUNT(" in query["sql"] for query in captured)
    if connection.vendor == "postgresql":
        assert re.match(r"about \d+ rows", lines["tables.djqueue_job"].value.replace(",", ""))


def test_without_scheduler_flow_is_read_from_tables(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    first = a_completed_job(scheduler)
    second = enqueue(scheduler)
    third = enqueue(scheduler, depends_on=((QUEUE, first), (QUEUE, second)))
    fourth = enqueue(scheduler, queue="elsewhere", depends_on=((QUEUE, third),))
    there = scheduler.reads.flow(QUEUE, second)
    scheduler.close()

    found = client.reads.flow(QUEUE, second)

    assert found is not None
    assert found == there
    assert {node.id for node in found.nodes} == {first, second, third, fourth}


def test_flow_without_scheduler_shows_limited_number_of_blocked_jobs(
    client: JournaledStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "BLOCKED", 3)
    first = enqueue(client)
    for _ in range(5):
        enqueue(client, depends_on=((QUEUE, first),))

    with CaptureQueriesContext(connection) as captured:
        found = client.reads.flow(QUEUE, first)

    assert found is not None
    assert len(found.nodes) == 4
    assert any("LIMIT 3" in query["sql"] for query in captured)
