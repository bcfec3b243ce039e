"""The record of a job, and the small values that travel between storages and workers."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from .followup import follower
from .foreign import RESULT_HERE
from .options import JobKey, JobOptions
from .states import State


class JobFailure(NamedTuple):
    """What a handler raised."""

    type: str
    """The exception class's dotted name."""
    message: str
    traceback: str = ""


class AttemptRecord(NamedTuple):
    """One run of a job, after its end."""

    attempt: int
    """1 is the first run."""
    worker: str
    started_at: int
    """UTC milliseconds, as `finished_at`."""
    finished_at: int
    outcome: str
    """completed | failed | retried | released | stalled | cancelled"""
    error: JobFailure | None = None


class JobRecord(NamedTuple):
    """A job as it was at one moment: what every storage answers when asked for a job."""

    id: str
    queue: str
    name: str
    payload: bytes
    options: JobOptions
    state: State
    created_at: int
    run_at: int
    attempts: int
    failures: int
    stalls: int
    worker: str
    started_at: int
    finished_at: int
    result: bytes | None
    error: JobFailure | None
    reason: str
    progress: Any
    history: tuple[AttemptRecord, ...]
    logs: tuple[tuple[int, str], ...]
    items: int = 0
    """How many items its last run has sent."""

    def all_attempts(self) -> tuple[AttemptRecord, ...]:
        """Every ended run; the one that completed the job is not in `history`, being the record's own."""
        if self.state is not State.COMPLETED:
            return self.history
        last = AttemptRecord(self.attempts, self.worker, self.started_at, self.finished_at, "completed")
        return (*self.history, last)


class Batch(NamedTuple):
    """Jobs to enqueue that differ only in payload and id."""

    queue: str
    name: str
    options: JobOptions
    payloads: list[bytes]
    ids: list[str] | None = None
    """Ids given by the caller, one for each payload; None has the storage make them."""
    delay: int | None = None
    """Milliseconds from the storage's now."""
    run_at: int | None = None
    """UTC milliseconds; `delay` and `run_at` exclude each other."""
    fresh: bool = False
    """Whether the ids were made just now by the caller, so that no earlier job can have them."""


class EnqueueResult(NamedTuple):
    """What became of one enqueue. A duplicate is an answer, never an error."""

    id: str
    status: str
    """queued | duplicate | completed | rejected (a dead letter from the start: see `JobOptions.rejected`)"""
    queue: str
    existing_state: State | None = None
    """Of a duplicate: the state of the job that was there before."""
    result: Any = None
    """Of a completed one: what the earlier run returned (in bytes where a storage answers)."""
    replaced: str | None = None
    """Of a queued one: the id of the job with its unique key in whose place it is."""

    def wait(self, timeout: float | timedelta = 30.0) -> Any:
        """Wait for the job's end, and return what it returned.

        Not in the transaction in which the job was enqueued: it starts after the commit.

        Args:
            timeout: Seconds, or a timedelta.

        Raises:
            JobFailedError: The job failed.
            JobCancelledError: The job was cancelled.
            JobTimeoutError: The time is over; the job goes on.
            JobNotFoundError: The job, or its result, is no longer kept.
        """
        return follower().wait(self, timeout)

    async def await_(self, timeout: float | timedelta = 30.0) -> Any:
        """Async version of `wait`, whose name would be a keyword with an `a` before it."""
        return await follower().await_(self, timeout)

    def refresh(self) -> "EnqueueResult":
        """Return a result with the job's state of now as `existing_state`.

        Its `status` is `completed`, and `result` what the job returned, if the job has completed.

        Raises:
            JobNotFoundError: The job is no longer kept.
        """
        return follower().refresh(self)

    async def arefresh(self) -> "EnqueueResult":
        """Async version of `refresh`."""
        return await follower().arefresh(self)

    def job(self) -> Any:
        """Return the job as `Queue.get_job` does; None if it is no longer kept."""
        return follower().job(self)

    async def ajob(self) -> Any:
        """Async version of `job`."""
        return await follower().ajob(self)


if not TYPE_CHECKING:

    def _explain(result: EnqueueResult, name: str) -> Any:
        """Raise for an attribute that is not there; the calls of other job queues name the call here."""
        here = RESULT_HERE.get(name)
        hint = f". Use {here}" if here else ""
        raise AttributeError(f"{type(result).__name__!r} object has no attribute {name!r}{hint}")

    EnqueueResult.__getattr__ = _explain


class ClaimRequest(NamedTuple):
    """What a worker can start at once."""

    worker: str
    slots: int
    """Free slots: the most jobs that the answer may hold."""
    names: frozenset[str]
    """Job names that it has handlers for."""
    queues: tuple[str, ...] | None = None
    """None is every queue."""
    process: str = ""
    """The process of the worker, as the storage that serves it knows it; empty: the storage's own."""
    stalled: bool = True
    """Whether jobs with a stalled attempt may be claimed, one at a time."""


class Claimed(NamedTuple):
    """A job handed to a worker, under a lease."""

    id: str
    queue: str
    name: str
    payload: bytes
    options: JobOptions
    token: int
    """To be shown with every later word about this run."""
    attempts: int
    """Runs begun, this one included."""
    failures: int
    stalls: int
    created_at: int
    lease: int
    """Milliseconds until the claim is lost unless renewed."""
    waited: int = 0
    """Milliseconds from when it could be claimed, as far as its time says, to this claim."""


class Claims(NamedTuple):
    """The answer to a claim."""

    jobs: list[Claimed]
    wait: int | None = None
    """Milliseconds until more may be claimable by the clock alone; None: not by the clock."""


class Outcome(NamedTuple):
    """How a run ended, as its worker tells the storage."""

    queue: str
    id: str
    token: int
    kind: str
    """complete | retry | release | fail | cancel"""
    result: bytes | None = None
    delay: int = 0
    """Milliseconds before the next run, for retry and release."""
    error: JobFailure | None = None
    reason: str = ""
    """For fail: the dead letter's reason."""


class Finished(NamedTuple):
    """The answer to outcomes: for each whether it was accepted (a stale token is not), and new claims."""

    accepted: list[bool]
    claims: Claims


class Lease(NamedTuple):
    """One claim, to be renewed."""

    queue: str
    id: str
    token: int


class Renewal(NamedTuple):
    """What became of one lease."""

    held: bool
    cancel_requested: bool = False


class ProgressReport(NamedTuple):
    """Progress and log lines of a run."""

    queue: str
    id: str
    token: int
    progress: Any = None
    """None leaves the job's progress as it is."""
    lines: tuple[tuple[int, str], ...] = ()


class Emission(NamedTuple):
    """Items of a generator's run, in order."""

    queue: str
    id: str
    token: int
    start: int
    """How many items of the run came before these: what is said twice is kept once."""
    items: tuple[bytes, ...]


class ItemMark(NamedTuple):
    """How far a reader of a job's items has come."""

    id: str
    """The job's."""
    run: int = 0
    """The token of the run whose items it reads; 0: it has read none."""
    start: int = 0
    """How many of them it has."""


class ItemPage(NamedTuple):
    """Items of a job's last run, and how the job stood at the moment at which they were read."""

    state: State
    content_type: str
    run: int
    """The run's token; 0: it has sent nothing, and is over."""
    start: int
    """The number of the first item: that of the mark, or 0 if that was of another run."""
    items: tuple[bytes, ...]
    """As many as one answer holds: there may be more behind them."""
    sent: int
    """How many items the run has sent so far, whether they are kept or not."""


class Event(NamedTuple):
    """A transition that has happened, or a word about a run."""

    queue: str
    id: str
    name: str
    """The job's name."""
    event: str
    """The transition's word: see `core.states`."""
    state: State
    at: int
    items: int = 0
    """Of an `item`: how many items the run has sent by now."""


class Incident(NamedTuple):
    """A transition that no worker has told: a lease that was lost, a time that was over, a cancellation."""

    queue: str
    id: str
    name: str
    """The job's name."""
    event: str
    """stalled | failed | cancelled | fired (a schedule has enqueued it)"""
    reason: str = ""
    """Of a job that failed or was cancelled: why; of a schedule's job: the schedule's name."""
    error: JobFailure | None = None


class DeadLetterRecord(NamedTuple):
    """A job that failed for good."""

    queue: str
    id: str
    reason: str
    """explicit_fail | max_attempts_exceeded | timeout | stalled | ttl_expired | worker_lost |
    dependency_failed | enqueue_rejected | invalid_payload | invalid_result | unknown"""
    entered_at: int
    expires_at: int
    retries: int = 0
    """How often it has been retried by itself."""
    next_retry_at: int = 0
    """0: not by itself."""
    name: str = ""
    """The job's name."""
    error_type: str = ""
    """Of its last error, as `error_message`."""
    error_message: str = ""
    unmet: tuple[JobKey, ...] = ()
    """With the reason `dependency_failed`: the dependencies that had not completed."""


class DeadLetterPage(NamedTuple):
    """Some of a queue's dead letters, oldest first."""

    letters: list[DeadLetterRecord]
    next: str | None
    """Where the next page begins, to be shown to the storage that said so; None: this is the last one."""
    at: int
    """The storage's time, in UTC milliseconds."""


class CancelResult(NamedTuple):
    """What became of a cancel."""

    id: str
    status: str
    """cancelled | requested (it is running, and has been asked to stop) | completed | failed |
    not_found"""

    def __bool__(self) -> bool:
        return self.status in ("cancelled", "requested")


class RunningJob(NamedTuple):
    """A job that a worker runs."""

    queue: str
    id: str
    name: str
    started_at: int
    """UTC milliseconds, by the worker's clock."""


class WorkerDump(NamedTuple):
    """Where each thread and task of a worker was when it was asked."""

    at: int
    """UTC milliseconds at which the storage was told."""
    text: str


class WorkerInfo(NamedTuple):
    """A worker as it describes itself."""

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
    """running | quiet (it claims no more, until it is told to) | stopping"""
    kind: str = ""
    """runworkers (a process of its own) | embedded (in a process that is there for something else)"""
    heartbeat: int = 0
    """Milliseconds between two signs of life, at most; 0: not known."""
    rss: int = 0
    """Bytes of memory that its process has; 0: not known."""
    version: str = ""
    """Of djqueue."""
    project: str = ""
    """Of the project, as its settings name it."""
    jobs: tuple[RunningJob, ...] = ()
    """What it runs, those first that have run longest: a part of `active`, if these are many."""


REJECTED = "enqueue_rejected"
"""The reason of what was never fit to run: it is not retried before it has another payload."""
DEAD_LETTER_REASONS = (
    "explicit_fail",
    "max_attempts_exceeded",
    "timeout",
    "stalled",
    "ttl_expired",
    "worker_lost",
    "dependency_failed",
    REJECTED,
    "invalid_payload",
    "invalid_result",
    "unknown",
)
