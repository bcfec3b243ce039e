"""A new Django project for each measurement, on a storage of its own, and the processes that run in it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Self

from tests.benchmarks.marks import Drain, Marks, marks_folder
from tests.benchmarks.usage import redis_usage, session_usage
from tests.runtime.project import ROOT, Project, WorkerProcess
from tests.servers import RedisServer

STORAGES = ("redis", "database", "memory")
JOBS = Path(__file__).with_name("shop_jobs.py")
ON_DATABASE = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
DJQUEUE = {}
"""
ON_MEMORY = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
"""
ON_REDIS = """
import os
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
OPTIONS = {"URL": os.environ.get("BENCH_REDIS", %r)}
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": OPTIONS}}
"""
WITHOUT_MIRROR = 'OPTIONS["MIRROR"] = False\n'


class Site:
    """A project with a storage; `with` starts it and removes all of it.

    storage: One of `STORAGES`.
    mirror: False turns off the mirror of Redis, which is on by default.
    jobs: The text of its `shop/jobs.py`.
    """

    def __init__(self, storage: str, *, mirror: bool = True, jobs: str | None = None) -> None:
        self.storage = storage
        self._mirror = mirror
        self._jobs = JOBS.read_text() if jobs is None else jobs
        self._stack = ExitStack()
        self._workers: list[WorkerProcess] = []
        self._client: Client | None = None
        self.server: RedisServer | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            settings = {"database": ON_DATABASE, "memory": ON_MEMORY}.get(self.storage, "")
            if self.storage == "redis":
                self.server = stack.enter_context(RedisServer())
                settings = ON_REDIS % self.server.url + ("" if self._mirror else WITHOUT_MIRROR)
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djqueue-")))
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir=marks_folder(), prefix="djqueue-"))
            self.marks = Marks(Path(memory) / "marks")
            self._project = Project(self.folder, self._jobs, settings)
            shutil.copy(migrated(), self.folder / "db.sqlite3")
            self._stack = stack.pop_all()
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
        worker = self._project.start(*arguments, env=self.environment, log=log)
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
            found["worker"] = sum(session_usage(self._client.process.pid).values())
        if self.server is not None:
            found["redis"] = redis_usage(self.server)
        return found

    def drain(self, count: int, *arguments: str, workers: int = 1) -> Drain:
        """Start workers on a backlog of so many jobs, and measure them."""
        if self.storage == "memory":
            self.client.call("work", int(arguments[1]) if arguments else None)
        else:
            for _ in range(workers):
                self.start(*arguments)
        drained = self.marks.drain(count, self.usage, self.check)
        if (found := self.marks.count()) > count:
            raise RuntimeError(f"{found - count} jobs ran twice")
        return drained


class Client:
    """The other end of `tests.benchmarks.client`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.client"],
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
    project = Project(folder, "", ON_DATABASE)
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity", "0"],
        cwd=project.folder,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        },
        check=True,
    )
    return folder / "db.sqlite3"


TEMPLATES = tempfile.TemporaryDirectory(prefix="djqueue-")
"""Where the migrated database lies until this process ends."""
