"""Values that storages, workers and clients exchange."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeGuard

from .errors import ConfigurationError, OptionError
from .headers import Headers
from .options import JobKey, JobOptions
from .states import State
from .suggest import FOREIGN_RESULT_CALLS

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # `default`, which `typing` has from Python 3.13.

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)


class JobFailure(NamedTuple):
    """An error that ended an attempt."""

    type: str
    """The exception class's dotted name."""
    message: str
    traceback: str = ""

    @property
    def summary(self) -> str:
        """Type and message, without the module of built-in exceptions, as Python writes them."""
        return f"{self.type.removeprefix('builtins.')}: {self.message}"


class AttemptRecord(NamedTuple):
    """One ended attempt of a job."""

    attempt: int
    """Number of the attempt, from 1."""
    worker: str
    started_at: int
    """UTC milliseconds, like `finished_at`."""
    finished_at: int
    outcome: str
    """completed | failed | retried | released | stalled | cancelled"""
    error: JobFailure | None = None


class JobRecord(NamedTuple):
    """A job as it was at one moment: the answer of every storage to a read."""

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
    """Number of items streamed by the last attempt."""

    def all_attempts(self) -> tuple[AttemptRecord, ...]:
        """Return every ended attempt; the one that completed the job is not in `history`."""
        if self.state is not State.COMPLETED:
            return self.history
        last = AttemptRecord(self.attempts, self.worker, self.started_at, self.finished_at, "completed")
        return (*self.history, last)


def is_call(payload: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a decoded payload has the arguments of a call.

    A producer may send any value, so both keys are checked for their types, too.
    """
    # A test for `dict` takes a tenth of the time of one for `Mapping`, which comes second.
    return (
        isinstance(payload, (dict, Mapping))
        and len(payload) == 2
        and isinstance(payload.get("args"), (list, tuple))
        and isinstance(payload.get("kwargs"), (dict, Mapping))
    )


class Batch(NamedTuple):
    """Jobs to enqueue that differ only in payload and id."""

    queue: str
    name: str
    options: JobOptions
    payloads: list[bytes]
    ids: list[str] | None = None
    """Ids given by the caller, one for each payload; None lets the storage create them."""
    delay: int | None = None
    """Milliseconds from the storage's current time."""
    run_at: int | None = None
    """UTC milliseconds; excludes `delay`."""
    fresh: bool = False
    """True if the caller has just created the ids, so that no earlier job can have them."""

    @property
    def headers(self) -> Headers:
        """Headers of the jobs."""
        return self.options.headers

    def check_ids(self) -> None:
        """Raise ValueError unless there is one id for each payload, or none at all."""
        if self.ids is not None and len(self.ids) != len(self.payloads):
            raise ValueError(f"expected one id per payload ({len(self.payloads)}), got {len(self.ids)}")

    def with_headers(self, headers: Mapping[str, Any]) -> "Batch":
        """Return the batch with headers added; one of the same name replaces the batch's own.

        Raises OptionError if a header is invalid, or there are too many.
        """
        return self._replace(options=replace(self.options, headers=self.headers.merged(headers)))


class EnqueueResult(NamedTuple, Generic[R_co]):
    """Result of one enqueue. A duplicate is a result, never an error.

    For type checkers, `EnqueueResult[str]` is the result of a job that returns a string.
    """

    id: str
    status: str
    """queued | duplicate | completed | rejected (became a dead letter: see `JobOptions.rejected`) |
    deferred (is enqueued when the caller's transaction commits: see `enqueue_on_commit`)"""
    queue: str
    existing_state: State | None = None
    """State of the existing job, for a duplicate."""
    result: R_co | None = None
    """Return value of the completed job (bytes in the answer of a storage), for `completed`."""
    replaced: str | None = None
    """Id of the job with the same unique key that the new job replaced, for `queued`."""

    def wait(self, timeout: float | timedelta = 30.0) -> R_co:
        """Wait until the job ends, and return its return value.

        Do not call this in the transaction that enqueued the job: the job starts after the commit.

        Args:
            timeout: Seconds, or a timedelta.

        Raises:
            JobFailedError: The job failed.
            JobCancelledError: The job was cancelled.
            ResultTimeoutError: The timeout expired; the job continues.
            JobNotFoundError: The job, or its result, is no longer kept.
        """
        value: R_co = _result_reader().wait(self, timeout)
        return value

    async def await_(self, timeout: float | timedelta = 30.0) -> R_co:
        """Async version of `wait`; the name with an `a` before it is a keyword."""
        value: R_co = await _result_reader().await_(self, timeout)
        return value

    def refresh(self) -> "EnqueueResult[R_co]":
        """Return a copy with the current state of the job as `existing_state`.

        If the job has completed, its `status` is `completed`, and `result` is its return value.

        Raises:
            JobNotFoundError: The job is no longer kept.
        """
        return _result_reader().refresh(self)

    async def arefresh(self) -> "EnqueueResult[R_co]":
        """Async version of `refresh`."""
        return await _result_reader().arefresh(self)

    def job(self) -> Any:
        """Return the job as `Queue.get_job` does; None if it is no longer kept."""
        return _result_reader().job(self)

    async def ajob(self) -> Any:
        """Async version of `job`."""
        return await _result_reader().ajob(self)


if not TYPE_CHECKING:

    def _explain(result: EnqueueResult, name: str) -> Any:
        """Raise AttributeError; for an attribute of other job queues, name the equivalent here."""
        call = FOREIGN_RESULT_CALLS.get(name)
        hint = f". Use {call}" if call else ""
        raise AttributeError(f"{type(result).__name__!r} object has no attribute {name!r}{hint}")

    EnqueueResult.__getattr__ = _explain


class ResultReader(ABC):
    """Reads the job of a result from the storage that has it.

    The core knows no storage: the client installs a reader, which `EnqueueResult` calls.
    """

    @abstractmethod
    def wait(self, result: "EnqueueResult", timeout: float | timedelta) -> Any:
        """Wait until the job ends, and return its return value."""

    @abstractmethod
    async def await_(self, result: "EnqueueResult", timeout: float | timedelta) -> Any:
        """Async version of `wait`."""

    @abstractmethod
    def refresh(self, result: "EnqueueResult") -> "EnqueueResult":
        """Return the result with the current state of the job."""

    @abstractmethod
    async def arefresh(self, result: "EnqueueResult") -> "EnqueueResult":
        """Async version of `refresh`."""

    @abstractmethod
    def job(self, result: "EnqueueResult") -> Any:
        """Return the job, or None."""

    @abstractmethod
    async def ajob(self, result: "EnqueueResult") -> Any:
        """Async version of `job`."""


_installed: list[ResultReader] = []


def install_result_reader(reader: ResultReader) -> None:
    """Install the reader that results use from now on."""
    _installed[:] = [reader]


def _result_reader() -> ResultReader:
    """Return the installed reader. Raises ConfigurationError if the client has not been imported."""
    if not _installed:
        raise ConfigurationError(
            "this result cannot read its job, because djqueue.client is not imported: import djqueue.client, "
            "or use the storage's own methods"
        )
    return _installed[0]


class ClaimRequest(NamedTuple):
    """Jobs that a worker can start at once."""

    worker: str
    slots: int
    """Free slots: the maximum number of claimed jobs."""
    names: frozenset[str]
    """Job names that the worker handles."""
    queues: tuple[str, ...] | None = None
    """Queues to claim from; None: all."""
    process: str = ""
    """The worker's process, as the storage that serves it knows it; empty for the storage's own process."""
    stalled: bool = True
    """True if jobs with a stalled attempt may be claimed, one at a time."""


class Claimed(NamedTuple):
    """A claimed job, with its lease."""

    id: str
    queue: str
    name: str
    payload: bytes
    options: JobOptions
    token: int
    """Fencing token, passed with every later operation on this attempt."""
    attempts: int
    """Attempts started, including this one."""
    failures: int
    stalls: int
    created_at: int
    lease: int
    """Milliseconds until the lease expires unless it is renewed."""
    waited: int = 0
    """Milliseconds from when the job was due to this claim."""


class Claims(NamedTuple):
    """Answer to a claim."""

    jobs: list[Claimed]
    wait: int | None = None
    """Milliseconds until time alone may make more jobs claimable; None: time alone will not."""


class Outcome(NamedTuple):
    """End of an attempt, as its worker reports it."""

    queue: str
    id: str
    token: int
    kind: str
    """complete | retry | release | fail | cancel"""
    result: bytes | None = None
    delay: int = 0
    """Milliseconds before the next attempt, for `retry` and `release`."""
    error: JobFailure | None = None
    reason: str = ""
    """Reason of the dead letter, for `fail`."""


OUTCOME_KINDS = frozenset({"complete", "retry", "release", "fail", "cancel"})


def check_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Raise OptionError for an outcome of an unknown kind."""
    for outcome in outcomes:
        if outcome.kind not in OUTCOME_KINDS:
            raise OptionError(f"unknown outcome {outcome.kind!r}")


class Finished(NamedTuple):
    """Answer to outcomes, and new claims."""

    accepted: Sequence[bool | None]
    """Whether each outcome was accepted: one with a stale token is not. None only from `afinish`: another
    transaction has locked the job, or the server of its queue is away; the outcome must be reported again."""
    claims: Claims


class Swept(NamedTuple):
    """Numbers of jobs that a sweep changed."""

    promoted: int = 0
    stalled: int = 0
    expired: int = 0
    retried: int = 0
    removed: int = 0


class Lease(NamedTuple):
    """One claim to renew."""

    queue: str
    id: str
    token: int


class Renewal(NamedTuple):
    """Result of renewing one lease."""

    held: bool
    cancel_requested: bool = False


class ProgressReport(NamedTuple):
    """Progress and log lines of an attempt."""

    queue: str
    id: str
    token: int
    progress: Any = None
    """None leaves the job's progress as it is."""
    lines: tuple[tuple[int, str], ...] = ()


class Emission(NamedTuple):
    """Streamed items of an attempt, in order."""

    queue: str
    id: str
    token: int
    start: int
    """Number of items that the attempt sent before these; items that are sent twice are kept once."""
    items: tuple[bytes, ...]


class ItemMark(NamedTuple):
    """Position of a reader in a job's streamed items."""

    id: str
    """Id of the job."""
    run: int = 0
    """Token of the attempt whose items are read; 0 if none were read yet."""
    start: int = 0
    """Number of items that the reader has."""


class ItemPage(NamedTuple):
    """Streamed items of a job's last attempt, with the state of the job when they were read."""

    state: State
    content_type: str
    run: int
    """Token of the attempt; 0 if it ended without items."""
    start: int
    """Number of the first item: that of the mark, or 0 if the mark is of another attempt."""
    items: tuple[bytes, ...]
    """Items, up to the size of a page; more may follow."""
    sent: int
    """Number of items that the attempt has sent so far, whether they are kept or not."""


class Event(NamedTuple):
    """A transition of a job, or a report of its attempt."""

    queue: str
    id: str
    name: str
    """The job's name."""
    event: str
    """Name of the event: see `core.states`."""
    state: State
    at: int
    items: int = 0
    """Number of items sent so far, for the event `item`."""


class Incident(NamedTuple):
    """A transition that no worker reported: an expired lease, an expired ttl, a cancellation."""

    queue: str
    id: str
    name: str
    """The job's name."""
    event: str
    """stalled | failed | cancelled | fired (enqueued by a schedule)"""
    reason: str = ""
    """Reason of a failure or cancellation; for `fired`, the name of the schedule."""
    error: JobFailure | None = None


class DeadLetterRecord(NamedTuple):
    """A failed job in the dead letters."""

    queue: str
    id: str
    reason: str
    """explicit_fail | max_attempts_exceeded | timeout | stalled | ttl_expired | worker_lost |
    worker_crashed | memory_limit | cpu_limit | process_limit | dependency_failed | enqueue_rejected |
    invalid_payload | invalid_result | unknown"""
    entered_at: int
    expires_at: int
    retries: int = 0
    """Number of automatic retries."""
    next_retry_at: int = 0
    """Time of the next automatic retry; 0: none."""
    name: str = ""
    """The job's name."""
    error_type: str = ""
    """Type of the last error."""
    error_message: str = ""
    """Message of the last error."""
    unmet: tuple[JobKey, ...] = ()
    """Dependencies that had not completed, for the reason `dependency_failed`."""


class DeadLetterPage(NamedTuple):
    """Some dead letters of a queue, oldest first."""

    dead_letters: list[DeadLetterRecord]
    next: str | None
    """Cursor of the next page; None on the last page."""
    at: int
    """The storage's time, in UTC milliseconds."""


class CancelResult(NamedTuple):
    """Result of cancelling one job."""

    id: str
    status: str
    """cancelled | requested (the job is active, and was asked to stop) | completed | failed | not_found"""

    def __bool__(self) -> bool:
        return self.status in ("cancelled", "requested")


REJECTED = "enqueue_rejected"
"""Reason of a job that was never valid: it is retried only with another payload."""
DEAD_LETTER_REASONS = (
    "explicit_fail",
    "max_attempts_exceeded",
    "timeout",
    "stalled",
    "ttl_expired",
    "worker_lost",
    "worker_crashed",
    "memory_limit",
    "cpu_limit",
    "process_limit",
    "dependency_failed",
    REJECTED,
    "invalid_payload",
    "invalid_result",
    "unknown",
)
