"""Exports: reading all jobs, results, attempts and dead letters of a storage."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from djqueue.core.job import JobRecord
from djqueue.core.states import TERMINAL, State
from djqueue.storage.base import Storage
from djqueue.storage.export import (
    ATTEMPT_COLUMNS,
    DEAD_COLUMNS,
    JOB_COLUMNS,
    PAGE_BYTES,
    RESULT_COLUMNS,
    Export,
    ExportFilter,
    Page,
    attempt_rows,
    result_rows,
)
from djqueue.storage.snapshots import JOB

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
    failing,
    finish,
    job,
    retrying,
)
from .case import StorageCase

T = TypeVar("T")
COLUMNS = {
    "jobs": frozenset({*JOB_COLUMNS, "payload"}),
    "results": frozenset(RESULT_COLUMNS),
    "attempts": frozenset(ATTEMPT_COLUMNS),
    "dead": frozenset(DEAD_COLUMNS),
}
"""All columns of each table."""
IDS = frozenset({"id"})
MANY = 12_000
"""Enough for several parts."""
LARGE = 900_000
"""Bytes of a payload or a result that nearly fill a page."""
TOGETHER = 6
"""Maximum number of jobs with such payloads in a page: one bucket of a hash is read as a whole."""


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
        wanted = ExportFilter("jobs", IDS)
        parts = export(storage).parts(wanted, 4)

        found = [job_id for part in parts for page in pages(storage, wanted, part) for job_id in page["id"]]

        assert len(parts) > 1
        assert sorted(found) == sorted(ids)

    def test_export_contains_jobs_that_change_meanwhile_once(self, storage: Storage) -> None:
        ids = [answer.id for answer in storage.enqueue([batch(1_200)])]
        wanted = ExportFilter("jobs", IDS)
        found: list[str] = []
        for part in export(storage).parts(wanted, 1):
            for page in export(storage).pages(wanted, part, 100):
                found += page["id"]
                finish(storage, *map(completing, claim(storage, 50)))

        assert sorted(found) == sorted(ids)

    @pytest.mark.parametrize("table", COLUMNS)
    def test_each_column_of_an_export_is_the_same_alone(self, storage: Storage, table: str) -> None:
        a_completed_job(storage, tags=("a",), subject="shop.order:7")
        a_failed_job(storage)
        a_waiting_job(storage, priority=2)
        [claimed] = claim(storage)
        finish(storage, retrying(claimed))
        complete = {(row["id"], row.get("number")): row for row in rows(storage, table)}
        key = COLUMNS[table] & {"id", "number"}

        for name in COLUMNS[table]:
            alone = rows(storage, table, columns=key | {name})
            assert len(alone) == len(complete)
            assert [row[name] for row in alone] == [
                complete[row["id"], row.get("number")][name] for row in alone
            ], name

    def test_export_pages_are_bounded_in_bytes(self, storage: Storage) -> None:
        ids = [answer.id for answer in storage.enqueue([batch(payloads=[bytes(LARGE)] * 12)])]
        wanted = ExportFilter("jobs", frozenset({"id", "payload"}))
        [part] = export(storage).parts(wanted, 1)

        found = pages(storage, wanted, part)

        assert sorted(job_id for page in found for job_id in page["id"]) == sorted(ids)
        assert {payload for page in found for payload in page["payload"]} == {bytes(LARGE)}
        assert max(len(page["id"]) for page in found) <= TOGETHER
        assert ids_of(storage, "jobs") == set(ids)

    def test_export_pages_of_results_are_bounded_in_bytes(self, storage: Storage) -> None:
        storage.enqueue([batch(12)])
        claimed = claim(storage, 12)
        finish(storage, *(completing(one, bytes(LARGE)) for one in claimed[:-1]), failing(claimed[-1]))
        wanted = ExportFilter("results", frozenset({"id", "result"}))
        [part] = export(storage).parts(wanted, 1)

        found = pages(storage, wanted, part)

        results = [result for page in found for result in page["result"]]
        assert sorted(job_id for page in found for job_id in page["id"]) == sorted(one.id for one in claimed)
        assert sorted(len(result or b"") for result in results) == [0, *[LARGE] * 11]
        assert max(sum(len(result or b"") for result in page["result"]) for page in found) < 2 * PAGE_BYTES

    def test_parts_of_a_snapshot_are_bounded_in_bytes(self, storage: Storage) -> None:
        ids = [answer.id for answer in storage.enqueue([batch(payloads=[bytes(LARGE)] * 12)])]

        with storage.snapshots.read() as parts:
            found = [part.records for part in parts if part.kind == JOB]

        assert sorted(record["id"] for records in found for record in records) == sorted(ids)
        assert max(sum(len(record["payload"]) for record in records) for records in found) < 2 * PAGE_BYTES

    def test_call_of_an_export_may_be_repeated(self, storage: Storage) -> None:
        ids = [answer.id for answer in storage.enqueue([batch(700)])]
        calls = 0

        def twice(call: Callable[..., T], /, *args: Any) -> T:
            nonlocal calls
            calls += 1
            call(*args)
            return call(*args)

        wanted = ExportFilter("jobs", COLUMNS["jobs"])
        [part] = export(storage).parts(wanted, 1)
        found = [job_id for page in export(storage).pages(wanted, part, 100, twice) for job_id in page["id"]]

        assert sorted(found) == sorted(ids)
        assert calls > 2

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

    def test_export_is_filtered_by_id_and_name(self, storage: Storage) -> None:
        failed = [a_failed_job(storage, name=name) for name in ("a", "b", "c")]
        waiting = a_waiting_job(storage, name="a")
        elsewhere = a_failed_job(storage, name="a", queue="other", id=failed[0])

        for table in ("jobs", "results", "attempts", "dead"):
            assert ids_of(storage, table, ids=(*failed[:2], "unknown")) == set(failed[:2]), table
            assert ids_of(storage, table, ids=("unknown",)) == set(), table
            assert ids_of(storage, table, names=("b", "c")) == set(failed[1:]), table
            assert ids_of(storage, table, ids=(failed[0],), names=("b",)) == set(), table
            found = rows(storage, table, names=("a",), ids=(failed[0], waiting))
            assert [row["queue"] for row in found if row["id"] == elsewhere] in (
                ["default", "other"],
                ["other", "default"],
            ), table
        assert ids_of(storage, "jobs", ids=(waiting,), columns=IDS) == {waiting}
        assert ids_of(storage, "jobs", ids=(waiting,), states=TERMINAL) == set()

    def test_export_is_filtered_by_options(self, storage: Storage) -> None:
        a = a_completed_job(storage, tags=("red", "blue"), unique_key="k1", subject="shop.order:1")
        b = a_completed_job(storage, tags=("reddish",), unique_key="k2", subject="red")
        a_completed_job(storage, name="red", unique_key="red")
        waiting = a_waiting_job(storage, tags=("green",), subject="shop.order:1")

        assert ids_of(storage, "jobs", subjects=("shop.order:1",)) == {a, waiting}
        assert ids_of(storage, "results", subjects=("shop.order:1", "red")) == {a, b}
        for table in ("jobs", "results"):
            assert ids_of(storage, table, tags=("red",)) == {a}, table
            assert ids_of(storage, table, tags=("reddish", "blue")) == {a, b}, table
            assert ids_of(storage, table, tags=("red",), columns=IDS) == {a}, table
            assert ids_of(storage, table, unique_keys=("k1", "k2", "k3")) == {a, b}, table
            assert ids_of(storage, table, unique_keys=("k1",), tags=("reddish",)) == set(), table

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


def rows(
    storage: Storage, table: str, columns: frozenset[str] | None = None, **chosen: Any
) -> list[dict[str, Any]]:
    """Return all rows of a table, as a dict each, with all columns or some."""
    wanted = ExportFilter(table, columns or COLUMNS.get(table, frozenset()), **chosen)
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
