"""The record of a job inside the engine."""

from typing import Any

from .job import AttemptRecord, JobFailure, JobRecord
from .options import JobKey, JobOptions
from .states import State


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
        """Attempts that ended with their worker."""
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
