"""A new Django project for each measurement, on a storage of its own, and the processes that run in it."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Self

from tests.runtime.project import ROOT, Project, WorkerProcess
from tests.servers import PostgresServer, RedisServer
from tests.support import eventually
from tools.benchmarks.marks import Drain, Marks, marks_folder
from tools.benchmarks.usage import process_usage, redis_usage, session_memory, session_usage

STORAGES = ("redis", "sqlite", "postgresql", "scheduler", "memory")
JOBS = Path(__file__).with_name("shop_jobs.py")
COMMON = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
"""
ON_SQLITE = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
}
DJQUEUE = {}
"""
ON_POSTGRESQL = """
DATABASES["default"] = {
    "ENGINE": "django.db.backends.postgresql", "NAME": %r, "HOST": "127.0.0.1", "PORT": %d, "USER": %r,
}
DJQUEUE = {}
"""
ON_MEMORY = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
"""
ON_SCHEDULER = (
    ON_SQLITE + 'DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.scheduler.SchedulerStorage"}}\n'
)
ON_REDIS = """
import os
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
OPTIONS = {"URL": os.environ.get("BENCH_REDIS", %r)}
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": OPTIONS}}
"""
SETTINGS = {"sqlite": ON_SQLITE, "scheduler": ON_SCHEDULER, "memory": ON_MEMORY}
WITHOUT_MIRROR = 'OPTIONS["MIRROR"] = False\n'


class Site:
    """A project with a storage; `with` starts it and removes all of it.

    storage: One of `STORAGES`. The storage's URL is in `url`.
    mirror: False turns off the mirror of Redis, which is on by default.
    server: The PostgreSQL in which a database is made for it; by default, it has one of its own.
    """

    def __init__(self, storage: str, *, mirror: bool = True, server: PostgresServer | None = None) -> None:
        self.storage = storage
        self._mirror = mirror
        self._postgres = server
        self._stack = ExitStack()
        self._workers: list[WorkerProcess] = []
        self._flags: tuple[str, ...] = ()
        """Flags of all workers."""
        self._client: Client | None = None
        self.server: RedisServer | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            settings = SETTINGS.get(self.storage, "")
            if self.storage == "redis":
                self.server = stack.enter_context(RedisServer())
                settings = ON_REDIS % self.server.url + ("" if self._mirror else WITHOUT_MIRROR)
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djqueue-")))
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir=marks_folder(), prefix="djqueue-"))
            self.marks = Marks(Path(memory) / "marks")
            self.url = self.server.url if self.server is not None else f"sqlite://{self.folder}/db.sqlite3"
            if self.storage == "postgresql" and self._postgres is None:
                self._postgres = stack.enter_context(PostgresServer())
            if self._postgres is not None:
                self.url = self._postgres.create_database()
                name = self.url.rpartition("/")[2]
                settings = ON_POSTGRESQL % (name, self._postgres.port, self._postgres.user)
            self._project = Project(self.folder, JOBS.read_text(), COMMON + settings)
            if self._postgres is not None:
                migrate(self.folder, self.environment)
            else:
                shutil.copy(migrated(), self.folder / "db.sqlite3")
            self._stack = stack.pop_all()
        if self.storage == "scheduler":
            # The jobs come through its socket, not through the outbox, as in a project that is up.
            self.start("--queues", "none")
            eventually(lambda: self.client.call("answers"), message="the scheduler answers")
            self._flags = ("--join",)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        return {"BENCH_MARKS": str(self.marks.path)}

    @property
    def client(self) -> "Client":
        """A producer, started with its first use."""
        if self._client is None:
            self._client = self._stack.enter_context(Client(self.folder, self.environment))
        return self._client

    def start(self, *arguments: str) -> WorkerProcess:
        """Start `manage.py runworkers`."""
        log = f"workers-{len(self._workers)}.txt"
        worker = self._project.start(*self._flags, *arguments, env=self.environment, log=log)
        self._workers.append(self._stack.enter_context(worker))
        return worker

    def check(self) -> None:
        """Raise if one of the workers has ended."""
        for worker in self._workers:
            if worker.process.poll() is not None:
                raise RuntimeError(f"a worker ended:\n{worker.output[-3000:]}")

    def usage(self) -> dict[str, float]:
        """Return the CPU time of each process of the workers, of Redis, and of a client that works itself."""
        found: dict[str, float] = {}
        for number, worker in enumerate(self._workers):
            for place, used in enumerate(session_usage(worker.process.pid).values()):
                found[f"worker {number}.{place}"] = used
        if not self._workers and self._client is not None:
            found["worker"] = process_usage(self._client.process.pid) or 0.0
        if self.server is not None:
            found["redis"] = redis_usage(self.server)
        return found

    def memory(self) -> int:
        """Return the bytes that the workers' processes, or a client that works, have to themselves."""
        started = [worker.process.pid for worker in self._workers]
        return sum(map(session_memory, started or [self.client.process.pid]))

    def drain(self, count: int, *arguments: str, workers: int = 1, limit: float = math.inf) -> Drain:
        """Start workers on a backlog of so many jobs, and measure them for at most so many seconds."""
        if self.storage == "memory":
            self.client.call("work", int(arguments[1]) if arguments else None)
        else:
            for _ in range(workers):
                self.start(*arguments)
        drained = self.marks.drain(count, self.usage, self.check, limit)
        if (found := self.marks.count()) > count:
            raise RuntimeError(f"{found - count} jobs ran twice")
        return drained


class Client:
    """The other end of `tools.benchmarks.client`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.benchmarks.client"],
            cwd=folder,
            env={
                **os.environ,
                **environment,
                "DJANGO_SETTINGS_MODULE": "project_settings",
                "PYTHONPATH": path,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, name: str, *arguments: object) -> Any:
        """Have it do something, and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the producer ended in {name}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.process.kill()
            self.process.communicate()


@cache
def migrated() -> Path:
    """Return a SQLite file with all tables, made once."""
    folder = Path(TEMPLATES.name)
    project = Project(folder, "", COMMON + ON_SQLITE)
    migrate(project.folder, {})
    return folder / "db.sqlite3"


def migrate(folder: Path, environment: dict[str, str]) -> None:
    """Make the tables of the project in a folder."""
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity", "0"],
        cwd=folder,
        env={
            **os.environ,
            **environment,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        },
        check=True,
    )


TEMPLATES = tempfile.TemporaryDirectory(prefix="djqueue-")
"""Where the migrated database lies until this process ends."""
