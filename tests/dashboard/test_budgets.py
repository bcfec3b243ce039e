"""Database budgets of pages: few statements, none of which scans all jobs."""

import re
from functools import cache
from typing import Any

import pytest
from django.db import connection

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.dashboard import boards, problems
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.urls import PAGES
from djqueue.models import BulkKind, BulkOperation, CronJob
from djqueue.operations import bulk
from djqueue.storage.bulkwrites import QueueShare
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.bulk_writes import report
from tests.admin.factories import (
    change_url,
    list_url,
    make_attempt,
    make_job,
    make_log,
    make_result,
)
from tests.dashboard.acting import add_error
from tests.dashboard.visiting import CAPTURED, logged_in, make_superuser, visit
from tests.statements import recorded

pytestmark = pytest.mark.django_db

LIST, DETAIL = 5, 6
"""Statements of a page, with the two that read the session and the user."""
STORED = 2
"""More of a detail whose data is in tables too."""
EXPLAINED = 11
"""More of the page of a job in tables: its record, why it is not running, and the jobs around it."""
READ = 11
"""Statements of what all viewers share for a second, of up to fifty queues in tables."""
COUNTED = re.compile(
    r"SELECT queue, (name, )?COUNT\(\*\) FROM djqueue_(ready|held|claim) WHERE .* GROUP BY queue"
)
"""Counts of waiting jobs by name, of which a queue with very many has one in half a minute."""
BULK_WRITE = {"bulk_write", "bulk_write_cancel", "bulk_write_retry"}
"""Pages of a bulk write, which the in-memory storage lacks."""
DETAILS = {"job", "edit", "workflow", "worker", "queue", "operation", "errors_preview"} | BULK_WRITE
BACKENDS = {
    "memory": "djqueue.storage.memory.MemoryStorage",
    "tables": "djqueue.storage.database.DatabaseStorage",
}
SHOWN = [page for page in PAGES if page.method == "GET" and "stream" not in page.name]
MODELS = ("job", "jobresult", "deadletter")


@pytest.fixture(params=BACKENDS)
def backend(request, settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": BACKENDS[request.param]}}
    for name in ("emails", "reports", "images"):
        queue = Queue(name)
        queue.enqueue({"to": "ann@example.com"}, id="job-1")
        queue.enqueue_many(range(60))
    begun = bulk.begin("default", BulkKind.RETRY, bulk.Selection(("emails",)), expected=3)
    BulkOperation.objects.filter(pk=begun.pk).update(id=CAPTURED["pk"])
    CronJob(pk=CAPTURED["pk"], name="night", job_name="emails", schedule="0 4 * * *").save(force_insert=True)
    add_error()
    if (kept := get_storage().capabilities.bulk_writes) is not None:
        kept.keep(report(CAPTURED["write"], shares={"emails": QueueShare(3, 2, 20, 1)}))
    return request.param


def statements(act: Any) -> list[str]:
    with recorded() as found:
        act()
    return found


def check(found: list[str]) -> None:
    """None counts without an end, none reads all jobs to say which values there are, none skips rows."""
    for sql in found:
        assert "OFFSET" not in sql, sql
        assert "DISTINCT" not in sql, sql
        assert "COUNT(" not in sql or "LIMIT" in sql or "djqueue_cron" in sql or COUNTED.match(sql), sql


def test_pages_with_cached_reads_run_few_statements(backend, monkeypatch):
    # On a busy machine, more than a second may pass between the two visits.
    monkeypatch.setattr(read_cache, "_clock", FakeClock())
    # Pages share the health checks for ten seconds, but in the transaction of a test each would run them.
    monkeypatch.setattr(problems, "start_checks", cache(problems.start_checks))
    client = logged_in(make_superuser())
    for page in SHOWN:
        is_absent = page.name == "worker" or (page.name in BULK_WRITE and backend == "memory")
        assert visit(client, page).status_code == (404 if is_absent else 200), page.name
        # A visit of the next minute reads another range of time.
        found = min((statements(lambda page=page: visit(client, page)) for _ in range(2)), key=len)
        check(found)
        own = [sql for sql in found if "djqueue_leader_lease" not in sql]
        limit = DETAIL if page.name in DETAILS else LIST
        if backend == "tables" and page.name in DETAILS:
            limit += STORED + (EXPLAINED if page.name == "job" else 0)
        assert len(own) <= limit, (page.name, own)


@pytest.mark.parametrize("many", [1, 40])
@pytest.mark.dialect
def test_shared_reads_run_as_many_statements_for_any_number_of_queues(many, backend):
    for number in range(many):
        Queue(f"queue-{number:02}").enqueue(1)
    read_cache.clear()
    found = statements(lambda: read_cache.read("board", boards.read_board))
    check(found)
    assert len(found) <= READ, found


def plan_of(sql: str) -> str:
    """How the database would find the rows, had it very many."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for way in ("seqscan", "bitmapscan", "sort"):
                cursor.execute(f"SET LOCAL enable_{way} = off")
            cursor.execute(f"EXPLAIN {sql}")
        else:
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        return "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())


PLANNED = [
    ("djqueue_job", {}),
    ("djqueue_job", {"state__exact": "failed", "queue": "emails"}),
    ("djqueue_job_result", {}),
    ("djqueue_dead_letter", {}),
]


def reads(found: list[str], table: str) -> list[str]:
    """What is read of a table's rows; a bounded count of all of them takes any 10,001."""
    return [sql for sql in found if f'"{table}"' in sql and "COUNT(" not in sql]


@pytest.mark.parametrize(("table", "query"), PLANNED)
@pytest.mark.dialect
def test_admin_list_finds_its_rows_by_an_index(table, query, memory):
    make_log(make_job("failed"), "hello")
    model = table.replace("djqueue_", "").replace("_", "")
    client = logged_in(make_superuser())
    asked = reads(statements(lambda: client.get(list_url(model, **query))), table)
    assert len(asked) == 2
    for sql in asked:
        check_plan(table, sql)


def check_plan(table: str, sql: str) -> None:
    plan = plan_of(sql)
    assert f"Seq Scan on {table}" not in plan, plan
    # Without a filter: rows in the order of their numbers, from the newest, as many as are wanted.
    assert "WHERE" not in sql or not re.search(rf"SCAN {table}(?! USING)", plan), plan
    assert "TEMP B-TREE" not in plan, plan
    assert "Sort" not in plan, plan


@pytest.mark.parametrize("query", [{}, {"queue": "emails"}])
@pytest.mark.parametrize("model", MODELS)
def test_admin_list_runs_few_statements(model, query, memory):
    for state in ("waiting", "completed", "failed"):
        job = make_job(state)
        make_result(job, 1)
        make_attempt(job)
        make_log(job, "hello")
    client = logged_in(make_superuser())
    address = list_url(model, **query)
    assert client.get(address).status_code == 200
    found = statements(lambda: client.get(address))
    check(found)
    assert len(found) <= LIST, found


@pytest.mark.parametrize("state", ["waiting", "completed", "failed"])
def test_admin_page_of_row_runs_few_statements(state, memory):
    job = make_job(state)
    rows = [job, make_result(job, 1)]
    make_attempt(job)
    make_log(job, "hello")
    client = logged_in(make_superuser())
    for row in rows:
        assert client.get(change_url(row)).status_code == 200
        found = statements(lambda row=row: client.get(change_url(row)))
        check(found)
        assert len(found) <= DETAIL, found
