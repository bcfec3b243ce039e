"""Overviews of queues, concurrency keys, limiters and the storage itself at one moment."""

from typing import Literal, NamedTuple

from .messages import gettext_noop as _
from .policies import Hold, KeyLimit, Rate
from .states import State


class Totals(NamedTuple):
    """Totals of a queue since it began or, in an engine, since the process started.

    Numbers only rise. Each counts the transitions with the event in parentheses: see
    `core.states.TRANSITIONS`. An obliterated queue starts from 0.
    """

    enqueued: int = 0
    """Jobs added to the queue by an enqueue or a move."""
    started: int = 0
    """Attempts started."""
    completed: int = 0
    """Jobs completed."""
    retried: int = 0
    """Failed attempts that are retried."""
    failed: int = 0
    """Jobs that became dead letters."""
    cancelled: int = 0
    """Jobs cancelled."""
    stalled: int = 0
    """Attempts that stalled."""


NO_TOTALS = Totals()


class QueueOverview(NamedTuple):
    """One queue."""

    name: str
    counts: dict[State, int]
    """Number of jobs by state."""
    paused: bool
    oldest_at: int | None
    """When the oldest claimable job could first be claimed, in UTC milliseconds; None: there is none.

    Of each priority, only the next job is considered; held jobs and those that their concurrency keys hold
    back are not.
    """
    due_at: int | None
    """When the next delayed job is due, in UTC milliseconds."""
    rate: Rate | None
    """Current rate."""
    tokens: int | None
    """Starts that the rate allows now."""
    concurrency: int | None
    """Current limit for the weight of active jobs."""
    used: int
    """Weight of the active jobs."""
    key_mode: str
    """One of `core.policies.KEY_MODES`."""
    key_waiting: int
    """Waiting jobs that their concurrency keys hold back."""
    names: dict[str, int]
    """Number of claimable jobs by job name."""
    totals: Totals
    holds: tuple[Hold, ...] = ()
    """Holds, by job name."""

    @property
    def held(self) -> int:
        """Number of claimable jobs that a hold keeps from starting."""
        return sum(self.names.get(hold.name, 0) for hold in self.holds)

    def hold_on(self, name: str) -> Hold | None:
        """Return the hold on the jobs of a name; None if they are not held."""
        return next((hold for hold in self.holds if hold.name == name), None)


class Overview(NamedTuple):
    """Some queues, or all of them by name."""

    at: int
    """The storage's time, in UTC milliseconds."""
    queues: list[QueueOverview]


class KeyOverview(NamedTuple):
    """One concurrency key of a queue."""

    name: str
    waiting: int
    """Waiting jobs, ready or held back by the key."""
    active: int
    limit: int
    """Current maximum number of active jobs; 0: keys hold no job back."""
    rate: Rate | None
    """Current starts per time."""
    weight: int
    """Current turns for each turn of a key with weight 1."""
    paused: bool
    overrides: KeyLimit
    """Overrides, set while the queue runs."""


class KeysOverview(NamedTuple):
    """Concurrency keys of one queue."""

    mode: str
    """One of `core.policies.KEY_MODES`."""
    limit: int
    """Default for keys without overrides: active jobs at once."""
    rate: Rate | None
    """Default for keys without overrides: starts per time."""
    overrides: KeyLimit
    """Default set while the queue runs."""
    busiest: list[KeyOverview]
    """Keys with most waiting jobs, which come first."""
    named: list[KeyOverview]
    """Keys that were asked for by name, in that order."""
    whole: bool
    """True if all keys were considered; False if there were too many."""


class LimiterState(NamedTuple):
    """A limiter at one moment."""

    rate: Rate | None
    concurrency: int | None
    used: int
    """Weight of the active jobs of its queues."""
    tokens: int | None
    """Jobs that may start now by the rate alone; None: no rate."""
    waiting: tuple[str, ...]
    """Queues that were refused and have not claimed since, in order."""

    @property
    def free(self) -> int | None:
        """Permits left of the concurrency; None: no concurrency limit."""
        return None if self.concurrency is None else max(0, self.concurrency - self.used)


OK, WARN, BAD = "ok", "warn", "bad"


class DiagnosticLine(NamedTuple):
    """One line of diagnostics."""

    key: str
    """Stable name: `GROUP.WORD`, followed by `:` and the instance if there are several."""
    group: str
    """Heading of the line."""
    label: str
    value: str
    """Value with its unit."""
    level: str = OK
    """ok | warn | bad"""
    note: str = ""
    """Meaning, or action to take."""


ROWS = _("about %s rows")
ROWS_OF_SIZE = _("about %s rows, %s")
ROWS_WITH_DEAD = _("about %s rows, %s, about %s dead rows")
MORE = _("more than %s")
KEYS_OF_SIZE = _("%s keys, %s")
SAMPLED = _("Sampled from the first %s of %s queues.")
REPLICA_LAG = _("Replica %s lag")
EVICTS = (
    _("maxmemory-policy is %s: when memory is full, Redis evicts jobs or results."),
    _("Set maxmemory-policy to noeviction. Use another server for a cache that needs another policy."),
)
NOT_WRITTEN = (
    _("Nothing is written to disk (appendonly no, no save points): a restart loses every job."),
    _("Set appendonly to yes, with appendfsync everysec or always."),
)
COMPOSED = (
    *((text,) for text in (ROWS_WITH_DEAD, ROWS_OF_SIZE, ROWS, MORE, KEYS_OF_SIZE, SAMPLED, REPLICA_LAG)),
    EVICTS,
    NOT_WRITTEN,
)
"""Texts of diagnostics that are composed of values and parts, of which a finding has two: problem and remedy.

The dashboard recognizes them to translate them. Constant texts are where a line is made, marked with
`gettext_noop`."""


class Diagnostics(NamedTuple):
    """Diagnostics of a storage, its servers or tables, and its maintenance."""

    backend: str
    """memory | database | redis"""
    at: int
    """The storage's time, in UTC milliseconds."""
    lines: list[DiagnosticLine]


class Evidence(NamedTuple):
    """An object with a problem: a queue, a kind of jobs, a job, a worker or a schedule."""

    queue: str = ""
    """Queue of the object; empty if it has none, or it is unknown in this process."""
    name: str = ""
    """Name of its jobs, or of the schedule."""
    job: str = ""
    """Id of the job."""
    worker: str = ""
    """Id of the worker."""
    schedule: int | None = None
    """Key of the schedule's row."""
    error: str = ""
    """Fingerprints of an error, separated by commas; the first is the key of its group."""
    size: int = 0
    """Number of its jobs or attempts with the problem."""
    since: int | None = None
    """Start of the problem, in UTC milliseconds; None if unknown."""
    share: float = 0.0
    """Share of its attempts that failed since then."""
    before: float | None = None
    """Share of its attempts that failed before; None if unknown."""
    text: str = ""
    """Message of the error, or version of the worker."""


class Finding(NamedTuple):
    """A problem, or possible problem: of the settings, the servers or the jobs.

    The system checks (`djqueue.checks`), the health checks and the doctor (`djqueue.operations`) find them.
    """

    id: str
    """`djqueue.E001` of a system check, or that of a check of a running storage, such as `health.workers`."""
    level: Literal["error", "warning", "info"]
    text: str
    hint: str
    """The remedy."""
    evidence: tuple[Evidence, ...] = ()
    """The objects with the problem, the worst first; none if the finding is about something else."""

    @property
    def since(self) -> int | None:
        """Start of the problem, in UTC milliseconds; None if unknown."""
        return min((one.since for one in self.evidence if one.since is not None), default=None)

    @property
    def size(self) -> int:
        """Number of jobs or attempts with the problem, as far as they are counted."""
        return sum(one.size for one in self.evidence)

    def __str__(self) -> str:
        return f"{self.text} {self.hint}"


LEVELS: dict[str, Literal["error", "warning", "info"]] = {"E": "error", "W": "warning", "I": "info"}


def system_finding(id: str, text: str, hint: str) -> Finding:
    """Return the finding of a system check. Its id names the level: E, W or I."""
    return Finding(id, LEVELS[id.removeprefix("djqueue.")[0]], text, hint)


def workers_line(count: int) -> DiagnosticLine:
    """Return the line with the number of live workers."""
    note = "" if count else _("No worker is running: start one with `manage.py runworkers`.")
    return DiagnosticLine("workers.alive", _("Workers"), _("Live"), f"{count:,}", WARN if note else OK, note)


def storage_lines(where: str, queues: int) -> list[DiagnosticLine]:
    """Return the lines that every storage has: its location, and its number of queues."""
    return [
        DiagnosticLine("storage.where", _("Storage"), _("Location"), where),
        DiagnosticLine("storage.queues", _("Storage"), _("Queues"), f"{queues:,}"),
    ]
