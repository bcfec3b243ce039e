"""The contract that every storage keeps: atomic, batch-first operations.

Each operation takes and returns lists, so that one round trip serves many jobs; a single job is a list
of one. Whatever happens to the caller:

- a claim is one atomic step from waiting to active;
- a claim has a lease and a fencing token; every later word about the run carries the token, and a
  stale one is refused without side effects;
- a claim takes only as many jobs as the worker has slots, and only names that it handles;
- any number of maintainers may run `maintain`; a second sweep is a no-op;
- nothing outlives what it serves.

`djqueue.testing.contract` holds a storage to this.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar, Unpack

from djqueue.core.breaker import Outage
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    Claims,
    DeadLetterPage,
    DeadLetterRecord,
    Emission,
    EnqueueResult,
    Event,
    Finished,
    Incident,
    ItemMark,
    ItemPage,
    JobRecord,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    WorkerDump,
    WorkerInfo,
)
from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.maintenance import Swept
from djqueue.core.sharing import LimiterState
from djqueue.core.states import State

from .bulkwrites import BulkWriteReports
from .export import Export
from .feed import Feed
from .inspector import Inspector
from .staging import Staging

logger = logging.getLogger("djqueue.storage")

P = ParamSpec("P")
T = TypeVar("T")

EventHandler = Callable[[Event], None]
Unsubscribe = Callable[[], None]


class Storage(Inspector):
    """A place for jobs. Methods may be called from any thread.

    The `a…` twins that a worker and an async producer need run the plain methods in a thread, unless a
    storage has something better.
    """

    in_process = False
    """Whether only this process sees its jobs, and runs them."""

    max_in_flight = 1
    """Calls of `afinish` that a worker makes at once, if it has the slots: more where the storage is another
    process, which works while this one does."""

    on_incidents: Callable[[Sequence[Incident]], None] | None = None
    """Told, on any thread, what this storage's calls have done to jobs beside what workers told of: runs that
    were lost, jobs that failed without a run or were cancelled. Each by the process whose call it was."""

    @property
    def outage(self) -> Outage | None:
        """Since when and why the server that this storage asks has not answered; None while it does.

        Callers do not wait for such a server: reads do without it or fail at once.
        """
        return None

    @property
    def staging(self) -> Staging | None:
        """Where jobs can be put aside, to come together; None if this storage has no such place."""
        return None

    @property
    def imports(self) -> BulkWriteReports | None:
        """The reports of bulk writes; None if this storage keeps none."""
        return None

    @property
    def export(self) -> Export | None:
        """What can be read of it as a whole; None if nothing can."""
        return None

    @property
    def feed(self) -> Feed | None:
        """What happens in it, to be followed; None if that is not kept."""
        return None

    def told(self, incidents: Sequence[Incident]) -> None:
        """Pass incidents on, if somebody is to be told of them."""
        if self.on_incidents is not None:
            try:
                self.on_incidents(incidents)
            except Exception:
                # What has happened has happened: the caller's operation did not fail.
                logger.exception("The on_incidents callback raised an exception.")

    # The scheduler's place, where a storage has a scheduler.

    def scheduler_claim(self) -> tuple[bytes, int] | None:
        """What `renew_scheduler_claim` needs, and for how many milliseconds the scheduler's lease holds; None
        if this process is not the scheduler."""
        return None

    def renew_scheduler_claim(self, claim: bytes) -> None:
        """Renew the scheduler's lease from another process, while the scheduler's is too busy to do so.

        Changes nothing if the scheduler has given its lease back, or lost it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scheduler")

    # Life.

    def connect(self) -> None:
        """Get ready. Called once by a worker before its first claim."""

    def close(self) -> None:
        """Let go of connections and threads; what was accepted is safe when this returns."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people: which storage this is and where; never a secret."""

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one of the plain methods from a coroutine, without holding up its loop."""
        return await asyncio.to_thread(method, *args, **kwargs)

    # Enqueue.

    @abstractmethod
    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs; an answer for each job, in order.

        A taken id or unique key answers `duplicate` with the state of the job that is there, or
        `completed` with its result in bytes; an id that failed or was cancelled is enqueued again.
        Jobs with `JobOptions.rejected` become dead letters, without need of room, and all answer `rejected`;
        one whose id is taken, in whatever state, changes nothing.

        Raises QueueFullError if a queue has no room for a batch (after a wait, if its policy says so), of
        which nothing is enqueued then; earlier batches are.
        """

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        return await self.acall(self.enqueue, batches)

    def transaction_of(self, batch: Batch) -> str | None:
        """The alias of the database whose open transaction such jobs would be a part of; None: of none."""
        return None

    async def atransaction_of(self, batch: Batch) -> str | None:
        """See `transaction_of`."""
        return None

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        """Return the alias of the database in whose open transaction the caller enqueued the job, if any."""
        return None

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        """Async version of `uncommitted_in`."""
        return None

    # Claim and finish.

    @abstractmethod
    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """End runs whose tokens hold, and claim the next jobs in the same round trip."""

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `finish`."""
        return await self.acall(self.finish, outcomes, then)

    def claim(self, request: ClaimRequest) -> Claims:
        """Waiting jobs to active."""
        return self.finish([], request).claims

    @abstractmethod
    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend claims whose tokens hold to a whole lease from now."""

    @abstractmethod
    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """Progress and log lines of runs whose tokens hold."""

    @abstractmethod
    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Items of runs whose tokens hold; what has been said before is not kept twice, and those that come
        when others before them are missing are refused. A job has the items of its last run.
        """

    # Single jobs of one queue, by id.

    @abstractmethod
    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """Take jobs back: a pending one never starts, an active one is asked to stop."""

    @abstractmethod
    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """Delayed jobs to waiting; False for one that is not delayed."""

    @abstractmethod
    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """Waiting and delayed jobs to a time in UTC milliseconds; False for others."""

    @abstractmethod
    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """Give pending jobs another priority, another payload, or both; False for one that is not pending.

        A waiting job goes behind those that have its new priority; else each keeps its place.
        """

    @abstractmethod
    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """Give one job another payload in the place of the one that the caller knows, in one step.

        old: the payload that it has as far as the caller knows; if it has another one, nothing is done.
        retry: the job is a dead letter, and waits with the new payload afterwards; else it is pending, and
            keeps its place.

        updated (a pending one) | retried (a dead letter) | not_found | changed | unique_key_taken, or
        the state in which it is instead.
        """

    @abstractmethod
    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """Pending jobs to another queue, behind those that wait there, with id, counters, times and keys;
        failed ones to its dead letters, with theirs.

        For each: moved | not_found | active | ended | duplicate (its id is there) | unique_key_taken (a
        live job there has it) | group_needed (each job there needs a group, and it has none).
        What waits for a job that was moved waits for it where it is then.
        """

    @abstractmethod
    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """Dead letters to waiting, or to blocked: retried | blocked_again | not_found | not_failed |
        unique_key_taken | rejected (never valid: use `replace_payload`) | dependency_gone, for each.

        A job with the reason `dependency_failed` waits again for the dependencies that had not completed,
        also for those that have failed and are not retried yet. It is refused as `dependency_gone` if one of
        them was cancelled or removed.

        dry_run: only say what would become of each if nothing else happened.
        """

    @abstractmethod
    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """Forget jobs with everything that is theirs; False for one that is active or not there.

        ended_before: only jobs that have ended, before this time in UTC milliseconds; False for the others.
        """

    # Queues.

    @abstractmethod
    def queues(self) -> list[str]:
        """Names of the queues that have been used, sorted."""

    @abstractmethod
    def pause(self, queue: str) -> None:
        """Nothing of the queue is claimed until `resume`."""

    @abstractmethod
    def resume(self, queue: str) -> None:
        """End a pause."""

    @abstractmethod
    def is_paused(self, queue: str) -> bool:
        """Whether the queue is paused."""

    @abstractmethod
    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Limit starts per time, and jobs active at once, over all workers.

        None removes a limit; one that is not given stays as it is.
        """

    @abstractmethod
    def set_group_limit(self, queue: str, group: str | None, **said: Unpack[GroupWords]) -> None:
        """What counts for a group; for every group to which nothing else was said, if `group` is None.

        Only the words that are given change. One that is None takes back what was said; then the queue's
        counts, or its policy's. A changed rate begins with a full bucket.
        """

    @abstractmethod
    def pause_group(self, queue: str, group: str) -> None:
        """No job of a group is claimed until `resume_group`."""

    @abstractmethod
    def resume_group(self, queue: str, group: str) -> None:
        """End a group's pause."""

    @abstractmethod
    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """What was said to groups and has not been taken back; under None, to every group."""

    # Limiters that queues share: see `QueuePolicy.limiter`.

    @abstractmethod
    def set_limiter(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Limit starts per time, and weights of jobs active at once, over a limiter's queues.

        None removes a limit; one that is not given stays as it is.
        """

    @abstractmethod
    def limiter_state(self, name: str) -> LimiterState:
        """What a limiter allows, and how much of it is used."""

    # More of queues.

    @abstractmethod
    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """Forget jobs in these states (active is passed over) that ended, or were enqueued, before a
        time in UTC milliseconds; returns how many.
        """

    @abstractmethod
    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """Forget a queue with all its jobs; returns how many.

        Raises StorageError if some are active, unless forced: then their ends are refused.
        """

    # Reads.

    @abstractmethod
    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Records by id; None for a job that is not known."""

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `jobs`."""
        return await self.acall(self.jobs, queue, ids)

    @abstractmethod
    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """What has come behind each mark, and the job's state at that moment; None for an unknown job.

        They are kept as long as the result; those of a run that did not end the job, until it waits again.
        """

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """See `items`."""
        return await self.acall(self.items, queue, marks)

    @abstractmethod
    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """States by id; None for a job that is not known."""

    @abstractmethod
    def counts(self, queue: str) -> dict[State, int]:
        """How many jobs of the queue are in each state."""

    @abstractmethod
    def waiting_names(self, queue: str) -> dict[str, int]:
        """Claimable jobs by job name."""

    @abstractmethod
    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """Up to `limit` records of one state (None: all), oldest first, behind the job with an id."""

    @abstractmethod
    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """The queue's dead letters, oldest first."""

    @abstractmethod
    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """Up to `limit` of the queue's dead letters, oldest first; `after`: the `next` of an earlier page.

        One that comes, or goes, between two pages moves no other to another page.
        """

    # Being told.

    @abstractmethod
    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake`, quickly and from any thread, when a job of these queues may be claimable."""

    @abstractmethod
    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one job of it."""

    # Workers.

    @abstractmethod
    def register_worker(self, info: WorkerInfo) -> tuple[str, ...]:
        """Note a worker, or that it is alive; answers the commands that wait for it, each to be done now.

        Each is given once: one whose answer is lost is not done.
        """

    @abstractmethod
    def unregister_worker(self, worker_id: str) -> None:
        """Forget a worker that has stopped."""

    @abstractmethod
    def workers(self) -> list[WorkerInfo]:
        """The workers that have been heard of lately."""

    @abstractmethod
    def control_worker(self, worker_id: str, command: str) -> str:
        """Have a worker do something: quiet (claim no more, finish what runs), resume (claim again), stop
        (end as after a signal), dump (keep here where its threads and tasks are).

        Answers asked (it hears of it with its next sign of life, if there is one) | stopping (it is to end
        already: only a dump can be asked for) | not_found. Until it has heard, the last of quiet, resume and
        stop counts; what it has not heard at its end is forgotten. Raises OptionError for another command.
        """

    @abstractmethod
    def on_worker_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake`, quickly and from any thread, when commands may wait for a worker."""

    @abstractmethod
    def save_dump(self, worker_id: str, text: str) -> bool:
        """Keep a worker's dump for five minutes, in place of an earlier one; False if it is not known here.

        What is longer than 65,536 characters is cut off.
        """

    @abstractmethod
    def worker_dump(self, worker_id: str) -> WorkerDump | None:
        """The dump of a worker that is alive; None if there is none, or its time is over."""

    # Time.

    @abstractmethod
    def maintain(self) -> Swept:
        """One round of what time does: due jobs, lost leases, ttls, dead letters, old records."""
