"""`python -m tools.benchmarks.pages`: what the dashboard's pages cost, and how that grows.

`overview`: the first page, and that of queues, of 200 queues against 20; each queue has waiting jobs and
an hour of metrics. `lists`: lists of a million jobs in the tables against those of ten thousand. `unchanged`:
what an open page that has not changed costs against one that has. `scrapes`: the metrics of a million jobs.

Each figure is the quickest of some, as others use a machine, too; both sides of a ratio are of one process.
`python -m tests.servers postgresql` before the command measures that database.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FEW, MANY = 20, 200
"""Queues."""
MINUTE = 60_000


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.pages", description=__doc__)
    parser.add_argument("what", choices=["overview", "lists", "unchanged", "scrapes"])
    parser.add_argument("--storage", choices=sorted(STORAGES), action="append", help="default: all")
    parser.add_argument(
        "--rows",
        type=int,
        action="append",
        help="of lists (default: 10,000 and 1,000,000), and jobs of scrapes",
    )
    parser.add_argument("--samples", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, django_in(folder):
        if options.what in ("overview", "unchanged"):
            measure = overview if options.what == "overview" else unchanged
            for name in options.storage or sorted(STORAGES):
                with STORAGES[name]() as storage:
                    measure(name, storage, options.samples)
        elif options.what == "scrapes":
            from tools.benchmarks import scrapes

            for name in options.storage or sorted(STORAGES):
                with STORAGES[name]() as storage:
                    scrapes.measure(name, storage, max(options.rows or [1_000_000]), options.samples)
        else:
            from tools.benchmarks import lists

            lists.measure(options.rows or [10_000, 1_000_000], options.samples)
    return 0


@contextmanager
def django_in(folder: str) -> Iterator[None]:
    """The tests' project with a new database."""
    os.environ["DJQUEUE_TEST_DIR"] = folder
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    os.environ["PYTEST_XDIST_WORKER"] = "pages"
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.DEBUG = False
    django.setup()
    if settings.DATABASES["default"]["ENGINE"].endswith("postgresql"):
        _make_postgresql_database(settings.DATABASES["default"])
    call_command("migrate", verbosity=0)
    yield
    from django.db import connections

    connections.close_all()


def _make_postgresql_database(said: dict[str, Any]) -> None:
    import psycopg

    with psycopg.connect(f"{os.environ['DJQUEUE_TEST_PG']}", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{said["NAME"]}"')
        connection.execute(f'CREATE DATABASE "{said["NAME"]}"')


# Storages.


def use(**chosen: Any) -> Any:
    """The storage that the settings now name."""
    from django.test import override_settings

    from djqueue.client import get_storage

    override_settings(DJQUEUE={"STORAGE": chosen}).enable()
    return get_storage()


@contextmanager
def memory() -> Iterator[Any]:
    """In this process."""
    storage = use(BACKEND="djqueue.storage.memory.MemoryStorage")
    yield storage, storage.engine.context.metrics.record


@contextmanager
def redis() -> Iterator[Any]:
    """A server of its own."""
    from tests.servers import RedisServer

    with RedisServer() as server:
        yield _redis(URL=server.url)


@contextmanager
def cluster() -> Iterator[Any]:
    """Three nodes of its own."""
    from tests.servers import RedisCluster

    with RedisCluster() as servers:
        yield _redis(URL=servers.url)


def _redis(**options: Any) -> Any:
    from djqueue.storage.redis import RedisStorage
    from djqueue.testing.clock import FakeClock

    clock = FakeClock()
    past = RedisStorage(clock=clock, **{name.lower(): value for name, value in options.items()})

    def record(stats: list[Any], at: int) -> None:
        clock.jump(at - clock.now())
        past.workers.record_runs(stats)

    return use(BACKEND="djqueue.storage.redis.RedisStorage", OPTIONS=options), record


@contextmanager
def database() -> Iterator[Any]:
    """The project's database."""
    yield use(BACKEND="djqueue.storage.database.DatabaseStorage"), _record_rows


def _record_rows(stats: list[Any], at: int) -> None:
    from djqueue import models
    from djqueue.core.metrics import MINUTE, values_of
    from djqueue.storage.database import metrics

    rows = [metrics._row(one.queue, ("", MINUTE, at - at % MINUTE), values_of(one)) for one in stats]
    models.MetricBucket.objects.bulk_create(
        models.MetricBucket(**dict(zip(metrics.BUCKET, row, strict=True))) for row in rows
    )


STORAGES = {"memory": memory, "redis": redis, "cluster": cluster, "database": database}


# The overview.


def overview(name: str, given: Any, samples: int) -> None:
    """Milliseconds of the pages and of the reads behind them, and what 200 queues cost against 20."""
    from djqueue.dashboard import boards
    from djqueue.dashboard.reading import read_cache

    storage, record = given
    client = visitor()
    found: dict[str, list[float]] = {}
    for start, count in ((0, FEW), (FEW, MANY)):
        seed(storage, record, start, count)
        names = storage.queues.names()
        assert len(names) == count
        end = storage.reads.overview([]).at // MINUTE * MINUTE + MINUTE
        reads: dict[str, Callable[[], Any]] = {
            "storage.overview": storage.reads.overview,
            "storage.series, 60 min": lambda names=names, end=end: storage.reads.series(
                names, end - 60 * MINUTE, end, MINUTE
            ),
            "what is read each second": boards.read_board,
            "page Status": lambda: page(client, "status"),
            "page Queues": lambda: page(client, "queues"),
        }
        for word, read in reads.items():
            found.setdefault(word, []).append(quickest(read, samples, read_cache.forget))
        for word in ("what is read each second", "page Status"):
            key = f"{word}, cold"
            found.setdefault(key, []).append(quickest(reads[word], samples, read_cache.clear))
    for word, (few, many) in found.items():
        print(
            f"{name:9} {word:32} {few:9.2f} ms of {FEW} queues {many:9.2f} ms of {MANY}: x{many / few:.2f}",
            flush=True,
        )


def unchanged(name: str, given: Any, samples: int) -> None:
    """Milliseconds of an open page's request: answered with the page, and with 304; the quickest of each."""
    from django.urls import reverse

    from djqueue import Queue
    from djqueue.dashboard.reading import read_cache
    from djqueue.operations.mirror import is_mirrored, mirror_of

    storage, record = given
    seed(storage, record, 0, FEW)
    queue = Queue("queue-000", storage=storage)
    [job, *_] = queue.enqueue_many(range(50))
    if is_mirrored(storage):
        mirror_of(storage).catch_up()
    client = visitor()
    floor = least(client, samples)
    print(f"{name:9} an empty view behind the login: {floor:.1f} ms", flush=True)
    pages = {
        "Overview": reverse("admin:djqueue_dashboard_changelist"),
        "Queues": reverse("admin:djqueue_dashboard_queues"),
        "Queue": reverse("admin:djqueue_dashboard_queue", args=["queue-000"]),
        "Jobs": reverse("admin:djqueue_dashboard_jobs") + "?state=waiting",
        "Job": reverse("admin:djqueue_dashboard_job", args=["queue-000", job.id]),
    }
    for word, url in pages.items():
        took: dict[int, list[float]] = {200: [], 304: []}
        tag = ""
        for _ in range(samples):
            for known in ("", tag):
                read_cache.forget()
                began = time.perf_counter()
                response = client.get(url, headers={"HX-Request": "true", "HX-PTag": known})
                took[response.status_code].append((time.perf_counter() - began) * 1_000)
                tag = response.headers.get("HX-PTag", tag)
        whole, same = min(took[200]), min(took[304], default=math.nan)
        print(
            f"{name:9} {word:9} 200: {whole:7.1f} ms  304: {same:7.1f} ms  {same / whole:6.1%}"
            f"  above the empty view: {(same - floor) / (whole - floor):6.1%}"
            f"  ({len(took[304])} of {samples} answered with 304)",
            flush=True,
        )


def least(client: Any, samples: int) -> float:
    """Milliseconds of a view behind the login that does nothing: the session and the user are read."""
    from django.contrib import admin
    from django.http import HttpResponse
    from django.test import override_settings
    from django.urls import path

    from tests import urls

    def empty(_request: Any) -> HttpResponse:
        return HttpResponse(status=304)

    patterns = (path("empty/", admin.site.admin_view(empty)), *urls.urlpatterns)
    took = []
    with override_settings(ROOT_URLCONF=patterns):
        for _ in range(samples + 1):
            began = time.perf_counter()
            response = client.get("/empty/")
            took.append((time.perf_counter() - began) * 1_000)
            assert response.status_code == 304, response.status_code
    return min(took[1:])


def seed(storage: Any, record: Any, start: int, end: int) -> None:
    """Queues with ten waiting jobs and an hour in which something ended each minute."""
    from djqueue import Queue
    from djqueue.core.metrics import PARTS, Histogram, RunStats

    names = [f"queue-{number:03}" for number in range(start, end)]
    for name in names:
        Queue(name, storage=storage).enqueue_many(range(10))
    times = Histogram((3, 2, 1) + (0,) * (PARTS - 3))
    now = storage.reads.overview([]).at
    for ago in range(60, -1, -1):
        record([RunStats(name, "job", 6, 0, 0, 0, times, times) for name in names], now - ago * MINUTE)


def visitor() -> Any:
    """Somebody who may see everything."""
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.filter(username="root").first() or User.objects.create_superuser("root"))
    return client


def page(client: Any, name: str, **query: str) -> Any:
    """A page of the dashboard, whole."""
    from django.urls import reverse

    args = [query.pop("queue")] if name == "queue" else []
    response = client.get(reverse(f"admin:djqueue_dashboard_{name}", args=args), query)
    assert response.status_code == 200, response.status_code
    assert "Djq-Unavailable" not in response
    return response


def quickest(read: Callable[[], Any], samples: int, before: Callable[[], Any] = lambda: None) -> float:
    """Milliseconds."""
    took = []
    for _ in range(samples + 1):
        before()
        began = time.perf_counter()
        read()
        took.append((time.perf_counter() - began) * 1_000)
    return min(took[1:])


if __name__ == "__main__":
    raise SystemExit(main())
