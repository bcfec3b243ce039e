"""A producer in the measured project: a process that does what it is asked in lines of JSON.

A line is `[function, arguments]`; the answer is a line with what the function returned.
"""

import asyncio
import json
import os
import random
import resource
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django

TEXT = "x" * 100
ASYNC_NAMES = ("touch", "welcome", "receipt", "index", "unindex")
QUEUES = ("default", "emails", "search", "images")
IDLE = 0.1, 0.2
"""Least and most seconds in which a queue is idle before the next job."""
LIMIT = 4.0
"""Seconds after which calls that are made one after the other are enough."""
EMBEDDED = ExitStack()
"""A worker inside this process, and subscriptions, until the process ends."""


def job_type(name: str) -> Any:
    from shop import jobs

    return getattr(jobs, name)


def calls(count: int) -> list[tuple[tuple[()], dict[str, Any]]]:
    return [((), {"n": n, "user": f"user-{n}", "text": TEXT}) for n in range(count)]


def fill(count: int, names: list[str]) -> None:
    """Enqueue jobs of several names in turns, a hundred of each."""
    entries = calls(count)
    for turn, start in enumerate(range(0, count, 100)):
        job_type(names[turn % len(names)]).enqueue_many(entries[start : start + 100])


def fill_groups(count: int, names: list[str]) -> None:
    """Like `fill`, with a group for each hundred jobs of a name."""
    entries = calls(count)
    for turn, start in enumerate(range(0, count, 100)):
        touch = job_type(names[turn % len(names)]).using(concurrency_key=f"customer:{turn}")
        touch.enqueue_many(entries[start : start + 100])


def fill_unique(count: int, names: list[str]) -> None:
    """Like `fill`, with a unique key for each job, in transactions of a hundred jobs."""
    from django.db import transaction

    entries = calls(count)
    for turn, start in enumerate(range(0, count, 100)):
        with transaction.atomic():
            for _, arguments in entries[start : start + 100]:
                unique = job_type(names[turn % len(names)]).using(unique_key=f"order:{arguments['n']}")
                unique.enqueue(**arguments)


def bulk(count: int) -> float:
    """Return the jobs per second of one call."""
    entries = calls(count)
    start = time.perf_counter()
    job_type("touch").enqueue_many(entries)
    return count / (time.perf_counter() - start)


def bare_bulk(count: int) -> float:
    """Return the jobs per second of the driver alone, with the rows of the last jobs, in one transaction.

    PostgreSQL takes them by COPY, SQLite by executemany. The tables and their indexes are djqueue's.
    """
    from django.db import connection, transaction

    from djqueue.storage.database.stored import NEW_JOB, READY

    tables = {"djqueue_job": NEW_JOB, "djqueue_ready": READY}
    rows: dict[str, list[Any]] = {}
    with connection.cursor() as cursor:
        for table, columns in tables.items():
            cursor.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY id DESC LIMIT {count}")
            rows[table] = cursor.fetchall()[::-1]
        for table in tables:
            cursor.execute(f"DELETE FROM {table}")
        cursor.execute("VACUUM")
    start = time.perf_counter()
    with transaction.atomic():
        for table, columns in tables.items():
            write_rows(connection.connection, table, columns, rows[table])
    return count / (time.perf_counter() - start)


def write_rows(driver: Any, table: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    names = ", ".join(columns)
    if isinstance(driver, sqlite3.Connection):
        marks = ", ".join("?" * len(columns))
        driver.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)
        return
    with driver.cursor().copy(f"COPY {table} ({names}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def answers() -> bool:
    """Return whether the storage answers."""
    from djqueue import StorageUnavailableError
    from djqueue.client import get_storage

    try:
        get_storage().reads.overview()
    except StorageUnavailableError:
        return False
    return True


def single(count: int, durable: bool | None = None) -> float:
    """Return the jobs per second of calls one after the other."""
    touch, entries = job_type("touch"), calls(count)
    if durable is not None:
        touch = touch.using(durable=durable)
    start = time.perf_counter()
    done = 0
    for _, arguments in entries:
        touch.enqueue(**arguments)
        done += 1
        if time.perf_counter() - start > LIMIT:
            break
    return done / (time.perf_counter() - start)


def awaited(count: int) -> float:
    """Return the jobs per second of one coroutine that awaits call after call."""
    touch, entries = job_type("touch"), calls(count)

    async def produce() -> float:
        start = time.perf_counter()
        done = 0
        for _, arguments in entries:
            await touch.aenqueue(**arguments)
            done += 1
            if time.perf_counter() - start > LIMIT:
                break
        return done / (time.perf_counter() - start)

    return asyncio.run(produce())


def pickup(count: int) -> None:
    """Enqueue jobs that leave the time until they ran, each on an idle queue."""
    timed, marks = job_type("timed"), Path(os.environ["BENCH_MARKS"])
    before = marks.stat().st_size
    for number in range(1, count + 1):
        timed.enqueue(time.monotonic())
        deadline = time.monotonic() + 30
        while marks.stat().st_size < before + 8 * number:
            if time.monotonic() > deadline:
                raise RuntimeError("the job was not picked up within 30 seconds")
            time.sleep(0.001)
        time.sleep(random.uniform(*IDLE))


def roundtrip(count: int) -> list[float]:
    """Return the seconds of `enqueue_and_wait`, each on an idle queue."""
    answer, times = job_type("answer"), []
    for _ in range(count):
        start = time.perf_counter()
        answer.enqueue_and_wait(wait=30)
        times.append(time.perf_counter() - start)
        time.sleep(random.uniform(*IDLE))
    return times


def request(count: int, url: str) -> dict[str, list[float]]:
    """Return the seconds of single enqueues, and of what a project would do otherwise, in turns.

    On Redis, that is Celery's `delay` to the same server; on a database, one row by the ORM, also in the
    transaction of a request.
    """
    from django.contrib.auth.models import Group
    from django.db import transaction

    enqueue, entry = job_type("touch").enqueue, {"n": 1, "user": "user-1", "text": TEXT}
    calls: dict[str, Callable[[int], object]] = {"request_enqueue": lambda number: enqueue(**entry)}
    if url.startswith("redis"):
        from celery import Celery

        def receipt(n: int, user: str, text: str) -> None:
            pass

        delay = Celery(broker=url).task(receipt).delay
        calls["request_celery"] = lambda number: delay(**entry)
    else:
        calls["request_create"] = lambda number: Group.objects.create(name=f"alone {number}")
    times: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[int], object], number: int) -> None:
        start = time.perf_counter()
        call(number)
        if number >= 10:  # the first ones connect
            times.setdefault(name, []).append(time.perf_counter() - start)

    for number in range(count + 10):
        for name, call in calls.items():
            measure(name, call, number)
        if "request_create" in calls:
            with transaction.atomic():
                Group.objects.create(name=f"first {number}")
                measure("request_create_atomic", lambda it: Group.objects.create(name=f"other {it}"), number)
                measure("request_enqueue_atomic", calls["request_enqueue"], number)
    return times


def lower_priority() -> int:
    """Enqueue one job of a lower priority in each queue, and return their number."""
    names = ("touch", "welcome", "index")
    for name in names:
        job_type(name).using(priority=-5).enqueue(n=0, user="", text=TEXT)
    return len(names)


def limits() -> None:
    """Give each queue limits that are never reached."""
    from djqueue import Queue

    for name in QUEUES:
        Queue(name).set_limits(rate="10000000/s", concurrency=100_000)


def subscribe() -> None:
    """Listen to all events of all queues."""
    from djqueue import Queue

    for name in QUEUES:
        EMBEDDED.callback(Queue(name).on("*", lambda event: None))


def work(concurrency: int | None) -> None:
    """Run a worker inside this process, as the docs have it for the memory storage."""
    from djqueue import Worker

    EMBEDDED.enter_context(Worker(concurrency=concurrency) if concurrency else Worker())


def waiting() -> int:
    from djqueue import Queue

    return sum(Queue(name).counts()["waiting"] for name in QUEUES)


def resident() -> int:
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(fill, fill_groups, fill_unique, bulk, bare_bulk, single, awaited, request, pickup, roundtrip),
        *(lower_priority, limits, subscribe, work, waiting, resident, answers),
    )
}


def main() -> None:
    """Do what each line asks, until standard input ends."""
    django.setup()
    with EMBEDDED:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(FUNCTIONS[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
