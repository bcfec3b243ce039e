"""The record of a job that a storage works on, and the changes that all storages make to it alike."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

from .job import AttemptRecord, DeadLetterRecord, Incident, JobFailure, JobRecord
from .options import JobKey, JobOptions
from .policies import REPLACED, DeadLetterPolicy, QueuePolicy
from .states import PENDING, State


class Extras:
    """Attributes of the jobs that report, fail or stream."""

    __slots__ = ("history", "logs", "noted", "progress", "stream")

    def __init__(self) -> None:
        self.progress: Any = None
        self.history: list[AttemptRecord] | None = None
        self.noted = 0
        self.logs: list[tuple[int, str]] | None = None
        self.stream: ItemStream | None = None


NO_EXTRAS = Extras()
"""Shared by all jobs that have none; never changed."""


class EngineJob:
    """A job inside the engine, guarded by its shard's lock and, while active, by its processing shard's."""

    __slots__ = (
        "_extras",
        "attempts",
        "cancel_requested",
        "created_at",
        "error",
        "failures",
        "finished_at",
        "generation",
        "has_dependents",
        "id",
        "last_token",
        "lease_until",
        "name",
        "options",
        "payload",
        "process",
        "queue",
        "reason",
        "result",
        "run_at",
        "stalls",
        "started_at",
        "state",
        "token",
        "unmet",
        "worker",
    )

    def __init__(
        self,
        id: str,
        queue: str,
        name: str,
        payload: bytes,
        options: JobOptions,
        state: State,
        created_at: int,
        run_at: int,
    ) -> None:
        self._extras = NO_EXTRAS
        self.id = id
        self.queue = queue
        self.name = name
        self.payload = payload
        self.options = options
        self.state = state
        self.created_at = created_at
        """UTC milliseconds, like every `…_at`."""
        self.run_at = run_at
        self.generation = 0
        """Number of its current entry in a queue structure; entries with another number are stale."""
        self.attempts = 0
        """Attempts started, without released ones."""
        self.failures = 0
        self.stalls = 0
        """Attempts that stalled: their lease expired."""
        self.token = 0
        """Fencing token of the current claim."""
        self.last_token = 0
        """Fencing token of the last claim after its worker ended it; 0 after a stall."""
        self.lease_until = 0
        """Monotonic milliseconds at which the lease expires unless it is renewed."""
        self.worker = ""
        self.process = ""
        """The process that holds the claim; empty for the engine's own: see `ClaimRequest.process`."""
        self.started_at = 0
        self.finished_at = 0
        self.result: bytes | None = None
        self.error: JobFailure | None = None
        self.reason = ""
        """Reason of the failure or cancellation."""
        self.cancel_requested = False
        self.has_dependents = False
        self.unmet: set[JobKey] | None = None
        """Dependencies that have not completed."""

    @property
    def progress(self) -> Any:
        """The last progress that the job reported."""
        return self._extras.progress

    @progress.setter
    def progress(self, value: Any) -> None:
        if value is not None or self._extras is not NO_EXTRAS:
            self._own_extras().progress = value

    @property
    def history(self) -> list[AttemptRecord] | None:
        """Ended attempts that did not complete the job."""
        return self._extras.history

    @history.setter
    def history(self, value: list[AttemptRecord] | None) -> None:
        if value is not None or self._extras is not NO_EXTRAS:
            self._own_extras().history = value

    @property
    def noted(self) -> int:
        """Number of those attempts that the journal has."""
        return self._extras.noted

    @noted.setter
    def noted(self, value: int) -> None:
        if value or self._extras is not NO_EXTRAS:
            self._own_extras().noted = value

    @property
    def logs(self) -> list[tuple[int, str]] | None:
        """(UTC milliseconds, line)."""
        return self._extras.logs

    @logs.setter
    def logs(self, value: list[tuple[int, str]] | None) -> None:
        if value is not None or self._extras is not NO_EXTRAS:
            self._own_extras().logs = value

    @property
    def stream(self) -> "ItemStream | None":
        """Items streamed by the last attempt."""
        return self._extras.stream

    @stream.setter
    def stream(self, value: "ItemStream | None") -> None:
        if value is not None or self._extras is not NO_EXTRAS:
            self._own_extras().stream = value

    def _own_extras(self) -> Extras:
        if self._extras is NO_EXTRAS:
            self._extras = Extras()
        return self._extras

    @property
    def claimable_at(self) -> int:
        """Time of the enqueue, or time at which the job is due if that is later."""
        return max(self.created_at, self.run_at)

    def record(self) -> JobRecord:
        """Return an immutable copy."""
        return JobRecord(
            self.id,
            self.queue,
            self.name,
            self.payload,
            self.options,
            self.state,
            self.created_at,
            self.run_at,
            self.attempts,
            self.failures,
            self.stalls,
            self.worker,
            self.started_at,
            self.finished_at,
            self.result,
            self.error,
            self.reason,
            self.progress,
            tuple(self.history or ()),
            tuple(self.logs or ()),
            0 if self.stream is None else self.stream.count,
        )


class ItemStream:
    """The streamed items of one attempt, in order. Guarded like its job."""

    __slots__ = ("count", "items", "run")

    def __init__(self, run: int, items: list[bytes] | None, count: int = 0) -> None:
        self.run = run
        """Fencing token of the attempt."""
        self.items = items
        """None if only the tables have them."""
        self.count = count
        """Number of items sent, whether they are kept or not."""


def note_attempt(job: EngineJob, outcome: str, now: int, error: JobFailure | None, limit: int) -> None:
    """Add the attempt that just ended to the job's history, of which `limit` attempts are kept."""
    if job.history is None:
        job.history = []
    job.history.append(AttemptRecord(job.attempts, job.worker, job.started_at, now, outcome, error))
    excess = len(job.history) - limit
    if excess > 0:
        # A job may be retried for years.
        del job.history[:excess]
        job.noted = max(0, job.noted - excess)


LISTED = 10
"""Number of stalled attempts that the error lists, the last ones."""


def stalled_error(stalls: int, attempts: Sequence[AttemptRecord]) -> JobFailure:
    """Return the error of a job with this number of stalls: which attempts were lost, on which workers, and
    when.

    Args:
        attempts: the known ended attempts; the last one has just stalled.
    """
    lost = [attempt for attempt in attempts if attempt.outcome == "stalled"][-min(stalls, LISTED) :]
    listed = "; ".join(
        f"attempt {one.attempt} on {one.worker}, started {_utc(one.started_at)}, lost {_utc(one.finished_at)}"
        for one in lost
    )
    text = f"stalled {stalls} times, last on {attempts[-1].worker}: {listed}"
    return JobFailure("djqueue.core.errors.StorageError", text)


def _utc(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds // 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"


NO_ERROR = JobFailure("", "")


def letter_of(
    job: EngineJob, now: int, retries: int, policy: DeadLetterPolicy, random: Random
) -> DeadLetterRecord:
    """Return the dead letter of a failed job with this number of automatic retries."""
    error = job.error or NO_ERROR
    return DeadLetterRecord(
        job.queue,
        job.id,
        job.reason,
        now,
        now + policy.ttl,
        retries,
        policy.retry_at(job.reason, retries, now, random),
        job.name,
        error.type,
        error.message,
        tuple(sorted(job.unmet)) if job.unmet else (),
    )


def interrupt(job: EngineJob, policy: QueuePolicy, now: int, random: Random) -> DeadLetterRecord | None:
    """Count a stall for an active job, and let it wait again; return its dead letter if it may not.

    A job whose cancellation was requested is cancelled instead.
    """
    limit = policy.retention.attempts.count
    note_attempt(job, "cancelled" if job.cancel_requested else "stalled", now, None, limit)
    job.worker = ""
    if job.cancel_requested:
        job.state = State.CANCELLED
        job.reason = "cancelled"
        job.finished_at = now
        return None
    job.stalls += 1
    if job.stalls <= job.options.max_stalls:
        job.state = State.WAITING
        job.run_at = now
        return None
    job.state = State.FAILED
    job.reason = "worker_lost"
    job.finished_at = now
    job.error = stalled_error(job.stalls, job.history or ())
    return letter_of(job, now, 0, policy.dead_letters, random)


def supersede(job: EngineJob, now: int) -> None:
    """Cancel a pending job that has a successor: see `superseded`."""
    job.state = State.CANCELLED
    job.reason = REPLACED
    job.finished_at = now


def superseded(jobs: Sequence[EngineJob], now: int) -> Iterable[EngineJob]:
    """Return the pending jobs that got a successor while they were active; the newer one is kept."""
    newest: dict[JobKey, EngineJob] = {}
    for job in jobs:
        if job.options.on_duplicate == "keep_last_if_active" and (key := job.options.unique_key):
            known = newest.get((job.queue, key))
            if known is None or _age(job) >= _age(known):
                newest[job.queue, key] = job
    for job in jobs if newest else ():
        key, ttl = job.options.unique_key, job.options.unique_ttl
        last = newest.get((job.queue, key)) if key is not None else None
        if last is None or last is job or job.state not in PENDING or _age(job) > _age(last):
            continue
        if ttl is None or job.created_at + ttl > now:
            yield job


def _age(job: EngineJob) -> tuple[int, bool]:
    return job.created_at, job.state is State.BLOCKED


def incident_of(job: EngineJob, event: str) -> Incident:
    """Return what happened to a job as an incident."""
    reason = job.reason if event != "stalled" else ""
    error = job.error if event == "failed" else None
    return Incident(job.queue, job.id, job.name, event, reason, error)


def size_of(job: EngineJob) -> int:
    """Return the size of an ended job without its result: its payload, and the texts of its error."""
    return len(job.payload) if job.error is None else len(job.payload) + size_of_error(job.error)


def size_of_error(error: JobFailure) -> int:
    """Return the size of an error's texts."""
    return sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in error)
