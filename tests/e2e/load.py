"""A project under load: services and a producer that go on through faults, and what must hold afterwards."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.runtime.project import Project, WorkerProcess, close_consoles
from tests.support import PATIENCE, eventually
from tools.chaos import tree
from tools.chaos.project import _postgresql

LEASE = 3.0
"""Seconds; of every job."""
TIMEOUT = 2.0
"""Seconds that a caller's wait for a lock is limited to by the settings."""

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
DJQUEUE = {{
    "HEARTBEAT": 0.5,
    "QUEUES": {{"default": {{"LEASE": {lease}}}}},
    "DEFAULTS": {{"max_stalls": 1000, "backoff": 0, "result_ttl": None}},
    "STORAGE": {{"BACKEND": "djqueue.storage.database.DatabaseStorage", "OPTIONS": {options!r}}},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The wall clock of the processes that name a file here, once it exists.
import os, time
behind = os.environ.get("SHOP_BEHIND")
if behind:
    def set_back(true=time.time_ns):
        return true() - (3_600_000_000_000 if os.path.exists(behind) else 0)
    time.time_ns = set_back
"""
JOBS = """
import os
import time

from djqueue import job

NOTES = os.open("notes.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(event, number):
    os.write(NOTES, f"{event} {number} {os.getpid()} {time.monotonic():.3f}\\n".encode())


@job
def work(number, seconds=0):
    note("begin", number)
    time.sleep(seconds)
    note("end", number)
    return number
"""
PRODUCER = """
# Enqueue, and note each call with its answer, until a file named stop.txt exists.
import os
import time

import django

django.setup()
from djqueue.core.errors import ResultTimeoutError, StorageUnavailableError
from shop.jobs import work

calls = os.open("calls.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number = 0
while not os.path.exists("stop.txt"):
    number += 1
    began = time.monotonic()
    try:
        if number % 10:
            # Some jobs run for long enough to be active when something happens.
            answer = work.enqueue(number, seconds=0 if number % 5 else 0.5).status
        else:
            assert work.enqueue_and_wait(number, wait=2) == number
            answer = "result"
    except StorageUnavailableError:
        answer = "unavailable"
    except ResultTimeoutError:
        answer = "timeout"
    except Exception as error:
        answer = f"{type(error).__name__}"
    ended = time.monotonic()
    os.write(calls, f"{number} {answer} {ended:.3f} {ended - began:.3f}\\n".encode())
    time.sleep(0.02)
"""
TABLES = """
from django.db.models import Sum
from djqueue import Queue
from djqueue.codecs import decode
from djqueue.models import ClaimedJob, DeadLetter, Job, JobResult, QueueTally, ReadyJob
jobs = Job.objects.values_list("job_id", "state", "attempts", "failures", "stalls")
sums = QueueTally.objects.aggregate(enqueued=Sum("enqueued"), completed=Sum("completed"))
answer = {
    "jobs": [list(job) for job in jobs],
    "numbers": [Queue("default").get_result(job[0]) for job in jobs],
    "results": JobResult.objects.count(),
    "dead": DeadLetter.objects.count(),
    "left": ClaimedJob.objects.count() + ReadyJob.objects.count(),
    "sums": sums,
    "counts": Queue("default").counts(),
}
"""
COUNTS = "from djqueue import Queue; answer = Queue('default').counts()"


LIMITS = {"connect_timeout": 2, "options": f"-c lock_timeout={TIMEOUT}s -c statement_timeout={2 * TIMEOUT}s"}


def postgresql(url: str, **more: Any) -> dict[str, Any]:
    """Return the entry of DATABASES for a database of a server."""
    return {**_postgresql(url), "OPTIONS": LIMITS, **more}


def sqlite(name: str) -> dict[str, Any]:
    """Return the entry of DATABASES for a file."""
    options = {"transaction_mode": "IMMEDIATE", "timeout": TIMEOUT}
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options}


class Call(NamedTuple):
    """A call of the producer."""

    number: int
    answer: str
    ended: float
    took: float

    @property
    def is_acknowledged(self) -> bool:
        """Whether the producer knows that the job exists."""
        return self.answer in ("queued", "result", "timeout")


class Attempt(NamedTuple):
    """A note of a handler."""

    event: str
    number: int
    pid: int
    at: float


class Load:
    """Two services of two workers each, and a producer; `with` starts them, and ends them whatever happens.

    Args:
        folder: An empty folder.
        database: The entry of DATABASES.
        options: OPTIONS of the storage.
    """

    def __init__(self, folder: Path, database: dict[str, Any], **options: Any) -> None:
        settings = SETTINGS.format(database=database, lease=LEASE, options=options)
        self.project = Project(folder, JOBS, settings)
        self.folder = folder
        self.project.migrate()
        (folder / "producer.py").write_text(PRODUCER)
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            clock = {"SHOP_BEHIND": str(self.folder / "behind.txt")}
            self.services = [
                starting.enter_context(self.start_service(f"service-{number}.txt", env))
                for number, env in ((1, {}), (2, clock))
            ]
            self.producer = starting.enter_context(
                subprocess.Popen(
                    [sys.executable, "producer.py"],
                    cwd=self.folder,
                    env=self.project.variables,
                    stderr=subprocess.STDOUT,
                    stdout=starting.enter_context((self.folder / "producer.txt").open("wb")),
                )
            )
            starting.callback(self.producer.kill)
            self.goes_on()
            eventually(lambda: len({note.pid for note in self.notes()}) == 4, message="all workers run jobs")
            self._running = starting.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    def start_service(self, log: str, env: dict[str, str] | None = None) -> WorkerProcess:
        """Start `runworkers` once more."""
        return self.project.start("--processes", "2", "--concurrency", "4", log=log, env=env)

    # What has happened so far.

    def calls(self) -> list[Call]:
        """Return the producer's calls."""
        rows = [line.split() for line in _lines(self.folder / "calls.txt")]
        return [Call(int(number), answer, float(at), float(took)) for number, answer, at, took in rows]

    def notes(self) -> list[Attempt]:
        """Return the notes of the handlers."""
        rows = [line.split() for line in _lines(self.folder / "notes.txt")]
        return [Attempt(event, int(number), int(pid), float(at)) for event, number, pid, at in rows]

    def workers(self, service: WorkerProcess) -> list[int]:
        """Return the process ids of the workers of a service."""
        found = tree.by_role(tree.members(service.process.pid))
        return [member.pid for member in found.get(tree.WORKER, ())]

    def running(self) -> list[Attempt]:
        """Return the attempts that have begun and not ended."""
        notes = self.notes()
        ended = {(note.number, note.pid) for note in notes if note.event == "end"}
        return [note for note in notes if note.event == "begin" and (note.number, note.pid) not in ended]

    def repeated(self) -> set[int]:
        """Return the jobs that have begun more than once."""
        begun = Counter(note.number for note in self.notes() if note.event == "begin")
        return {number for number, count in begun.items() if count > 1}

    # Waiting.

    def goes_on(self, jobs: int = 20) -> None:
        """Wait until so many jobs that are enqueued from now on have ended."""
        count = len(self.calls())

        def done() -> bool:
            known = {call.number for call in self.calls()[count:] if call.is_acknowledged}
            return len(known & {note.number for note in self.notes() if note.event == "end"}) >= jobs

        self._wait(done, f"{jobs} further jobs are done")

    def answers(
        self, answer: str = "unavailable", calls: int = 3, meanwhile: Callable[[], object] = bool
    ) -> None:
        """Wait until the producer has got this answer so many times."""
        count = len(self.calls())

        def done() -> bool:
            meanwhile()
            return [call.answer for call in self.calls()[count:]].count(answer) >= calls

        self._wait(done, f"{calls} calls are answered with {answer}")

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        eventually(lambda: done() or self.producer.poll() is not None, message=what)
        assert self.producer.poll() is None, (self.folder / "producer.txt").read_text()

    def outlasts_leases(self) -> None:
        """Wait until all leases have expired that nobody renews from now on."""
        since = time.monotonic()
        eventually(lambda: time.monotonic() > since + LEASE + 1)

    def outlasts_full_disk(self, disk: Path) -> None:
        """Fill the file system of the tables, free it again, and check what has become of the jobs."""
        ballast = disk / "ballast"
        command = ["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"]
        done = subprocess.run(command, capture_output=True, check=False)
        assert b"No space left" in done.stderr
        self.answers()
        self.outlasts_leases()
        ballast.unlink()
        self.ends_well("full disk", time.monotonic())

    # Afterwards.

    def ends_well(self, fault: str, over: float) -> None:
        """Let all jobs end, and check what has become of them.

        Args:
            fault: Its name, for the line of figures.
            over: Monotonic seconds at the end of the fault.
        """
        self.goes_on()
        (self.folder / "stop.txt").touch()
        assert self.producer.wait(PATIENCE) == 0, (self.folder / "producer.txt").read_text()
        close_consoles()  # It has a connection from before the fault.
        eventually(self._is_empty, message="all jobs have ended")
        close_consoles()
        for service in self.services:
            if service.process.poll() is None:
                service.signal()
                assert service.ends() == 0, service.output[-3_000:]
        self._check_tables(fault, over)
        self._check_logs()

    def _is_empty(self) -> bool:
        counts = self.project.run(COUNTS)
        return not (counts["waiting"] + counts["active"] + counts["delayed"])

    def _check_tables(self, fault: str, over: float) -> None:
        calls, notes, tables = self.calls(), self.notes(), self.project.run(TABLES)
        assert {call.answer for call in calls} <= {"queued", "result", "timeout", "unavailable"}
        acknowledged = {call.number: call.ended for call in calls if call.is_acknowledged}
        numbers = tables["numbers"]
        begun = [note for note in notes if note.event == "begin"]
        latest = {note.number: note.at for note in begun}
        lost = acknowledged.keys() - set(numbers)
        doubled = len(numbers) - len(set(numbers))
        doubled += tables["sums"]["completed"] - len(numbers)
        redelivery = max(latest[number] - max(at, over) for number, at in acknowledged.items())
        longest = max(call.took for call in calls)
        answers = [call.answer for call in calls]
        logs = [service.output.count("\n") for service in self.services]
        print(
            f"\n{fault}: {len(numbers)} jobs, {len(begun) - len(latest)} repeated, {len(lost)} lost, "
            f"{doubled} doubled, redelivery {redelivery:.1f} s, longest call {longest:.1f} s, "
            f"{answers.count('unavailable')} refused, {answers.count('timeout')} timed out, log lines {logs}"
        )
        assert not lost
        assert not doubled
        assert {state for _, state, *_ in tables["jobs"]} == {"completed"}
        assert [(tables["results"], tables["dead"], tables["left"])] == [(len(numbers), 0, 0)]
        assert tables["counts"]["completed"] == tables["sums"]["enqueued"] == len(numbers)
        # Only a lost lease lets a job run again.
        assert all(
            attempts == stalls + 1 and not failures for *_, attempts, failures, stalls in tables["jobs"]
        )
        assert redelivery < 3 * (LEASE + 2)
        assert longest < PATIENCE

    def _check_logs(self) -> None:
        for service in self.services:
            assert "Traceback" not in service.output, service.output


def _lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
