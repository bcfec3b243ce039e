"""Lists of very many rows in the tables, against those of few: see `pages`."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from tools.benchmarks.pages import database, page, quickest, visitor

QUEUES = 20
STATES = (*("completed",) * 46, *("failed",) * 8, *("cancelled",) * 8, "waiting", "delayed")
"""Of each sixty-four rows of a queue. Each that failed has a dead letter, while there is room."""
ENDED = 62
LETTERS = 10_000
"""Dead letters of a queue: as many as one keeps unless it is told otherwise."""


def measure(rows: list[int], samples: int) -> None:
    """Seed, measure, seed more, measure again."""
    from django.db import connection

    from djqueue.dashboard.reading import read_cache

    client = visitor()
    found: dict[str, list[float]] = {}
    there = 0
    for wanted in rows:
        began = time.perf_counter()
        seed(there, wanted)
        there = wanted
        print(f"{wanted:,} rows in {time.perf_counter() - began:.0f} s on {connection.vendor}", flush=True)
        with database():
            for word, read in reads(client):
                took = quickest(read, samples, read_cache.forget)
                found.setdefault(word, []).append(took)
                growth = f"   x{took / found[word][0]:.2f}" if there > rows[0] else ""
                print(f"{word:30} {took:10.2f} ms of {there:,}{growth}", flush=True)


def reads(client: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured."""
    yield "Jobs, completed", lambda: page(client, "jobs", state="completed")
    yield "Jobs, failed", lambda: page(client, "jobs", state="failed")
    yield "Queue, completed", lambda: page(client, "queue", queue="queue-07", state="completed")
    yield "Dead letters", lambda: page(client, "errors")
    yield "admin Jobs", lambda: changelist(client, "job")
    yield (
        "admin Jobs, state and queue",
        lambda: changelist(client, "job", state__exact="failed", queue="queue-07"),
    )
    yield "admin Jobs, queue", lambda: changelist(client, "job", queue="queue-07")
    yield "admin Jobs, last page listed", lambda: changelist(client, "job", p="200")
    yield "admin Dead letters", lambda: changelist(client, "deadletter")
    yield "admin Jobs, an id", lambda: changelist(client, "job", q="job-77")


def changelist(client: Any, model: str, **query: str) -> Any:
    """A plain list of the admin, whole."""
    from django.urls import reverse

    response = client.get(reverse(f"admin:djqueue_{model}_changelist"), query)
    assert response.status_code == 200, response.status_code
    return response


def seed(start: int, end: int) -> None:
    """Rows of jobs that were mirrored, in one statement for a million."""
    for first in range(start, end, 1_000_000):
        _seed(first, min(end, first + 1_000_000))


def _seed(start: int, end: int) -> None:
    from django.db import connection

    from djqueue.codecs import MSGPACK, encode
    from djqueue.models import DeadLetter, Job

    jobs, letters = Job._meta.db_table, DeadLetter._meta.db_table
    is_postgresql = connection.vendor == "postgresql"
    states = " ".join(f"WHEN {place} THEN '{state}'" for place, state in enumerate(STATES))
    numbers = (
        f"SELECT n FROM generate_series({start}, {end - 1}) n"
        if is_postgresql
        else f"WITH RECURSIVE s(n) AS (SELECT {start} UNION ALL SELECT n + 1 FROM s WHERE n < {end - 1}) "
        "SELECT n FROM s"
    )
    queue = f"'queue-' || substr('0' || (n %% {QUEUES}), -2)"
    if is_postgresql:
        queue = f"'queue-' || lpad((n %% {QUEUES})::text, 2, '0')"
    now = int(time.time() * 1_000) - 10_000_000
    ended = f"CASE WHEN n / {QUEUES} %% {len(STATES)} < {ENDED} THEN {now} + n END"
    state = f"CASE n / {QUEUES} %% {len(STATES)} {states} END"
    values = {
        "queue": queue,
        "job_id": "'job-' || n",
        "name": "'shop.jobs.send'",
        "state": state,
        "created_at": f"{now} + n",
        "run_at": f"{now} + n",
        "finished_at": ended,
    }
    fixed = {
        "payload": encode({"order": 1, "to": "ann@example.com"}, MSGPACK),
        "options": b"\x80",
        "content_type": MSGPACK,
    }
    _insert(Job, jobs, values, fixed, numbers)
    few = f"SELECT n FROM ({numbers}) s WHERE {state} = 'failed' AND n < {LETTERS * QUEUES * len(STATES)}"
    named = {name: values[name] for name in ("queue", "job_id", "name")}
    of_letters = {
        **named,
        "reason": "'timeout'",
        "entered_at": f"{now} + n",
        "expires_at": f"{now + 10**10}",
    }
    _insert(DeadLetter, letters, of_letters, {"error_type": "ValueError", "error_message": "no"}, few)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def _insert(model: Any, table: str, values: dict[str, str], fixed: dict[str, Any], numbers: str) -> None:
    """Rows of what is said; every other column has its default, or nothing."""
    from django.db import connection
    from django.db.models import NOT_PROVIDED

    columns: dict[str, str] = {}
    given: list[Any] = []
    for field in model._meta.concrete_fields:
        if field.primary_key:
            continue
        name = field.column
        if field.name in values:
            columns[name] = values[field.name]
            continue
        value = fixed.get(field.name)
        if field.name not in fixed and not field.null:
            value = field.get_default() if field.default is not NOT_PROVIDED else ""
        columns[name] = "%s"
        given.append(field.get_db_prep_save(value, connection))
    quote = connection.ops.quote_name
    if connection.vendor == "postgresql":
        types = {field.column: field.db_type(connection) for field in model._meta.concrete_fields}
        columns = {name: f"%s::{types[name]}" if value == "%s" else value for name, value in columns.items()}
    names = ", ".join(map(quote, columns))
    with connection.cursor() as cursor:
        chosen = ", ".join(columns.values())
        cursor.execute(f"INSERT INTO {quote(table)} ({names}) SELECT {chosen} FROM ({numbers}) s", given)
