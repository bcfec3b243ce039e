"""The database storage can be read as a whole."""

from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from djqueue import models
from djqueue.storage.export import ExportFilter
from djqueue.storage.journaled import JournaledStorage, export
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.exporting import rows

pytestmark = pytest.mark.dialect

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


class TestSchedulerExport(contract.ExportContract):
    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        with closing(JournaledStorage(clock=self.clock, policies=contract.POLICIES)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


@pytest.fixture
def storage(tables):
    with closing(JournaledStorage()) as storage:
        yield storage


def test_schedules_are_exported(storage):
    models.CronJob.objects.create(
        name="nightly", job_name="shop.count", every=timedelta(hours=2), start_at=AT
    )
    models.CronJob.objects.create(name="weekly", job_name="shop.sum", schedule="0 3 * * 1", queue="slow")

    nightly, weekly = rows(storage, "cron")

    assert (nightly["name"], nightly["job"], nightly["every_seconds"]) == ("nightly", "shop.count", 7_200.0)
    assert (nightly["queue"], nightly["schedule"]) == (None, None)
    assert nightly["start_at"] == AT.timestamp() * 1_000
    assert (weekly["queue"], weekly["schedule"], weekly["every_seconds"]) == ("slow", "0 3 * * 1", None)


def test_bulk_operations_are_exported(storage):
    models.BulkOperation.objects.create(
        kind="cancel",
        filter={"queues": ["mail"], "state": "waiting"},
        user="ann",
        created_at=AT,
        start_at=AT,
        done=3,
        refused={"active": 2, "not_found": 1},
    )

    [row] = rows(storage, "bulk")

    assert (row["kind"], row["queue"], row["user"], row["done"], row["refused"]) == (
        "cancel",
        "mail",
        "ann",
        3,
        3,
    )
    assert row["begun_at"] == AT.timestamp() * 1_000


def test_attempt_of_deleted_job_is_exported_without_name(storage):
    models.JobAttempt.objects.create(
        queue="mail",
        job_id="gone",
        attempt=1,
        worker="w",
        started_at=AT,
        finished_at=AT + timedelta(seconds=2),
        outcome="failed",
        error_type="ValueError",
        error_message="no",
    )

    [row] = rows(storage, "attempts")

    assert (row["name"], row["run_seconds"], row["error_type"]) == (None, 2.0, "ValueError")


def test_export_parts_are_balanced_when_most_ids_are_missing(storage, monkeypatch):
    monkeypatch.setattr(export, "LEAST", 500)
    numbers = [*range(1, 20_000, 100), *range(20_000, 21_800)]
    models.DeadLetter.objects.bulk_create(
        models.DeadLetter(
            id=at, queue="q", job_id=str(at), name="n", reason="r", entered_at=AT, expires_at=AT
        )
        for at in numbers
    )
    wanted = ExportFilter("dead", frozenset())

    parts = storage.capabilities.export.parts(wanted, 3)
    found = [
        [job_id for page in storage.capabilities.export.pages(wanted, part, 1_000) for job_id in page["id"]]
        for part in parts
    ]

    assert [part.rows for part in parts] == [len(ids) for ids in found]
    assert len(parts) == 3
    assert max(map(len, found)) < 1_400
    assert [job_id for ids in found for job_id in ids] == [str(at) for at in numbers]


def test_export_pages_are_read_by_id_range(storage, django_assert_num_queries):
    models.DeadLetter.objects.bulk_create(
        models.DeadLetter(queue="q", job_id=str(at), name="n", reason="r", entered_at=AT, expires_at=AT)
        for at in range(25)
    )
    wanted = ExportFilter("dead", frozenset())
    [part] = storage.capabilities.export.parts(wanted, 4)

    found = [page["id"] for page in storage.capabilities.export.pages(wanted, part, 10)]

    assert [len(ids) for ids in found] == [10, 10, 5]
    assert [job_id for ids in found for job_id in ids] == [str(at) for at in range(25)]
