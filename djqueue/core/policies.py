"""Policies: the configuration of queues and limiters, and the rules that every storage applies in the same
way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Final, Generic, Literal, NamedTuple, TypedDict, TypeVar

from .backoff import Backoff
from .errors import ConfigurationError, OptionError, QueueFullError
from .job import REJECTED, Batch
from .options import DAY, JobKey
from .states import State
from .units import to_datetime


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """`capacity` starts at once, refilled evenly: `capacity` in `per` milliseconds."""

    capacity: int
    per: int = 1_000


class Unset(Enum):
    """The type of `UNSET`, which stays the same object when it is pickled."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Default of an argument that was not given, where None has a meaning: it removes a limit, for example."""
SetRate = Rate | Literal[Unset.UNSET] | None
SetConcurrency = int | Literal[Unset.UNSET] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterPolicy:
    """Configuration of a limiter."""

    rate: Rate | None = None
    """Starts per time, over all its queues."""
    concurrency: int | None = None
    """Maximum weight of active jobs, over all its queues."""


NO_LIMITS = LimiterPolicy()


class KeyLimit(NamedTuple):
    """Overrides of a concurrency key's limits, set while the queue runs."""

    concurrency: int | None = None
    """Maximum number of active jobs; None: the default of the queue."""
    paused: bool = False
    rate: Rate | None = None
    """Maximum starts per time; None: the default of the queue."""
    weight: int | None = None
    """Turns for each turn of a key with weight 1; None: the default of the queue."""


NO_LIMIT = KeyLimit()


class Hold(NamedTuple):
    """A hold on the jobs of one name: the queue starts none of them until it ends."""

    name: str
    since: int
    """UTC milliseconds, like `until`."""
    until: int | None = None
    """When it ends by itself; None: when it is released."""
    reason: str = ""

    def detail(self) -> dict[str, str | None]:
        """Return its name, end and reason, as the activity log keeps them."""
        until = None if self.until is None else to_datetime(self.until).isoformat()
        return {"name": self.name, "until": until, "reason": self.reason}


def standing(holds: Iterable[Hold], now: int) -> tuple[Hold, ...]:
    """Return the holds that have not ended."""
    return tuple(hold for hold in holds if hold.until is None or hold.until > now)


def hold_on(name: str, holds: Iterable[Hold], now: int) -> Hold | None:
    """Return the hold on a name; None if there is none, or it has ended."""
    return next((hold for hold in standing(holds, now) if hold.name == name), None)


class KeyLimitChanges(TypedDict, total=False):
    """Changes of a concurrency key's overrides; None removes an override."""

    concurrency: int | None
    rate: Rate | None
    weight: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """Configuration of a queue's dead letters."""

    max_entries: int = 10_000
    """Maximum number; the oldest are removed first."""
    max_bytes: int | None = None
    """Maximum bytes of their jobs' payloads and errors; None: unlimited."""
    ttl: int = 7 * DAY
    """Milliseconds for which a dead letter is kept."""
    auto_retries: int = 0
    """Number of automatic retries of a dead letter."""
    auto_retry_delay: int | Backoff = 3_600_000
    """Milliseconds before an automatic retry, or a rule by the number of the retry."""

    def retry_at(self, reason: str, retries: int, now: int, random: Random) -> int:
        """Return the time of the next automatic retry; 0: never."""
        if retries >= self.auto_retries or reason == REJECTED:
            return 0
        delay = self.auto_retry_delay
        return now + (delay.delay(retries + 1, random) if isinstance(delay, Backoff) else delay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Limits for the records of jobs with one outcome, below the jobs' own times; None: no limit."""

    age: int | None = None
    """Milliseconds after a job's end."""
    count: int | None = None
    """Number of records; those that expire first are removed first."""
    bytes: int | None = None
    """Bytes of payloads, results and errors; records that expire first are removed first."""

    def shorten(self, kept: int | None) -> int | None:
        """Return the milliseconds for which a record is kept, given the job's own time; None: forever."""
        return _shorter(kept, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResults:
    """Limits for results, which are removed before their jobs' records."""

    age: int | None = None
    """Milliseconds after a job's end."""
    bytes: int | None = None
    """Bytes of all results of the queue; those that expire first are removed first."""

    def shorten(self, readable: int | None) -> int | None:
        """Return the milliseconds for which a result is kept, given the job's own time; None: forever."""
        return _shorter(readable, self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOfJob:
    """Limits for what one job may have many of."""

    age: int | None = None
    """Milliseconds after the job's end; None: as long as its record."""
    count: int = 1_000
    """Number per job; the oldest are removed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """All limits of a queue. Failed jobs are kept by their dead letters: see `DeadLetterPolicy`."""

    completed: Keep = Keep()
    cancelled: Keep = Keep()
    results: KeepResults = KeepResults()
    attempts: KeepOfJob = KeepOfJob()
    """Ended attempts that did not complete their job."""
    logs: KeepOfJob = KeepOfJob()

    def of(self, state: State) -> Keep:
        """Return the limits for jobs that ended in this state."""
        return self.completed if state is State.COMPLETED else self.cancelled

    @property
    def counts(self) -> bool:
        """True if the number or the bytes of records are limited."""
        return self.measures or self.completed.count is not None or self.cancelled.count is not None

    @property
    def measures(self) -> bool:
        """True if the bytes of records are limited."""
        bounds = (self.completed.bytes, self.cancelled.bytes, self.results.bytes)
        return any(bound is not None for bound in bounds)


def _shorter(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


NO_RETENTION = Retention()
"""Each job's own times alone."""

WHEN_FULL = ("reject", "block", "drop_oldest", "drop_lowest")
DROPPED = "dropped"
"""Reason of a cancelled job that was dropped for a new one."""


def full_error(queue: str, limit: int | None, count: int) -> QueueFullError:
    """Return the error for jobs that the queue has no room for."""
    return QueueFullError(
        f"queue {queue!r} is full: its MAX_SIZE allows {limit} pending jobs, and {count} more do not fit; "
        "none of them was enqueued"
    )


OPTIONAL, KEYED, GLOBAL = "optional", "keyed", "global"
KEY_MODES = (OPTIONAL, KEYED, GLOBAL)
"""Concurrency keys are optional; every job needs one; they are labels that hold no job back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Configuration of a queue."""

    lease: int = 30_000
    """Milliseconds until a lease expires unless it is renewed."""
    rate: Rate | None = None
    concurrency: int | None = None
    """Maximum weight of active jobs, over all workers."""
    limiter: str | None = None
    """Name of the limiter that the queue shares with others."""
    key_concurrency: int = 1
    """Maximum number of active jobs with one concurrency key."""
    key_rate: Rate | None = None
    """Maximum starts per time of jobs with one concurrency key."""
    key_weights: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Turns of a concurrency key for each turn of a key with weight 1."""
    key_mode: str = OPTIONAL
    """One of `KEY_MODES`."""
    dead_letters: DeadLetterPolicy = field(default_factory=DeadLetterPolicy)
    retention: Retention = NO_RETENTION
    """Time, number and size up to which records of completed and cancelled jobs are kept."""
    max_size: int | None = None
    """Maximum number of pending jobs: waiting, delayed and blocked."""
    when_full: str = "reject"
    """Behavior of an enqueue above `max_size`: one of `WHEN_FULL`."""
    block_timeout: int = 30_000
    """Milliseconds for which `block` waits for room."""
    objective: int | None = None
    """Milliseconds within which jobs should start; only displayed."""
    outbox: bool = False
    """True if jobs for Redis are written to a table in transactions, and during outages of Redis."""
    executor: str | None = None
    """Executor of jobs whose job type names none; None: the settings decide."""

    @property
    def key_limit(self) -> int:
        """Return the maximum number of active jobs with one concurrency key; 0: keys hold no job back."""
        return 0 if self.key_mode == GLOBAL else self.key_concurrency

    def check_batch(self, batch: Batch) -> None:
        """Raise OptionError for jobs that the queue does not accept."""
        if (
            self.key_mode == KEYED
            and batch.options.concurrency_key is None
            and batch.options.rejected is None
        ):
            raise OptionError(
                f"concurrency_key: required for jobs of queue {batch.queue!r}, because its KEY_MODE is "
                "'keyed'"
            )

    def check_mode(self, queue: str, recorded: str) -> None:
        """Raise ConfigurationError if the queue is used in another key mode."""
        if recorded != self.key_mode:
            raise ConfigurationError(
                f"queue {queue!r}: its stored KEY_MODE is {recorded!r}, but the settings have "
                f"{self.key_mode!r}: use the same mode, or obliterate the queue first"
            )


DEFAULT_POLICY = QueuePolicy()

PREDECESSOR: JobKey = ("", "")
"""Stands in a job's unmet dependencies for the active job that had its unique key before it."""

J = TypeVar("J")

REPLACED = "replaced"
"""Reason of a cancelled job that a newer one with its unique key replaced."""


@dataclass(frozen=True, slots=True)
class Succession(Generic[J]):
    """The way in which a new job comes to its unique key."""

    replaced: J | None = None
    """The pending job that it cancels."""
    behind: J | None = None
    """The active job whose end it waits for."""
    keeps_time: bool = False
    """True if it runs no later than the job that it replaces; otherwise, a job that is replaced again and
    again would never start.
    """


def succession(on_duplicate: str, active: J | None, pending: J | None) -> Succession[J] | None:
    """Return how a new job comes to its unique key; None if it is a duplicate, and changes nothing.

    Args:
        on_duplicate: the new job's option.
        active: the active job that has the key.
        pending: the job with the key that has not started: its owner, or the one that waits for the active
            job to end.
    """
    if active is None and pending is None:
        return Succession()
    if on_duplicate == "keep" or (active is not None and on_duplicate != "keep_last_if_active"):
        return None
    return Succession(pending, active, keeps_time=on_duplicate != "debounce")
