"""Exports: reading all jobs, results, attempts and dead letters of a storage."""

from typing import Any

import pytest

from djqueue.core.job import JobRecord
from djqueue.core.states import TERMINAL, State
from djqueue.storage.base import Storage
from djqueue.storage.export import Export, ExportFilter, Page, attempt_rows, result_rows

from ..factories import (
    QUEUE,
    a_blocked_job,
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    completing,
    finish,
    job,
    retrying,
)
from .case import StorageCase

ALL = frozenset({"payload", "result"})
MANY = 12_000
"""Enough for several parts."""


class ExportContract(StorageCase):
    """For storages that can be read as a whole."""

    def test_export_contains_jobs_of_every_state(self, storage: Storage) -> None:
        ids = [
            a_completed_job(storage),
            a_failed_job(storage),
            a_cancelled_job(storage),
            an_active_job(storage).id,
            a_delayed_job(storage),
            a_blocked_job(storage),
            a_waiting_job(storage, priority=3, tags=("a", "b"), subject="shop.order:7"),
            a_waiting_job(storage, unique_key="key", concurrency_key="g", queue="other"),
        ]

        found = {row["id"]: row for row in rows(storage, "jobs")}

        assert set(ids) <= set(found)
        for row in found.values():
            assert row == job_row(job(storage, row["id"], row["queue"]))

    def test_export_of_empty_storage_has_no_rows(self, storage: Storage) -> None:
        assert [rows(storage, table) for table in ("jobs", "results", "attempts", "dead")] == [[]] * 4

    def test_export_parts_contain_each_of_many_jobs_once(self, storage: Storage) -> None:
        ids = [answer.id for answer in storage.enqueue([batch(MANY)])]
        wanted = ExportFilter("jobs", frozenset())
        parts = export(storage).parts(wanted, 4)

        found = [job_id for part in parts for page in pages(storage, wanted, part) for job_id in page["id"]]

        assert len(parts) > 1
        assert sorted(found) == sorted(ids)

    def test_export_contains_jobs_that_change_meanwhile_once(self, storage: Storage) -> None:
        ids = [answer.id for answer in storage.enqueue([batch(1_200)])]
        wanted = ExportFilter("jobs", frozenset())
        found: list[str] = []
        for part in export(storage).parts(wanted, 1):
            for page in export(storage).pages(wanted, part, 100):
                found += page["id"]
                finish(storage, *map(completing, claim(storage, 50)))

        assert sorted(found) == sorted(ids)

    def test_export_is_filtered_by_state_and_queue(self, storage: Storage) -> None:
        failed = a_failed_job(storage)
        delayed = a_delayed_job(storage)
        a_waiting_job(storage)
        elsewhere = a_failed_job(storage, queue="other")
        states = frozenset({State.FAILED, State.DELAYED})

        assert ids_of(storage, "jobs", states=states) == {failed, delayed, elsewhere}
        assert ids_of(storage, "jobs", states=states, queues=(QUEUE,)) == {failed, delayed}
        assert ids_of(storage, "jobs", queues=("nowhere",)) == set()
        assert ids_of(storage, "results", states=frozenset({State.COMPLETED})) == set()

    def test_export_is_filtered_by_time(self, storage: Storage) -> None:
        early = a_failed_job(storage)
        at = job(storage, early)
        self.advance(5)
        late = a_failed_job(storage)
        between = max(at.created_at, at.finished_at) + 1

        for table in ("jobs", "results", "attempts", "dead"):
            assert ids_of(storage, table, until=between) == {early}, table
            assert ids_of(storage, table, since=between) == {late}, table
            assert ids_of(storage, table, since=at.created_at, until=between) == {early}, table

    def test_exported_results_are_those_of_finished_jobs(self, storage: Storage) -> None:
        named = a_completed_job(storage, unique_key="k", subject="order:7", tags=("a", "b"))
        ended = {named, a_failed_job(storage), a_cancelled_job(storage)}
        an_active_job(storage)
        a_waiting_job(storage)

        found = rows(storage, "results")

        assert {row["id"] for row in found} == ended
        for row in found:
            [values] = result_rows(job(storage, row["id"]))
            assert tuple(row.values()) == values
        [row] = [row for row in found if row["id"] == named]
        assert (row["unique_key"], row["subject"], row["tags"]) == ("k", "order:7", ("a", "b"))
        assert all(row["state"] in {state.value for state in TERMINAL} for row in found)

    def test_exported_attempts_are_all_ended_attempts(self, storage: Storage) -> None:
        job_id = a_waiting_job(storage)
        [first] = claim(storage)
        self.advance(2)
        finish(storage, retrying(first))
        self.advance(3)
        [second] = claim(storage)
        finish(storage, completing(second))
        a_failed_job(storage)
        an_active_job(storage)

        found = rows(storage, "attempts")

        assert [row["outcome"] for row in found if row["id"] == job_id] == ["retried", "completed"]
        assert [row["wait_seconds"] is None for row in found if row["id"] == job_id] == [True, False]
        for row in found:
            assert tuple(row.values()) in list(attempt_rows(job(storage, row["id"])))

    def test_exported_dead_letters_have_their_errors(self, storage: Storage) -> None:
        job_id = a_failed_job(storage)
        [letter] = storage.reads.dead_letters(QUEUE)

        [row] = rows(storage, "dead")

        assert (row["id"], row["reason"], row["died_at"]) == (job_id, letter.reason, letter.entered_at)
        assert (row["error_type"], row["error_message"]) == (letter.error_type, letter.error_message)
        assert row["attempts"] == job(storage, job_id).attempts

    @pytest.mark.parametrize("table", ["jobs", "results", "attempts"])
    def test_removed_jobs_are_not_exported(self, storage: Storage, table: str) -> None:
        a_completed_job(storage)
        removed = a_completed_job(storage)
        storage.jobs.remove(QUEUE, [removed])

        assert removed not in ids_of(storage, table)


def export(storage: Storage) -> Export:
    found = storage.capabilities.export
    assert found is not None
    return found


def pages(storage: Storage, wanted: ExportFilter, part: Any) -> list[Page]:
    return list(export(storage).pages(wanted, part, 1_000))


def rows(storage: Storage, table: str, **chosen: Any) -> list[dict[str, Any]]:
    """Return all rows of a table, as a dict each."""
    wanted = ExportFilter(table, ALL, **chosen)
    return [
        dict(zip(page, values, strict=True))
        for part in export(storage).parts(wanted, 1)
        for page in pages(storage, wanted, part)
        for values in zip(*page.values(), strict=True)
    ]


def ids_of(storage: Storage, table: str, **chosen: Any) -> set[str]:
    return {row["id"] for row in rows(storage, table, **chosen)}


def job_row(record: JobRecord) -> dict[str, Any]:
    """Return the exported values of a job."""
    options = record.options
    return {
        "queue": record.queue,
        "id": record.id,
        "name": record.name,
        "state": record.state.value,
        "priority": options.priority,
        "attempts": record.attempts,
        "failures": record.failures,
        "stalls": record.stalls,
        "enqueued_at": record.created_at,
        "run_at": record.run_at,
        "started_at": record.started_at or None,
        "finished_at": record.finished_at or None,
        "concurrency_key": options.concurrency_key,
        "unique_key": options.unique_key,
        "subject": options.subject,
        "tags": options.tags,
        "headers": options.headers.text or None,
        "worker": record.worker or None,
        "reason": record.reason or None,
        "error_type": None if record.error is None else record.error.type,
        "error_message": None if record.error is None else record.error.message,
        "content_type": options.content_type,
        "payload": record.payload,
    }
