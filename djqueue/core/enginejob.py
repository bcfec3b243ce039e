"""The record of a job inside the engine."""

from typing import Any

from .job import AttemptRecord, JobFailure, JobRecord
from .options import JobKey, JobOptions
from .states import State


class EngineJob:
    """One job inside the engine. Guarded by its queue's shard lock; while active, by its processing
    shard's.
    """

    __slots__ = (
        "attempts",
        "cancel_requested",
        "created_at",
        "error",
        "failures",
        "finished_at",
        "generation",
        "has_dependents",
        "history",
        "id",
        "last_token",
        "lease_until",
        "logs",
        "name",
        "noted",
        "options",
        "payload",
        "process",
        "progress",
        "queue",
        "reason",
        "result",
        "run_at",
        "stalls",
        "started_at",
        "state",
        "stepped",
        "stream",
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
        self.id = id
        self.queue = queue
        self.name = name
        self.payload = payload
        self.options = options
        self.state = state
        self.created_at = created_at
        """UTC milliseconds, as every `…_at`."""
        self.run_at = run_at
        self.stepped = 0
        """Milliseconds by which the wall clock was set while it was here: see `clocksteps`."""
        self.generation = 0
        """Number of its present entry in a queue structure; entries with another one are stale."""
        self.attempts = 0
        """Runs begun, less those given back unused."""
        self.failures = 0
        self.stalls = 0
        """Runs that ended with their worker."""
        self.token = 0
        """Fencing token of the present claim."""
        self.last_token = 0
        """Fencing token of the last claim, once its worker has ended it; 0 after a stall."""
        self.lease_until = 0
        """Monotonic milliseconds at which the claim is lost unless renewed."""
        self.worker = ""
        self.process = ""
        """The process that holds the claim, if that is not the engine's own: see `ClaimRequest.process`."""
        self.started_at = 0
        self.finished_at = 0
        self.result: bytes | None = None
        self.error: JobFailure | None = None
        self.reason = ""
        """Why it is failed or cancelled: a dead letter's reason."""
        self.progress: Any = None
        self.history: list[AttemptRecord] | None = None
        """Ended runs that did not complete the job."""
        self.noted = 0
        """How many of those runs a journal has written down."""
        self.logs: list[tuple[int, str]] | None = None
        """(UTC milliseconds, line)."""
        self.stream: ItemStream | None = None
        """What its last run has sent, if that was a generator's."""
        self.cancel_requested = False
        self.has_dependents = False
        self.unmet: set[JobKey] | None = None
        """Dependencies that have not ended yet."""

    @property
    def claimable_at(self) -> int:
        """When it came, or was due, whichever is later."""
        return max(self.created_at, self.run_at)

    def record(self) -> JobRecord:
        """An immutable copy, for reading."""
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
    """The items of one run, in order. Guarded as its job is."""

    __slots__ = ("count", "items", "run")

    def __init__(self, run: int, items: list[bytes] | None, count: int = 0) -> None:
        self.run = run
        """The run's fencing token."""
        self.items = items
        """None: a journal has them, and nobody else."""
        self.count = count
        """How many it has sent, whether they are kept or not."""
