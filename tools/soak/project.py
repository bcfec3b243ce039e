"""The project of a soak: jobs of every kind, and the programs that enqueue and run them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import servers
from tests.runtime.project import Project
from tools.chaos.project import POSTGRESQL, REDIS, SQLITE, _postgresql

MEMORY, SCHEDULER = "memory", "scheduler"
STORAGES = (MEMORY, SQLITE, POSTGRESQL, REDIS, SCHEDULER)
BACKENDS = {
    MEMORY: "djqueue.storage.memory.MemoryStorage",
    SQLITE: "djqueue.storage.database.DatabaseStorage",
    POSTGRESQL: "djqueue.storage.database.DatabaseStorage",
    REDIS: "djqueue.storage.redis.RedisStorage",
    SCHEDULER: "djqueue.storage.scheduler.SchedulerStorage",
}
KINDS = (
    *("short", "polite", "retried", "refused", "grouped", "limited", "isolated", "apart", "scheduled"),
    *("hostile", "leaving", "wordy", "careless", "careful", "orphaning"),
)
"""Names of the jobs that have to make progress as long as the soak runs."""
ORPHAN = "100003"
"""Seconds for which the programs sleep that a job leaves behind."""

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
BOUNDS = {{
    "LEASE": 5,
    "DEAD_LETTERS": {{"MAX_ENTRIES": 100}},
    "RETENTION": {{"COMPLETED": {{"AGE": {kept}}}, "CANCELLED": {{"AGE": {kept}}}}},
}}
DJQUEUE = {{
    "HEARTBEAT": 1,
    "DEFAULTS": {{"max_stalls": 100_000, "backoff": 0.2, "result_ttl": {kept}, "durable": {durable}}},
    "METRICS": {{"MINUTE": 60}},
    "QUEUES": {{
        "default": BOUNDS,
        "groups": {{**BOUNDS, "KEY_CONCURRENCY": 1}},
        "limited": {{**BOUNDS, "RATE": "20/s", "CONCURRENCY": 2}},
        "deadly": BOUNDS,
    }},
    "STORAGE": {storage!r},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import asyncio
import decimal
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

from django.db import connection, transaction

from djqueue import UnrecoverableError, current_job, job

DONE = os.open("done.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def alive(name):
    # Children of a service have its session, unless they isolate themselves.
    for file in (name, f"session-{os.getsid(0)}"):
        Path("alive", file).touch()


def done(number):
    alive(inspect.currentframe().f_back.f_code.co_name)
    os.write(DONE, f"{number}\\n".encode())


@job
def short(number, text=""):
    done(number)
    return [number, text]


@job
async def polite(number):
    await asyncio.sleep(0.02)
    current_job().progress({"number": number})
    done(number)


@job(max_attempts=1_000)
def retried(number):
    if current_job().failures < 2:
        raise ValueError(number)
    done(number)


@job
def refused(number):
    done(number)
    raise UnrecoverableError(str(number))


@job(queue="groups")
def grouped(number):
    done(number)


@job(queue="limited")
def limited(number):
    done(number)


@job(executor="isolated")
def isolated(number):
    done(number)
    return number


@job(executor="subprocess")
def apart(number):
    done(number)
    return number


# The service that only reports at the end would leave jobs of a schedule waiting.
@job(**({} if os.path.exists("stop.txt") else {"every": 5, "overlap": "skip"}))
def scheduled():
    alive("scheduled")


class HostileType(type):
    def __repr__(cls):
        raise ValueError("no name")

    __str__ = __repr__


class HostileError(BaseException, metaclass=HostileType):
    def __repr__(self):
        raise SystemExit("no text")

    __str__ = __repr__
    __getattribute__ = lambda self, name: sys.exit(name)


@job(max_attempts=1)
def hostile(number):
    done(number)
    raise HostileError


@job(max_attempts=1)
async def leaving(number):
    done(number)
    threading.Thread(target=sys.exit, args=("from a thread",)).start()
    asyncio.ensure_future(asyncio.sleep(1_000))
    raise [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()][number % 4]


@job(max_attempts=1)
def wordy(number):
    done(number)
    raise UnrecoverableError("a long story " * 100_000)


@job(max_attempts=1)
def careless(number):
    done(number)
    decimal.getcontext().prec = 3
    transaction.atomic().__enter__()


@job(max_attempts=1_000)
def careful(number):
    assert decimal.getcontext().prec == 28
    assert not connection.in_atomic_block
    done(number)


@job(executor="isolated", max_attempts=1)
def orphaning(number):
    for _ in range(3):
        subprocess.Popen(["sleep", "ORPHAN"], start_new_session=True)
    done(number)
    os._exit(0 if number % 2 else 3)


@job(queue="deadly", max_stalls=1)
def deadly(number):
    done(number)
    if not os.path.exists("stop.txt"):
        os._exit(0)
""".replace("ORPHAN", ORPHAN)

PRODUCER = """
# Enqueue, and note each number once its job is acknowledged, until a file named stop.txt exists.
import os
import sys
import time

import django

django.setup()
from djqueue import chain
from djqueue.core.errors import DjqueueError, ResultTimeoutError
from shop import jobs

KINDS = [
    *[jobs.short] * 8, *[jobs.polite] * 4, *[jobs.retried] * 2, jobs.refused, *[jobs.limited] * 3,
    *[jobs.grouped.using(concurrency_key=name) for name in "aabb"], *[jobs.short.using(delay=1.5)] * 2,
]
SLOW = [jobs.isolated, jobs.apart, jobs.orphaning.using(max_stalls=1)]
HOSTILE = [jobs.hostile, jobs.leaving, jobs.wordy, jobs.careless, *[jobs.careful] * 4]
DEADLY = [jobs.deadly] if HAS_PROCESSES else []
RARE = [(SLOW, 4), (HOSTILE, 2), *[(DEADLY, 60)] * bool(DEADLY)]


def produce():
    acknowledged = os.open("acknowledged.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = turn = 0

    def note(*numbers):
        os.write(acknowledged, "".join(f"{one}\\n" for one in numbers).encode())

    while not os.path.exists("stop.txt"):
        turn += 1
        now_and_then = [
            job for jobs, turns in RARE for job in [jobs[turn // turns % len(jobs)]] if turn % turns == 0
        ]
        for job in [*KINDS, *now_and_then]:
            number += 1
            try:
                job.enqueue(number)
            except DjqueueError:
                continue
            note(number)
        try:
            numbers = range(number + 1, number + 4)
            number += 3
            chain(*[jobs.short.node(one) for one in numbers]).enqueue()
            note(*numbers)
            many = range(number + 1, number + 21)
            number += 20
            jobs.short.enqueue_many([((one,), {"text": "x" * 200}) for one in many])
            note(*many)
            number += 1
            result = jobs.short.enqueue(number)
            note(number)
            result.wait(timeout=0.2)
        except ResultTimeoutError:
            pass
        except DjqueueError:
            pass
        time.sleep(PAUSE)


if __name__ == "__main__":
    produce()
"""

EMBEDDED = """
# With the memory storage, one process runs and enqueues the jobs; its worker is replaced now and then.
import os
import threading
import time

import django

django.setup()
from djqueue import Worker
from djqueue.operations.sweeps import __name__ as _
from producer import produce
from report import report

producer = threading.Thread(target=produce)
producer.start()
while producer.is_alive():
    with Worker(concurrency=8):
        producer.join(timeout=20)
with Worker(concurrency=8, until_empty=True) as worker:
    worker.join()
report()
"""

REPORT = """
# Print the number of jobs by queue and state, counted and listed.
import json
import sys

import django


def report():
    from djqueue.client import get_storage

    storage = get_storage()
    for _ in range(30):
        # Records expire meanwhile, so that a list may lack some that were counted a moment before.
        storage.sweep()
        found = read(storage)
        if all(counted(counts) == listed for counts, listed, _ in found.values()):
            break
    with open("report.json", "w") as file:
        json.dump(found, file)


def counted(counts):
    return {state: count for state, count in counts.items() if count}


def read(storage):
    found = {}
    for queue in storage.queues.names():
        counts = {state.value: count for state, count in storage.reads.counts(queue).items()}
        listed = {}
        for record in storage.reads.page(queue, None, 10_000_000):
            listed[record.state.value] = listed.get(record.state.value, 0) + 1
        found[queue] = [counts, listed, len(storage.reads.dead_letters(queue))]
    return found


if __name__ == "__main__":
    django.setup()
    report()
"""


class SoakProject:
    """The project's folder, and its server if the storage has one."""

    def __init__(self, folder: Path, storage: str, server: Any, database: str) -> None:
        self.folder = folder
        self.storage = storage
        self.server = server
        self.database = database

    def report(self) -> dict[str, list[Any]]:
        """Return the counts of jobs that were written."""
        found: dict[str, list[Any]] = json.loads((self.folder / "report.json").read_text())
        return found

    def numbers(self, name: str) -> list[int]:
        """Return the numbers in a file of the project."""
        text = (self.folder / name).read_text()
        return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def soak_project(storage: str, folder: Path, *, kept: float, pause: float) -> Iterator[SoakProject]:
    """Make a project, with a server of its own if the storage needs one.

    Args:
        storage: One of `STORAGES`.
        folder: An empty folder.
        kept: Seconds for which ended jobs and their results are kept.
        pause: Seconds between two rounds of the producer.
    """
    database: dict[str, Any] = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
    server: Any = None
    options: dict[str, Any] = {}
    with ExitStack() as stack:
        if storage == POSTGRESQL:
            server = stack.enter_context(servers.PostgresServer())
            database = _postgresql(server.create_database())
        elif storage == REDIS:
            server = stack.enter_context(servers.RedisServer(appendonly=True))
            options = {**server.options, "MIRROR": False}
        settings = SETTINGS.format(
            database=database,
            storage={"BACKEND": BACKENDS[storage], "OPTIONS": options},
            kept=kept,
            durable=storage == SCHEDULER,
        )
        Project(folder, JOBS, settings)
        producer = PRODUCER.replace("PAUSE", repr(pause)).replace("HAS_PROCESSES", repr(storage != MEMORY))
        (folder / "producer.py").write_text(producer)
        (folder / "embedded.py").write_text(EMBEDDED)
        (folder / "report.py").write_text(REPORT)
        (folder / "alive").mkdir()
        yield SoakProject(folder, storage, server, str(database["NAME"]))
