"""The contract that every storage keeps: atomic, batch-first operations.

A storage has a hot path, which workers and producers call for every job, and facets for the rest:

    storage.enqueue, finish, claim, renew, report, emit, listen, sweep     the hot path
    storage.jobs        changes of single jobs: cancel, retry, move …
    storage.queues      pauses, limits, concurrency keys, removal of many jobs
    storage.limiters    limiters that queues share
    storage.workers     live workers, their commands and statistics
    storage.reads       every read: jobs, counts, pages, explanations, metrics
    storage.events      events of jobs, as they happen
    storage.snapshots   everything that the storage holds, for backups
    storage.capabilities    what only some storages have

Operations take and return lists, so that one round trip serves many jobs. Every storage guarantees:

- a claim is one atomic step from waiting to active;
- a claim has a lease and a fencing token; every later operation on the attempt carries the token, and a stale
  token is refused without side effects;
- a claim takes at most as many jobs as the worker has slots, and only job names that it handles;
- any number of processes may call `sweep`; a second sweep changes nothing;
- no record outlives the job, queue or worker that it belongs to.

The test suite `djqueue.testing.contract` verifies this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from djqueue.core.deadlines import Outage
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Claims,
    Emission,
    EnqueueResult,
    Finished,
    Incident,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from djqueue.core.logs import Log
from djqueue.core.overview import Finding
from djqueue.core.threads import on_thread
from djqueue.storage.facets import Reads

from .capabilities import Capabilities
from .facets import EventHandler as EventHandler
from .facets import Events, Jobs, Limiters, Queues, Workers
from .facets import Unsubscribe as Unsubscribe
from .snapshots import Snapshots

logger = Log("djqueue.storage")

P = ParamSpec("P")
T = TypeVar("T")


class Storage(ABC):
    """A store of jobs. Methods may be called from any thread.

    The async methods run their sync versions in a thread, unless a storage overrides them.
    """

    jobs: Jobs
    queues: Queues
    limiters: Limiters
    workers: Workers
    reads: Reads
    events: Events
    snapshots: Snapshots

    on_incidents: Callable[[Sequence[Incident]], None] | None = None
    """Callback for transitions that this storage's own calls made and no worker reported: attempts that
    stalled, and jobs that failed without an attempt or were cancelled. It is called from any thread, and only
    in the process that made the call."""

    @property
    def capabilities(self) -> Capabilities:
        """The optional features of this storage."""
        return Capabilities()

    @property
    def outage(self) -> Outage | None:
        """Start and reason of the current outage of the storage's server; None if the server responds.

        During an outage, calls do not wait for the server: reads do without it or fail at once.
        """
        return None

    def notify_incidents(self, incidents: Sequence[Incident]) -> None:
        """Pass incidents to the callback."""
        if self.on_incidents is not None:
            try:
                self.on_incidents(incidents)
            except Exception:
                # The operation that caused them succeeded, and must not fail now.
                logger.exception("The on_incidents callback raised an exception.")

    has_worker = False
    """Whether this process has made a worker for it."""

    # In tests.

    @classmethod
    def options_in_tests(cls, options: Mapping[str, Any], prefix: str) -> dict[str, Any]:  # noqa: ARG003
        """Return the options with which a test run uses this storage, apart from all other processes.

        Storages in the project's database need nothing else: Django has replaced it by a test database.
        """
        return dict(options)

    def discard(self) -> None:  # noqa: B027
        """Delete what a test run has left, at its end."""

    # Connections.

    def connect(self) -> None:  # noqa: B027 - nothing to do for most storages
        """Prepare for claims. A worker calls this once, before its first claim."""

    def close(self) -> None:  # noqa: B027
        """Close connections and threads. Everything that was accepted is stored when this returns."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line that names the storage and its location, without secrets."""

    def held_up_by(self) -> str:
        """Return a sentence that names the process for which calls wait; empty if it is unknown.

        This does not ask the storage, which may not answer.
        """
        return ""

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one of the sync methods from a coroutine, without blocking its event loop."""
        return await on_thread(method, *args, **kwargs)

    def probe(self) -> Sequence[Finding]:
        """Write to the storage as an enqueue does, for the health checks.

        Returns problems that an enqueue might not have yet, such as keys that Redis has lost. Raises what an
        enqueue would raise, such as the error of a full disk.
        """
        return ()

    # The hot path.

    @abstractmethod
    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs, and return a result for each job, in order.

        If a job's id or unique key is in use, its result is `duplicate` with the state of the existing job,
        or `completed` with the return value in bytes. Ids of failed and cancelled jobs can be enqueued
        again. Jobs with `JobOptions.rejected` become dead letters even if the queue
        is full, with the result `rejected`; if the id is in use, nothing changes.

        Raises:
            QueueFullError: A queue has no room for a batch (after a wait, if its policy has one). None of
                that batch is enqueued; earlier batches are.
        """

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Async version of `enqueue`."""
        return await self.acall(self.enqueue, batches)

    def enqueue_each(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[EnqueueResult]]]:
        """Enqueue batches one after the other, in order, and yield each with its results.

        A storage may take the next batch from the iterable and send it before it has the results of the one
        before. If the iterable raises an exception, the batches before are enqueued and yielded first.

        Raises the errors of `enqueue`. The batches that have been yielded are enqueued then, the one that
        failed may be if the storage was unavailable, and so may the one after it.
        """
        for batch in batches:
            yield batch, self.enqueue([batch])

    @abstractmethod
    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """End the attempts whose tokens are valid, and claim the next jobs in the same round trip."""

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """Async version of `finish`, for workers: outcomes of jobs that another transaction has locked may be
        left out.
        """
        return await self.acall(self.finish, outcomes, then)

    def claim(self, request: ClaimRequest) -> Claims:
        """Move waiting jobs to active."""
        return self.finish([], request).claims

    @abstractmethod
    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend the claims whose tokens are valid to a full lease from now."""

    @abstractmethod
    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        """Record progress and log lines of attempts whose tokens are valid.

        The answer is None for a job that another transaction has locked: send its report again.
        """

    @abstractmethod
    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        """Add streamed items of attempts whose tokens are valid.

        Items that were already added are ignored; items after a gap are refused. A job keeps the items of its
        last attempt only. The answer is None for a job that another transaction has locked: send them again.
        """

    @abstractmethod
    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake`, from any thread, when a job of these queues (None: of any queue) may be claimable."""

    def subscribe_new(self, queue: str, handler: EventHandler, job_id: str) -> Unsubscribe:
        """Subscribe to the events of a job that this thread enqueues next.

        A storage may begin the subscription with the enqueue, in one round trip.
        """
        return self.events.subscribe(queue, handler, job_id)

    @abstractmethod
    def sweep(self) -> Swept:
        """Process everything that is due: delayed jobs, expired leases and TTLs, and old records."""

    def maintain(self) -> None:
        """Do the share of this process in the periodic work; each worker calls it about once a second.

        A storage may let one process at a time sweep, as long as another one soon takes its place.
        """
        self.sweep()

    def resign(self) -> None:  # noqa: B027 - optional
        """Let another process do the periodic work from now on; a worker that ends calls it."""
