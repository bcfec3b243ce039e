"""Jobs about a subject in the tables: what a read of them costs, and what other processes see."""

from collections.abc import Callable

import pytest

from djqueue.core.options import MSGPACK
from djqueue.core.states import State
from djqueue.models import Job
from djqueue.storage.journaled import JournaledStorage
from djqueue.storage.tables.inspector import DatabaseInspector
from djqueue.testing.factories import QUEUE, a_completed_job, a_delayed_job, enqueue

pytestmark = pytest.mark.dialect

ORDER = "shop.order:7"


def rows(count: int) -> None:
    about = {"name": "n", "state": "completed", "payload": b"", "options": b"\x80", "content_type": MSGPACK}
    Job.objects.bulk_create(
        [
            Job(
                queue=QUEUE,
                job_id=f"j{n}",
                created_at=1_000 + n,
                run_at=1_000 + n,
                subject=f"shop.order:{n % 50}" if n % 2 else None,
                **about,
            )
            for n in range(count)
        ]
    )


def test_page_is_read_by_index(client: JournaledStorage, analyze: Callable[[], None]) -> None:
    rows(5_000)
    analyze()

    for cursor in (None, ">1500:500"):
        for queues in (None, [QUEUE]):
            plan = DatabaseInspector("default").mentions(ORDER, cursor, queues)[:11].explain()
            assert "djqueue_job_subject" in plan
            assert "TEMP B-TREE" not in plan
            assert "Sort" not in plan


def test_jobs_without_subject_are_not_in_index(client: JournaledStorage) -> None:
    [index] = [one for one in Job._meta.indexes if one.name == "djqueue_job_subject"]

    assert str(index.condition) == "(AND: ('subject__isnull', False))"


def test_every_process_reads_subjects_from_tables(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    ids = [a_completed_job(scheduler, subject=ORDER), a_delayed_job(scheduler, subject=ORDER)]
    scheduler.reads.jobs_about(ORDER, 9)  # as a scheduler has it, it is written
    ids.append(enqueue(client, subject=ORDER))

    found = client.reads.jobs_about(ORDER, 9).jobs

    assert {one.id for one in found} >= set(ids[:2])
    scheduler.close()
    assert {(one.id, one.state) for one in client.reads.jobs_about(ORDER, 9).jobs} == {
        (ids[0], State.COMPLETED),
        (ids[1], State.DELAYED),
        (ids[2], State.WAITING),
    }
