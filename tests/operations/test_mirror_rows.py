"""Retention of rows of ended jobs in the mirror."""

from datetime import UTC, datetime

import pytest
from django.db import connection
from django.db.models import QuerySet

from djqueue import models
from djqueue.core.states import State
from djqueue.operations import mirror as mirroring
from djqueue.operations import mirrortables
from djqueue.testing import factories as f
from tests.admin.factories import make_job
from tests.operations.looking import copy_all

pytestmark = pytest.mark.dialect
HOUR = 3_600_000


@pytest.fixture
def bounded(make_storage):
    """A storage whose mirror keeps three rows of each outcome, and those of cancelled jobs for a minute."""
    keep = {"COMPLETED": {"COUNT": 3}, "FAILED": {"COUNT": 3}, "CANCELLED": {"COUNT": 3, "AGE": 60}}
    return make_storage(mirror={"KEEP": keep})


def there(state):
    return list(models.Job.objects.filter(state=state.value).order_by("id").values_list("job_id", flat=True))


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.CANCELLED])
def test_newest_rows_of_each_outcome_are_kept(bounded, make_mirror, clock, state):
    for number in range(5):
        f.JOB_IN[state](bounded, id=str(number))
        clock.advance(1)
    f.a_completed_job(bounded, id="elsewhere", queue="other")
    f.enqueue(bounded, id="waiting")

    copy_all(made := make_mirror(bounded))
    clock.advance(mirroring.SWEEP_EVERY)
    made.copy_once()

    assert there(state)[:3] == ["2", "3", "4"]
    assert models.Job.objects.filter(queue=f.QUEUE).count() == 4
    assert models.Job.objects.filter(queue="other").exists()
    belonging = {row.job_id for model in mirroring_tables() for row in model.objects.filter(queue=f.QUEUE)}
    assert belonging <= {"2", "3", "4"}


def mirroring_tables():
    return models.JobResult, models.DeadLetter, models.JobAttempt, models.JobLog


def test_no_row_is_kept_longer_than_its_age(bounded, make_mirror, clock):
    f.a_cancelled_job(bounded, id="cancelled", result_ttl=HOUR)
    f.a_completed_job(bounded, id="completed", result_ttl=HOUR)
    copy_all(made := make_mirror(bounded))
    assert models.Job.objects.count() == 2

    clock.advance(61_000)
    made.copy_once()

    assert there(State.CANCELLED) == []
    assert there(State.COMPLETED) == ["completed"]


def test_starting_mirror_removes_surplus_rows_of_another(make_storage, make_mirror, clock):
    unbounded = make_storage()
    for number in range(5):
        f.a_completed_job(unbounded, id=str(number))
        clock.advance(1)
    copy_all(first := make_mirror(unbounded))
    first.close()
    assert models.Job.objects.count() == 5

    second = make_mirror(make_storage(mirror={"KEEP": {"COMPLETED": {"COUNT": 2}}}))
    second.copy_once()

    assert there(State.COMPLETED) == ["3", "4"]


def test_large_surplus_of_rows_is_removed_in_steps(bounded, make_mirror, clock, monkeypatch):
    monkeypatch.setattr(mirrortables, "PAGE", 10)
    monkeypatch.setattr(mirroring, "STEPS_PER_ROUND", 3)
    f.enqueue_many(bounded, 100)
    f.finish(bounded, *map(f.completing, f.claim(bounded, 100)))
    made = make_mirror(bounded)
    found = []
    for _ in range(6):
        f.enqueue(bounded, delay=HOUR)
        made.copy_once()
        found.append((len(there(State.COMPLETED)), len(there(State.DELAYED))))
        clock.advance(mirroring.SWEEP_EVERY)

    assert found == [(70, 1), (40, 2), (10, 3), (3, 4), (3, 5), (3, 6)]


def plan(rows: QuerySet) -> str:
    """How the database looks for rows when there are many."""
    if connection.vendor == "postgresql":
        row = make_job("completed", expires_at=datetime(2096, 6, 1, tzinfo=UTC))
        values = {field.attname: getattr(row, field.attname) for field in row._meta.fields}
        new = [models.Job(**{**values, "id": None, "job_id": str(number)}) for number in range(1_000)]
        models.Job.objects.bulk_create(new)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE djqueue_job")
            cursor.execute("SET enable_seqscan = off")
            cursor.execute("SET enable_bitmapscan = off")
            cursor.execute("SET enable_sort = off")  # whatever the table has had in it before
    return rows.explain()


@pytest.mark.parametrize("what", ["expired", "behind", "before"])
def test_purge_does_not_scan_the_whole_table(bounded, make_mirror, what):
    made = make_mirror(bounded).tables
    looks = {
        "expired": (made.expired(10**12)[:1_000], "djqueue_job_expires"),
        "behind": (made.behind("q", State.COMPLETED, 1_000), "djqueue_job_ended"),
        "before": (made.before("q", State.COMPLETED, 10**12, 5)[:1_000], "djqueue_job_ended"),
    }
    rows, index = looks[what]

    found = plan(rows)

    assert index in found
    assert "TEMP B-TREE FOR ORDER BY" not in found.upper()
    assert "SCAN djqueue_job" not in found.replace("SCAN djqueue_job USING INDEX djqueue_job_expires", "")
