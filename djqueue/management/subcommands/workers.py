"""`manage.py djqueue workers`: list the workers, and send commands to them."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageError
from djqueue.core.messages import numbered
from djqueue.core.units import to_datetime
from djqueue.core.workers import (
    COMMANDS,
    DUMP,
    NOT_FOUND,
    QUIET,
    RESUME,
    STOP,
    STOPPING,
    ProcessInfo,
    WorkerInfo,
)
from djqueue.storage.base import Storage

from .base import Options, Output, Subcommands

CONTROL_HELP = {
    QUIET: "Make a worker stop claiming jobs.",
    RESUME: "Make a quiet worker claim jobs again.",
    STOP: "Stop a worker after its running jobs, as SIGTERM does.",
    DUMP: "Print the stacks of a worker's threads and tasks.",
}

WORKERS = """List the workers, each with its state, its process and its running jobs; or control one worker.

A worker is a worker process of `runworkers` (--processes starts several), or a Worker in another program.
Below it are the processes in which it runs isolated and subprocess jobs. Its entry begins with the ID that
the options take. With the database storage, the process of one of the workers is the leader, which sweeps for
all of them.

--quiet makes a worker stop claiming and finish its running jobs. --resume makes it claim again. --stop stops
it as SIGTERM does; a service manager may start a new one. --dump prints the stack of each of its threads
and tasks.

A worker usually receives a command at once, and at the latest with its next heartbeat (HEARTBEAT).
"""


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    parser = subcommands.add("workers", workers, WORKERS)
    commands = parser.add_mutually_exclusive_group()
    for command, meaning in CONTROL_HELP.items():
        commands.add_argument(f"--{command}", metavar="ID", help=meaning)


def workers(options: Options, output: Output) -> None:
    """List the workers, or control one."""
    storage = get_storage()
    for command in COMMANDS:
        if options[command]:
            answer = control(storage, command, options[command])
            output.document({"worker": options[command], "command": command, "answer": answer})
            output.line(answer)
            return
    infos = storage.workers.all()
    output.document([described(info) for info in infos])
    for line in listing(infos):
        output.line(line)


NO_WORKERS = "No live workers."
LOOK_EVERY = 0.1
"""Seconds between checks for a dump."""
MIN_DUMP_TIMEOUT = 10_000
"""Minimum milliseconds to wait for a dump; at least two heartbeats."""


def listing(infos: Sequence[WorkerInfo]) -> Iterator[str]:
    """Yield lines about the workers, and about the jobs that each runs."""
    if not infos:
        yield NO_WORKERS
        return
    hosts = len({info.host for info in infos})
    yield f"{numbered(len(infos), 'worker')} on {numbered(hosts, 'host')}"
    now = SYSTEM_CLOCK.now()
    for info in sorted(infos, key=lambda info: (info.host, info.pid, info.id)):
        silent = max(0, now - info.seen_at) / 1_000
        yield (
            f"{info.id}: {info.state}{', leader' if info.leads else ''}, "
            f"{info.active:,} of {info.concurrency:,} slots in use, last heartbeat {silent:.0f} s ago"
        )
        yield f"    {', '.join(_about(info))}"
        for job in info.jobs:
            yield f"    {(now - job.started_at) / 1_000:.0f} s: {job.name} [{job.id}] of queue {job.queue}"
        for process in info.processes:
            yield f"    {_process(process)}"


def described(info: WorkerInfo) -> dict[str, Any]:
    """Return a worker, and the jobs that it runs, as values for a JSON document."""
    return {
        "id": info.id,
        "state": info.state,
        "leads": info.leads,
        "host": info.host,
        "pid": info.pid,
        "supervisor": info.supervisor,
        "kind": info.kind or None,
        "queues": None if info.queues is None else list(info.queues),
        "concurrency": info.concurrency,
        "active": info.active,
        "memory_bytes": info.rss or None,
        "version": info.project or None,
        "djqueue": info.version or None,
        "started_at": to_datetime(info.started_at),
        "heartbeat_at": to_datetime(info.seen_at),
        "jobs": [
            {
                "id": job.id,
                "queue": job.queue,
                "name": job.name,
                "started_at": to_datetime(job.started_at),
            }
            for job in info.jobs
        ],
    }


def control(storage: Storage, command: str, worker_id: str) -> str:
    """Send a command to a worker, and return a message: for a dump, its text.

    Raises StorageError if the worker does not exist, is stopping already, or sends no dump.
    """
    before = storage.workers.dump(worker_id) if command == DUMP else None
    answer = storage.workers.control(worker_id, command)
    if answer == NOT_FOUND:
        raise StorageError(f"unknown worker {worker_id!r}")
    if answer == STOPPING:
        raise StorageError(f"worker {worker_id!r} is already stopping")
    if command != DUMP:
        return f"Sent {command} to {worker_id}"
    interval = max((info.heartbeat for info in storage.workers.all() if info.id == worker_id), default=0)
    return _waited(
        lambda: (dump := storage.workers.dump(worker_id)) and dump != before and dump.text,
        max(MIN_DUMP_TIMEOUT, 2 * interval),
        f"worker {worker_id!r} did not answer in time",
    )


def _about(info: WorkerInfo) -> Iterator[str]:
    yield f"process {info.pid} on {info.host}"
    if info.supervisor is not None:
        yield f"supervisor {info.supervisor}"
    if info.kind:
        yield info.kind
    yield "all queues" if info.queues is None else f"queues {' '.join(info.queues)}"
    if info.rss:
        yield f"{info.rss / 1_000_000:,.0f} MB"
    if info.project:
        yield f"version {info.project}"
    if info.version:
        yield f"djqueue {info.version}"
    yield f"started {to_datetime(info.started_at).isoformat(' ', 'seconds')}"


def _process(process: ProcessInfo) -> str:
    doing = f"running {process.job} of queue {process.queue}" if process.job else "idle"
    memory = f", {process.rss / 1_000_000:,.0f} MB" if process.rss else ""
    return f"process {process.pid}: {process.name}, {process.executor}, {doing}{memory}"


def _waited(look: Callable[[], object], milliseconds: int, failure: str) -> str:
    end = SYSTEM_CLOCK.monotonic() + milliseconds
    while True:
        answer = look()
        if answer:
            return str(answer)
        if SYSTEM_CLOCK.monotonic() >= end:
            raise StorageError(failure)
        time.sleep(LOOK_EVERY)
