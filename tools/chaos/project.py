"""The project whose processes are killed and stopped, on each storage."""

import runpy
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from tests import servers
from tests.runtime.project import Project

SQLITE, POSTGRESQL, REDIS = "sqlite", "postgresql", "redis"
STORAGES = (SQLITE, POSTGRESQL, REDIS)
EXECUTORS = ("inline", "isolated", "subprocess")

LONG = 6.0
"""Seconds that the jobs take which a stop interrupts."""
STEP = 0.1
"""Seconds between two notes of such a job."""

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
DJQUEUE = {{
    "HEARTBEAT": 0.5,
    "DEFAULTS": {{"max_stalls": 100_000, "max_attempts": 100_000, "backoff": 0, "result_ttl": None}},
    **{more!r},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

ON_DATABASE = {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
QUICK_LEASES = {"QUEUES": {"default": {"LEASE": 3}}}
"""So that the jobs of killed workers run again soon. After SIGTERM, no lease may expire."""

JOBS = """
import asyncio
import os
import time

from djqueue import UnrecoverableError, job
from tools.chaos.tree import lineage

DONE = os.open("done.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
SHORT, LONG = [], []
lineages = {}


def write(event, number):
    # A process of a job has the same ancestors for as long as it lives.
    pid = os.getpid()
    if pid not in lineages:
        lineages[pid] = ",".join(map(str, lineage(pid, int(os.environ["DJQUEUE_CHAOS"]))))
    os.write(DONE, f"{event} {number} {lineages[pid]} {time.monotonic_ns()}\\n".encode())
"""

JOBS_OF_EXECUTOR = """

@job(executor="{executor}")
def {executor}_note(number):
    write("begin", number)
    write("end", number)
    return number


@job(executor="{executor}")
def {executor}_slow(number):
    write("begin", number)
    time.sleep(0.2)
    write("end", number)
    return number


@job(executor="{executor}")
def {executor}_refuse(number):
    raise UnrecoverableError(str(number))


@job(executor="{executor}")
def {executor}_stubborn(number):
    write("begin", number)
    for _ in range({steps}):
        time.sleep({step})
        write("step", number)
    write("end", number)


@job(executor="{executor}")
async def {executor}_polite(number):
    write("begin", number)
    for _ in range({steps}):
        await asyncio.sleep({step})
        write("step", number)
    write("end", number)


SHORT += [{executor}_note, {executor}_slow, {executor}_refuse]
LONG += [{executor}_stubborn, {executor}_polite]
"""

PRODUCER = """
# Enqueue, and write down each job's name and id once it is acknowledged, until this process is killed.
import os
import sys
import time

import django

django.setup()
from djqueue.core.errors import DjqueueError
from shop.jobs import LONG, SHORT

acknowledged = os.open("acknowledged.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number = turn = int(sys.argv[1])
while True:
    turn += 1
    # More long jobs would fill all slots.
    for job in [*SHORT, *([] if turn % 4 else [LONG[turn // 4 % len(LONG)]])]:
        number += 1
        try:
            result = job.using(durable=True).enqueue(number) if number % 2 else job.enqueue(number)
        except DjqueueError:
            continue
        os.write(acknowledged, f"{job.name} {result.id} {number}\\n".encode())
    time.sleep(0.4)
"""

REPORT = """
# Print the record of every acknowledged job, and the ids of all dead letters.
import json

import django

django.setup()
from djqueue.client import get_storage

storage = get_storage()
lines = [line.split() for line in open("acknowledged.txt") if line.endswith("\\n")]
ids = [job_id for _, job_id, _ in lines]
jobs = {}
for start in range(0, len(ids), 500):
    some = ids[start : start + 500]
    for job_id, found in zip(some, storage.reads.jobs("default", some)):
        counts = None if found is None else [found.state.value, found.attempts, found.failures, found.stalls]
        jobs[job_id] = counts
dead = [letter.id for letter in storage.reads.dead_letters("default")]
every = [record.id for record in storage.reads.page("default", None, 10_000_000)]
counts = {state.value: count for state, count in storage.reads.counts("default").items()}
print(json.dumps({"jobs": jobs, "dead": dead, "every": every, "counts": counts}))
storage.close()
"""


@contextmanager
def project_on(
    storage: str, folder: Path, executors: Sequence[str] = EXECUTORS, *, quick: bool = True
) -> Iterator[Project]:
    """Make a project, with a server of its own if the storage needs one.

    Args:
        storage: One of `STORAGES`.
        folder: An empty folder.
        executors: Executors of its jobs: there is one of each kind of job for each of them.
        quick: Whether leases are short.
    """
    if storage == SQLITE:
        options = {"transaction_mode": "IMMEDIATE", "timeout": 20}
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "jobs.sqlite3", "OPTIONS": options}
        yield _project(folder, executors, database, ON_DATABASE, quick)
    elif storage == POSTGRESQL:
        with servers.PostgresServer() as server:
            database = _postgresql(server.create_database())
            yield _project(folder, executors, database, ON_DATABASE, quick)
    else:
        with servers.RedisServer(appendonly=True) as server:
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}
            backend = "djqueue.storage.redis.RedisStorage"
            where = {"BACKEND": backend, "OPTIONS": server.options}
            yield _project(folder, executors, database, where, quick)


def leader(folder: Path) -> int | None:
    """Return the process that sweeps the database of a project; None if there is none, as with Redis."""
    database = runpy.run_path(str(folder / "project_settings.py"))["DATABASES"]["default"]
    connection: Any
    if "HOST" in database:
        names = {"host": "HOST", "port": "PORT", "user": "USER", "dbname": "NAME"}
        connection = psycopg.connect(**{name: database[key] for name, key in names.items()})
    else:
        connection = sqlite3.connect(folder / database["NAME"], timeout=20)
    with closing(connection):
        query = "SELECT pid FROM djqueue_leader_lease WHERE name = 'leader'"
        row = connection.execute(query).fetchone()
    return None if row is None else int(row[0])


def _project(
    folder: Path, executors: Sequence[str], database: dict[str, Any], storage: dict[str, Any], quick: bool
) -> Project:
    more = {"STORAGE": storage, **(QUICK_LEASES if quick else {})}
    steps = {"steps": round(LONG / STEP), "step": STEP}
    jobs = JOBS + "".join(JOBS_OF_EXECUTOR.format(executor=name, **steps) for name in executors)
    made = Project(folder, jobs, SETTINGS.format(database=database, more=more))
    (folder / "producer.py").write_text(PRODUCER)
    (folder / "report.py").write_text(REPORT)
    return made


def _postgresql(address: str) -> dict[str, Any]:
    url = urlsplit(address)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": url.hostname,
        "PORT": url.port,
        "USER": url.username,
        "NAME": url.path.lstrip("/"),
    }
