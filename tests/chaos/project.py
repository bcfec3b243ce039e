"""The project whose processes are killed, on each storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests import servers
from tests.runtime.project import Project

SQLITE, POSTGRESQL, REDIS = "sqlite", "postgresql", "redis"
STORAGES = (SQLITE, POSTGRESQL, REDIS)

DATABASE_STORAGE = {
    "STORAGE": {
        "BACKEND": "djqueue.storage.database.DatabaseStorage",
        "OPTIONS": {"SCHEDULER_LEASE": 2},
    }
}

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
DJQUEUE = {{
    "HEARTBEAT": 0.5,
    "DEFAULTS": {{"max_stalls": 100_000, "backoff": 0, "result_ttl": None}},
    "QUEUES": {{"default": {{"LEASE": 3}}}},
    **{storage!r},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import os
import time

from djqueue import UnrecoverableError, job

DONE = os.open("done.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write(event, number):
    os.write(DONE, f"{event} {number} {os.getpid()} {time.monotonic_ns()}\\n".encode())


@job
def note(number):
    write("begin", number)
    write("end", number)
    return number


@job
def slow(number):
    write("begin", number)
    time.sleep(0.2)
    write("end", number)
    return number


@job
def refuse(number):
    raise UnrecoverableError(str(number))
"""

PRODUCER = """
# Enqueue, and write down each job's name and id once it is acknowledged, until this process is killed.
import os
import sys
import time

import django

django.setup()
from djqueue.core.errors import DjqueueError
from shop.jobs import note, refuse, slow

acknowledged = os.open("acknowledged.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number = int(sys.argv[1])
while True:
    for job in (note, note, slow, refuse):
        number += 1
        try:
            result = job.using(durable=True).enqueue(number) if number % 2 else job.enqueue(number)
        except DjqueueError:
            continue
        os.write(acknowledged, f"{job.name} {result.id} {number}\\n".encode())
    time.sleep(0.05)
"""

REPORT = """
# Print the state of every acknowledged job, and the ids of all dead letters.
import json

import django

django.setup()
from djqueue.client import get_storage

storage = get_storage()
lines = [line.split() for line in open("acknowledged.txt") if line.endswith("\\n")]
ids = [job_id for _, job_id, _ in lines]
states = {}
for start in range(0, len(ids), 500):
    some = ids[start : start + 500]
    records = zip(some, storage.reads.jobs("default", some))
    states.update({job_id: None if record is None else record.state.value for job_id, record in records})
dead = [letter.id for letter in storage.reads.dead_letters("default")]
every = [record.id for record in storage.reads.page("default", None, 10_000_000)]
counts = {state.value: count for state, count in storage.reads.counts("default").items()}
print(json.dumps({"states": states, "dead": dead, "every": every, "counts": counts}))
storage.close()
"""


@contextmanager
def project_on(storage: str, folder: Path) -> Iterator[Project]:
    """Make a project, with a server of its own if the storage needs one."""
    if storage == SQLITE:
        options = {"transaction_mode": "IMMEDIATE", "timeout": 20}
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "jobs.sqlite3", "OPTIONS": options}
        yield _project(folder, database, DATABASE_STORAGE)
    elif storage == POSTGRESQL:
        with servers.PostgresServer() as server:
            yield _project(folder, _postgresql(server.create_database()), DATABASE_STORAGE)
    else:
        with servers.RedisServer(appendonly=True) as server:
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}
            backend = "djqueue.storage.redis.RedisStorage"
            yield _project(folder, database, {"STORAGE": {"BACKEND": backend, "OPTIONS": server.options}})


def _project(folder: Path, database: dict[str, Any], storage: dict[str, Any]) -> Project:
    made = Project(folder, JOBS, SETTINGS.format(database=database, storage=storage))
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
