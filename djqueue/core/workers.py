"""Workers: their descriptions, the queues and jobs that they serve, and the commands that they receive."""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from .errors import OptionError
from .overview import QueueOverview
from .states import State


class RunningJob(NamedTuple):
    """A job that a worker is running."""

    queue: str
    id: str
    name: str
    started_at: int
    """UTC milliseconds, by the worker's clock."""


class ProcessInfo(NamedTuple):
    """A process in which a worker runs jobs."""

    pid: int
    name: str
    """Name of the jobs that it runs."""
    executor: str
    """isolated | subprocess"""
    runs: int
    """Number of jobs that it has been given."""
    rss: int
    """Bytes of its memory."""
    queue: str = ""
    """Queue of the job that it is running; empty while it is idle."""
    job: str = ""
    """Id of that job."""


class WorkerDump(NamedTuple):
    """Stacks of a worker's threads and tasks."""

    at: int
    """UTC milliseconds at which the storage received it."""
    text: str


class WorkerInfo(NamedTuple):
    """A worker, as it describes itself."""

    id: str
    host: str
    pid: int
    queues: tuple[str, ...] | None
    names: tuple[str, ...]
    concurrency: int
    started_at: int
    seen_at: int = 0
    active: int = 0
    state: str = "running"
    """running | quiet (claims no jobs until it is resumed) | stopping"""
    kind: str = ""
    """runworkers (a process of its own) | embedded (in another process)"""
    heartbeat: int = 0
    """Maximum milliseconds between two heartbeats; 0: unknown."""
    rss: int = 0
    """Bytes of memory of its process; 0: unknown."""
    version: str = ""
    """Version of djqueue."""
    project: str = ""
    """Version of the project, from its settings."""
    jobs: tuple[RunningJob, ...] = ()
    """Jobs that it is running, longest first; only some of `active` if there are many."""
    supervisor: int | None = None
    """Process ID of the supervisor that started its process, on the same host; None without one."""
    processes: tuple[ProcessInfo, ...] = ()
    """Processes in which it runs jobs, those with a job first; only some if there are many."""
    leads: bool = False
    """Whether its process does the periodic work for all; False if a storage lets every process do it."""


QUIET, RESUME, STOP, DUMP = "quiet", "resume", "stop", "dump"
COMMANDS = (QUIET, RESUME, STOP, DUMP)
"""Claim no more jobs, but finish running ones; claim again; stop as after a signal; save the stacks of all
threads.
"""

ASKED, STOPPING, NOT_FOUND = "asked", "stopping", "not_found"
"""Result of a command: the worker will receive it, is stopping already, or is not alive."""

DUMP_TTL = 300_000
"""Milliseconds for which a dump is kept, if its worker lives that long."""
MAX_DUMP = 64 * 1024
"""Maximum number of characters of a dump."""


def check_command(command: str) -> None:
    """Raise OptionError for an unknown command."""
    if command not in COMMANDS:
        raise OptionError(f"command: {command!r} is not one of {', '.join(COMMANDS)}")


def with_command(waiting: tuple[str, ...], command: str) -> tuple[str, ...]:
    """Return the commands that wait for a worker after one more: a dump, and the last of the others."""
    kept = (other for other in waiting if other != command and DUMP in (other, command))
    return (*kept, command)


SILENT_AFTER = 15_000
"""Milliseconds without a heartbeat after which a worker counts as silent."""
RUNNING = "running"
"""State of a worker that claims jobs."""


def is_silent(worker: WorkerInfo, at: int) -> bool:
    """Return whether a worker has sent no heartbeat for too long, at a time in UTC milliseconds."""
    return at > silent_from(worker)


def silent_from(worker: WorkerInfo) -> int:
    """Return until when a worker is live without another heartbeat, in UTC milliseconds.

    A worker with rare heartbeats may miss two of them.
    """
    return worker.seen_at + max(SILENT_AFTER, 3 * worker.heartbeat)


def claiming(workers: Iterable[WorkerInfo], at: int) -> list[WorkerInfo]:
    """Return the workers that are live and claim jobs."""
    return [worker for worker in workers if worker.state == RUNNING and not is_silent(worker, at)]


def served(workers: Iterable[WorkerInfo]) -> "Counter[str | None]":
    """Return how many workers that claim jobs serve each queue; None stands for workers of all queues."""
    counts: Counter[str | None] = Counter()
    for worker in workers:
        if worker.state == RUNNING:
            counts.update((None,) if worker.queues is None else set(worker.queues))
    return counts


def unserved(queues: Iterable[QueueOverview], workers: Sequence[WorkerInfo]) -> list[QueueOverview]:
    """Return the queues that have waiting or active jobs and no worker that claims them.

    Paused queues are left out: nothing is meant to claim their jobs.
    """
    counts = served(workers)
    return [
        queue
        for queue in queues
        if not queue.paused
        and not counts[None] + counts[queue.name]
        and queue.counts.get(State.WAITING, 0) + queue.counts.get(State.ACTIVE, 0)
    ]


CELERY_RECORDS = frozenset({"kombu.queue", "kombu.exchange", "celery.result"})
"""Names of jobs that keep values for Celery: they are never run, and their owners remove expired ones."""


class Unhandled(NamedTuple):
    """Waiting jobs of one queue and name that no live worker can run."""

    queue: str
    name: str
    jobs: int


def unhandled(queues: Iterable[QueueOverview], workers: Sequence[WorkerInfo]) -> list[Unhandled]:
    """Return the job names that no live worker of their queue handles, most jobs first.

    Held names are left out, and queues without any worker: there, the missing worker is the problem.
    """
    live = [worker for worker in workers if worker.state != STOPPING]
    everywhere = {name for worker in live if worker.queues is None for name in worker.names}
    serves_all = any(worker.queues is None for worker in live)
    known: dict[str, set[str]] = {}
    for worker in live:
        for name in worker.queues or ():
            known.setdefault(name, set()).update(worker.names)
    rows = []
    for queue in queues:
        if not serves_all and queue.name not in known:
            continue
        handled = everywhere | known.get(queue.name, set())
        rows += [
            Unhandled(queue.name, name, count)
            for name, count in queue.names.items()
            if count and name not in handled and name not in CELERY_RECORDS and queue.hold_on(name) is None
        ]
    return sorted(rows, key=lambda row: (-row.jobs, row.queue, row.name))


def version_of(parts: Iterable[Any], workers: Sequence[WorkerInfo]) -> str:
    """Return the version of these parts and of the workers, without what only the list of workers shows."""
    digest = blake2b(repr([*parts]).encode(errors="surrogatepass"), digest_size=12)
    for worker in sorted(workers, key=lambda info: info.id):
        described = worker._replace(seen_at=0, rss=0, jobs=())
        digest.update(repr(tuple(described)).encode(errors="surrogatepass"))
    return digest.hexdigest()
