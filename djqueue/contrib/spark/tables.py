"""The tables that `format("djqueue")` reads, as plain data: their columns, Spark's types, and what they mean.

Times are timestamps in UTC. What does not concern a row is null, such as `finished_at` of a job that waits;
and so is what its storage does not know: `name` of a run, or of an event, whose job is forgotten;
`wait_seconds` of other runs than a job's last one; `result` when its time is over; `attempts` of a dead
letter without its job.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

REDIS, DATABASE = "redis", "database"
"""The kinds of storages. A mirror is read by its database's URL, and is one of the second kind."""


class Column(NamedTuple):
    """A column as Spark sees it."""

    name: str
    type: str
    """As it is written in Spark's DDL."""
    meaning: str
    """For docs/spark.md."""


class Table(NamedTuple):
    """What `option("table", …)` names."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    time: str | None
    """The column that `since` and `until` look at; None: the table has none, and they are refused."""
    kinds: frozenset[str]
    """The kinds of storages that have it."""
    is_by_queue: bool = True
    """Whether `queue` may choose among its rows."""
    is_by_state: bool = False
    """Whether `state` may."""

    def names(self, *, payload: bool = False) -> list[str]:
        """The columns' names. payload: whether `includePayload` is said."""
        return [column.name for column in self.chosen(payload=payload)]

    def chosen(self, only: Iterable[str] | None = None, *, payload: bool = False) -> list[Column]:
        """Its columns: those named, in the order in which they are named; else all.

        payload: whether there is one. Raises KeyError for a name that is not a column's.
        """
        found = {column.name: column for column in self.columns if payload or column.name != PAYLOAD}
        return list(found.values()) if only is None else [found[name] for name in only]

    def ddl(self, only: Iterable[str] | None = None, *, payload: bool = False) -> str:
        """The schema for Spark: see `chosen`."""
        return ddl(self.chosen(only, payload=payload))


def ddl(columns: Iterable[Column]) -> str:
    """Columns as Spark's DDL, names in backticks: `group` is a word of SQL's own."""
    return ", ".join(f"`{column.name}` {column.type}" for column in columns)


PAYLOAD = "payload"
_EVERYWHERE = frozenset({REDIS, DATABASE})

_QUEUE = Column("queue", "string", "the queue")
_ID = Column("id", "string", "the job's id, which is one job's in its queue")
_NAME = Column("name", "string", "the job's name")
_STATE = Column("state", "string", "waiting, delayed, blocked, active, completed, failed or cancelled")
_ERROR = (
    Column("error_type", "string", "of the last error: the exception's class"),
    Column("error_message", "string", "what it said"),
)
_CONTENT_TYPE = Column("content_type", "string", "how payload and result are encoded")

JOBS = Table(
    "jobs",
    "every job that the storage has, as it is now",
    (
        _QUEUE,
        _ID,
        _NAME,
        _STATE,
        Column("priority", "int", "higher runs first"),
        Column("attempts", "int", "runs begun"),
        Column("failures", "int", "runs that failed"),
        Column("stalls", "int", "runs that were lost with their worker"),
        Column("enqueued_at", "timestamp", "when it came"),
        Column("run_at", "timestamp", "not before; after a retry, that of the next run"),
        Column("started_at", "timestamp", "when its last run began"),
        Column("finished_at", "timestamp", "when it ended"),
        Column("group", "string", "the group that it runs in"),
        Column("unique_key", "string", "no other live job of the queue has it"),
        Column("subject", "string", "what it is about"),
        Column("tags", "array<string>", "words to find it by"),
        Column("worker", "string", "who had it last"),
        Column("reason", "string", "why it failed or was cancelled"),
        *_ERROR,
        _CONTENT_TYPE,
        Column(PAYLOAD, "binary", "what it was enqueued with; only with `includePayload`"),
    ),
    "enqueued_at",
    _EVERYWHERE,
    is_by_state=True,
)
RESULTS = Table(
    "results",
    "jobs that have ended, and what came of them",
    (
        _QUEUE,
        _ID,
        _NAME,
        _STATE,
        Column("finished_at", "timestamp", "when it ended"),
        Column("result", "binary", "what it returned; null if nothing, or for longer than its `result_ttl`"),
        _CONTENT_TYPE,
        Column("reason", "string", "why it failed or was cancelled"),
        *_ERROR,
    ),
    "finished_at",
    _EVERYWHERE,
    is_by_state=True,
)
ATTEMPTS = Table(
    "attempts",
    "runs that have ended, those that completed their jobs among them",
    (
        _QUEUE,
        _ID,
        Column("name", "string", "the job's name; null if the job is forgotten"),
        Column("number", "int", "1 is the job's first run"),
        Column("started_at", "timestamp", "when it began"),
        Column("finished_at", "timestamp", "when it ended"),
        Column(
            "wait_seconds",
            "double",
            "for how long it could have been claimed before; known of the last run of a job that has ended",
        ),
        Column("run_seconds", "double", "from its begin to its end"),
        Column("outcome", "string", "completed, failed, retried, released, stalled or cancelled"),
        *_ERROR,
        Column("worker", "string", "who had it"),
    ),
    "finished_at",
    _EVERYWHERE,
)
DEAD = Table(
    "dead",
    "dead letters: jobs that failed for good",
    (
        _QUEUE,
        _ID,
        _NAME,
        Column("reason", "string", "such as max_attempts_exceeded, timeout, stalled, ttl_expired"),
        Column("died_at", "timestamp", "when it became one"),
        Column("expires_at", "timestamp", "when it is forgotten"),
        Column("attempts", "int", "runs of the job"),
        Column("retries", "int", "how often it was retried by itself"),
        Column("next_retry_at", "timestamp", "when it will be"),
        *_ERROR,
    ),
    "died_at",
    _EVERYWHERE,
)
CRON = Table(
    "cron",
    "schedules; they are in the project's database",
    (
        Column("name", "string", "the schedule's"),
        Column("queue", "string", "where its jobs go; null: the job's own"),
        Column("job", "string", "the name of its jobs"),
        Column("schedule", "string", "a line of cron; null if it has an interval"),
        Column("every_seconds", "double", "its interval"),
        Column("timezone", "string", "in which it is meant"),
        Column("enabled", "boolean", "whether it runs"),
        Column("source", "string", "hand, code or withdrawn"),
        Column("start_at", "timestamp", "no run is earlier"),
        Column("end_at", "timestamp", "no run is later"),
        Column("max_executions", "bigint", "it is over after so many"),
        Column("executions", "bigint", "how many there were"),
        Column("next_run_at", "timestamp", "the next one"),
        Column("last_run_at", "timestamp", "the last one"),
        Column("skipped_at", "timestamp", "the last one that was left out"),
        Column("skip_reason", "string", "why"),
        Column("overlap", "string", "what becomes of a run while a job is unfinished"),
        Column("missed", "string", "what becomes of runs that were missed"),
    ),
    None,
    frozenset({DATABASE}),
    is_by_queue=False,
)
EVENTS = Table(
    "events",
    "what has happened to jobs, for streams",
    (
        Column("offset", "string", "its place among those of the queue"),
        Column("at", "timestamp", "when it was"),
        _QUEUE,
        _ID,
        Column("name", "string", "the job's name; null if the job is forgotten when it is read"),
        Column("event", "string", "the state in which the job was after it, `updated` or `removed`"),
    ),
    None,
    frozenset({REDIS}),
)
BULK = Table(
    "bulk",
    "bulk operations of the dashboard",
    (
        Column("id", "string", "the operation's number"),
        Column("kind", "string", "retry, purge, cancel, delete, promote, clean or obliterate"),
        Column("state", "string", "planned, running, done or aborted"),
        Column("queue", "string", "the only one that it concerns"),
        Column("user", "string", "who began it"),
        Column("begun_at", "timestamp", "when it was asked for"),
        Column("started_at", "timestamp", "when it started"),
        Column("finished_at", "timestamp", "when it ended"),
        Column("expected", "bigint", "jobs that matched"),
        Column("looked_at", "bigint", "jobs that were looked at"),
        Column("done", "bigint", "jobs with which it was done"),
        Column("refused", "bigint", "jobs with which it was not"),
        Column("error", "string", "why it did not end"),
        Column("filter", "string", "which jobs, as JSON"),
    ),
    None,
    frozenset({DATABASE}),
    is_by_queue=False,
)
IMPORTS = Table(
    "imports",
    "writes of Spark: their reports",
    (
        Column("write", "string", "its name"),
        Column("app", "string", "its `txnAppId`, or another name"),
        Column("version", "bigint", "its `txnVersion`; of a streaming query, that of the last batch"),
        Column("state", "string", "publishing, done, failed or unfinished"),
        Column("operation", "string", "enqueue, retry, cancel, delete or update"),
        Column("queues", "array<string>", "where its jobs are"),
        Column("names", "array<string>", "the names of its jobs"),
        Column("started_at", "timestamp", "when it began"),
        Column("updated_at", "timestamp", "when it last told of itself"),
        Column("finished_at", "timestamp", "when it ended"),
        Column("rows", "bigint", "rows that were read"),
        Column("inserted", "bigint", "new jobs"),
        Column("duplicates", "bigint", "rows whose jobs were there"),
        Column("rejected", "bigint", "rows that are no jobs"),
        Column("batches", "bigint", "of a streaming query"),
        Column("spark", "string", "the Spark application's id"),
        Column("user", "string", "whose it was"),
        Column("error", "string", "why it did not end"),
    ),
    None,
    _EVERYWHERE,
    is_by_queue=False,
)

TABLES: Mapping[str, Table] = {
    table.name: table for table in (JOBS, RESULTS, ATTEMPTS, DEAD, CRON, BULK, IMPORTS, EVENTS)
}
