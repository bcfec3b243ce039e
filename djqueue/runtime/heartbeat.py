"""The heartbeat: renews leases, registers the worker, and executes its commands, on a thread of its own.

A handler that blocks the event loop delays every other part of the worker, but not the heartbeat, so its job
does not count as stalled.
"""

import os
import socket
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING

from djqueue._version import __version__
from djqueue.core.workers import DUMP, QUIET, RESUME, STOP, RunningJob, WorkerInfo

from .leasekeeper import seconds_between_looks
from .loops import Periodic
from .runs import Run, lease_of
from .stopping import Stop
from .supervised import supervisor
from .tracebacks import stacks

if TYPE_CHECKING:
    from .worker import Worker

SHARE = 3
"""Number of renewals within the time of a lease, so that one lost message does not end it."""
RETRY = 1_000
"""Maximum of milliseconds until the next try while the storage is unavailable."""
SUMMARY = 10_000
"""Milliseconds between two summaries in the log."""
GRACE = 5.0
"""Seconds that the worker's shutdown waits for a heartbeat in progress."""
MAX_NAMED = 20
"""Maximum of running jobs in a worker's entry."""
STATM = Path("/proc/self/statm")
"""File in which Linux reports a process's number of memory pages."""


class Heartbeat:
    """Renews all leases of a worker in one call, and learns which jobs are lost or cancelled."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._storage = worker.storage
        self._runs = worker.runs
        self._clock = worker.clock
        self._events = worker.events
        self._lease_table = worker.lease_table
        self._interval = worker.options.heartbeat
        self._is_unavailable = False
        self._summed_at = worker.clock.monotonic()
        self.shortest_lease = self._interval * SHARE
        """Milliseconds of the shortest lease claimed so far."""
        self._thread = Periodic("djqueue-heartbeat", self._seconds, self._beat)
        self._life: Periodic | None = None
        """Shows the lease keeper that this process's threads run, also while the storage does not answer."""
        if self._lease_table is not None:
            self._life = Periodic("djqueue-life", self._seconds_of_life, self._show_life)

    def start(self) -> None:
        """Start the threads."""
        self._thread.start()
        if self._life is not None:
            self._show_life()
            self._life.start()

    def note_unavailable(self, error: Exception) -> None:
        """Register the worker as soon as the storage answers. Called before `start`."""
        self._is_unavailable = True
        self._events.storage_failed("renew", error)

    def expect(self, lease: int) -> None:
        """Renew more often, for a job with a shorter lease than any before."""
        self.shortest_lease = lease
        if self._lease_table is not None:
            self._lease_table.expect(lease)
        self._thread.hasten()

    def hasten(self) -> None:
        """Send a heartbeat now. From any thread."""
        self._thread.hasten()

    def stop(self) -> None:
        """Stop the threads, and wait a limited time for a heartbeat in progress."""
        self._thread.stop()
        self._thread.join(GRACE)
        if self._life is not None and self._lease_table is not None:
            self._life.stop()
            self._life.join(GRACE)
            self._lease_table.show_life(0)

    def renew(self, runs: list[Run]) -> None:
        """Renew the leases of some runs, and stop those that are lost or cancelled.

        Raises what the storage raises.
        """
        renewals = self._storage.renew([lease_of(run) for run in runs]) if runs else []
        for run, renewal in zip(runs, renewals, strict=True):
            if not renewal.held:
                self._worker.lose(run)
            elif renewal.cancel_requested:
                self._worker.executor.stop(run, Stop.REQUESTED)

    def _beat(self) -> None:
        try:
            self.renew(self._runs.held())
            while commands := self._storage.workers.register(worker_info(self._worker)):
                for command in commands:
                    self._execute(command)
        except Exception as error:
            self._is_unavailable = True
            self._events.storage_failed("renew", error)
        else:
            self._is_unavailable = False
            self._events.storage_worked("renew")
        now = self._clock.monotonic()
        if self._lease_table is not None:
            self._lease_table.replace(map(lease_of, self._runs.held()))
        if now - self._summed_at >= SUMMARY:
            self._summed_at = now
            self._events.summary(len(self._runs.executing))

    def _execute(self, command: str) -> None:
        """Execute one command that the storage had for the worker."""
        self._events.command_received(command)
        if command == QUIET:
            self._worker.quiet()
        elif command == RESUME:
            self._worker.resume()
        elif command == STOP:
            self._worker.stop()
        elif command == DUMP:
            self._save_dump()
        else:
            self._events.command_unknown(command)

    def _save_dump(self) -> None:
        info = worker_info(self._worker)
        try:
            self._storage.workers.save_dump(info.id, stacks(self._heading(info), self._worker.loop))
        except Exception as error:
            # The storage is unavailable, or a stack changed while it was read; other commands still count.
            self._events.dump_failed(error)

    def _heading(self, info: WorkerInfo) -> str:
        now = self._clock.now()
        at = datetime.fromtimestamp(now / 1_000, UTC).isoformat(timespec="seconds")
        lines = [
            f"Worker {info.id}, process {os.getpid()}, {info.state}, at {at}",
            f"djqueue {__version__}, Python {python_version()}",
            f"{info.active} of {info.concurrency} slots in use",
        ]
        lines += [
            f"  {job.name} [{job.id}] of queue {job.queue}, for {(now - job.started_at) / 1_000:.1f} s"
            for job in info.jobs
        ]
        return "\n".join(lines) + "\n"

    def _show_life(self) -> None:
        if self._lease_table is not None:
            self._lease_table.show_life(self._clock.monotonic())

    def _seconds_of_life(self) -> float:
        table = self._lease_table
        return seconds_between_looks(self.shortest_lease if table is None else table.shortest_lease)

    def _seconds(self) -> float:
        interval = min(self._interval, self.shortest_lease // SHARE)
        if self._is_unavailable:
            interval = min(interval, RETRY)
        return max(1, interval) / 1_000


def worker_info(worker: "Worker") -> WorkerInfo:
    """Return the worker's entry in the storage's list of workers. From any thread."""
    options = worker.options
    state = "quiet" if worker.paused else "running"
    return WorkerInfo(
        options.worker_id,
        socket.gethostname(),
        os.getpid(),
        options.queues,
        tuple(sorted(worker.handlers)),
        options.concurrency,
        worker.started_at,
        active=worker.running,
        state="stopping" if worker.stopping else state,
        kind=worker.kind,
        heartbeat=options.heartbeat,
        rss=_memory(),
        version=__version__,
        project=worker.settings.version,
        jobs=_longest_running(worker),
        supervisor=supervisor(),
        processes=worker.executor.process_infos(),
    )


def _memory() -> int:
    """Return the bytes that this process has in memory; 0 if the system does not report them."""
    try:
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _longest_running(worker: "Worker") -> tuple[RunningJob, ...]:
    """Return the jobs that have run longest."""
    offset = worker.clock.now() - worker.clock.monotonic()
    # Runs are in the order in which they started.
    return tuple(
        RunningJob(run.claimed.queue, run.claimed.id, run.claimed.name, offset + run.since)
        for run in islice(worker.runs.executing.copy(), MAX_NAMED)
    )
