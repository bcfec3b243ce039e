"""Declare the tables that `format("djqueue")` reads: columns, Spark types and descriptions.

Times are timestamps in UTC. A value that does not apply to a row is null, such as `finished_at` of a waiting
job. So is a value that the storage does not have: `name` of an attempt or event whose job no longer exists,
`wait_seconds` of any attempt but a job's last, an expired `result`, or `attempts` of a dead letter whose job
no longer exists.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

REDIS, DATABASE = "redis", "database"
"""Kinds of storages. A mirror is read by its database's URL, so it counts as a database."""


class Column(NamedTuple):
    """A column as Spark sees it."""

    name: str
    type: str
    """The type in Spark's DDL."""
    meaning: str
    """The description in docs/spark-reference.md."""


class Table(NamedTuple):
    """A table, selected with `option("table", …)`."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    time: str | None
    """The column that `since` and `until` filter by; None if the table supports neither."""
    kinds: frozenset[str]
    """Kinds of storages that have this table."""
    is_by_queue: bool = True
    """Whether `queue` can filter the rows."""
    is_by_state: bool = False
    """Whether `state` can filter the rows."""

    def names(self, *, payload: bool = False) -> list[str]:
        """Return the column names, with the payload's if `includePayload` is set."""
        return [column.name for column in self.chosen(payload=payload)]

    def chosen(self, only: Iterable[str] | None = None, *, payload: bool = False) -> list[Column]:
        """Return the columns named in `only`, in that order, or all columns.

        Args:
            only: Column names.
            payload: Whether to include the payload column.

        Raises:
            KeyError: A name is not a column of this table.
        """
        by_name = {column.name: column for column in self.columns if payload or column.name != PAYLOAD}
        return list(by_name.values()) if only is None else [by_name[name] for name in only]

    def ddl(self, only: Iterable[str] | None = None, *, payload: bool = False) -> str:
        """Return the schema of the chosen columns as Spark DDL."""
        return ddl(self.chosen(only, payload=payload))


def ddl(columns: Iterable[Column]) -> str:
    """Return columns as Spark DDL, with names in backticks, because a name may be an SQL keyword."""
    return ", ".join(f"`{column.name}` {column.type}" for column in columns)


PAYLOAD, RESULT = "payload", "result"
"""Columns with encoded values, which are read as JSON text by default."""
CONTENT_TYPE, TAGS, BULK_WRITE = "content_type", "tags", "bulk_write"
_EVERYWHERE = frozenset({REDIS, DATABASE})

_QUEUE = Column("queue", "string", "the queue")
_ID = Column("id", "string", "the job's id, unique in its queue")
_NAME = Column("name", "string", "the job's name")
_STATE = Column("state", "string", "waiting, delayed, blocked, active, completed, failed or cancelled")
_ERROR = (
    Column("error_type", "string", "the exception class of the last error"),
    Column("error_message", "string", "the message of the last error"),
)
_CONTENT_TYPE = Column(CONTENT_TYPE, "string", "the encoding of payload and result in the storage")
_LABELS = (
    Column("unique_key", "string", "unique among the unfinished jobs of the queue"),
    Column("subject", "string", "the object that the job is about"),
    Column(TAGS, "array<string>", "its tags"),
    Column(BULK_WRITE, "string", "the name of the bulk write that enqueued it; null if none did"),
)

JOBS = Table(
    "jobs",
    "every job that the storage has, in its current state",
    (
        _QUEUE,
        _ID,
        _NAME,
        _STATE,
        Column("priority", "int", "higher runs first"),
        Column("attempts", "int", "attempts started"),
        Column("failures", "int", "attempts that failed"),
        Column("stalls", "int", "attempts that stalled: their lease expired"),
        Column("enqueued_at", "timestamp", "when it was enqueued"),
        Column("run_at", "timestamp", "the earliest start; after a retry, that of the next attempt"),
        Column("started_at", "timestamp", "when its last attempt started"),
        Column("finished_at", "timestamp", "when it ended"),
        Column("concurrency_key", "string", "the job's concurrency key"),
        *_LABELS,
        Column("headers", "string", "its headers, as a JSON object"),
        Column("worker", "string", "the last worker that ran it"),
        Column("reason", "string", "why it failed or was cancelled"),
        *_ERROR,
        _CONTENT_TYPE,
        Column(PAYLOAD, "string", "the payload, as JSON; only with `includePayload` or `payloadSchema`"),
    ),
    "enqueued_at",
    _EVERYWHERE,
    is_by_state=True,
)
RESULTS = Table(
    "results",
    "jobs that have ended, with their results",
    (
        _QUEUE,
        _ID,
        _NAME,
        Column("state", "string", "completed, failed or cancelled"),
        Column("finished_at", "timestamp", "when it ended"),
        *_LABELS,
        Column(
            RESULT,
            "string",
            "the return value, as JSON; null if it is None, or if its `result_ttl` has passed",
        ),
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
    "attempts that have ended, including successful ones",
    (
        _QUEUE,
        _ID,
        Column("name", "string", "the job's name; null if the job no longer exists"),
        Column("number", "int", "1 for the job's first attempt"),
        Column("started_at", "timestamp", "when it started"),
        Column("finished_at", "timestamp", "when it ended"),
        Column(
            "wait_seconds",
            "double",
            "how long the job had been claimable before; known for the last attempt of an ended job",
        ),
        Column("run_seconds", "double", "its duration"),
        Column("outcome", "string", "completed, failed, retried, released, stalled or cancelled"),
        *_ERROR,
        Column("worker", "string", "the worker that ran it"),
    ),
    "finished_at",
    _EVERYWHERE,
)
DEAD = Table(
    "dead",
    "dead letters: jobs that failed permanently",
    (
        _QUEUE,
        _ID,
        _NAME,
        Column("reason", "string", "such as max_attempts_exceeded, timeout, stalled, ttl_expired"),
        Column("died_at", "timestamp", "when it became a dead letter"),
        Column("expires_at", "timestamp", "when it expires"),
        Column("attempts", "int", "the job's attempts"),
        Column("retries", "int", "how often it was retried automatically"),
        Column("next_retry_at", "timestamp", "when it will be retried next"),
        *_ERROR,
    ),
    "died_at",
    _EVERYWHERE,
)
CRON = Table(
    "cron",
    "schedules, which are in the project's database",
    (
        Column("name", "string", "the schedule's name"),
        Column("queue", "string", "the queue of its jobs; null: the job's own"),
        Column("job", "string", "the name of its job"),
        Column("schedule", "string", "the cron expression; null if it has an interval"),
        Column("every_seconds", "double", "the interval"),
        Column("timezone", "string", "the time zone of the schedule"),
        Column("enabled", "boolean", "whether it is enabled"),
        Column("source", "string", "hand, code or withdrawn"),
        Column("start_at", "timestamp", "no run is earlier"),
        Column("end_at", "timestamp", "no run is later"),
        Column("max_executions", "bigint", "the number of runs after which it ends"),
        Column("executions", "bigint", "the number of runs so far"),
        Column("next_run_at", "timestamp", "the next run"),
        Column("last_run_at", "timestamp", "the last run"),
        Column("skipped_at", "timestamp", "the last skipped run"),
        Column("skip_reason", "string", "why it was skipped"),
        Column("overlap", "string", "what to do with a run while a job is unfinished"),
        Column("missed", "string", "what to do with missed runs"),
    ),
    None,
    frozenset({DATABASE}),
    is_by_queue=False,
)
EVENTS = Table(
    "events",
    "changes of jobs, for streams",
    (
        Column("offset", "string", "the event's position in its queue"),
        Column("at", "timestamp", "when it happened"),
        _QUEUE,
        _ID,
        Column("name", "string", "the job's name; null if the job no longer exists when the event is read"),
        Column("event", "string", "the job's state after it, `updated` or `removed`"),
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
        Column("queue", "string", "the queue, if it concerns only one"),
        Column("user", "string", "who began it"),
        Column("begun_at", "timestamp", "when it was requested"),
        Column("started_at", "timestamp", "when it started"),
        Column("finished_at", "timestamp", "when it ended"),
        Column("expected", "bigint", "jobs that matched"),
        Column("looked_at", "bigint", "jobs processed"),
        Column("done", "bigint", "jobs for which it succeeded"),
        Column("refused", "bigint", "jobs for which it did not"),
        Column("error", "string", "why it did not finish"),
        Column("filter", "string", "the filter, as JSON"),
    ),
    None,
    frozenset({DATABASE}),
    is_by_queue=False,
)
IMPORTS = Table(
    "imports",
    "reports of Spark's bulk writes",
    (
        Column("write", "string", "the write's name"),
        Column("app", "string", "its `txnAppId`, or another name"),
        Column("version", "bigint", "its `txnVersion`; for a streaming query, that of the last batch"),
        Column("state", "string", "publishing, done, failed or unfinished"),
        Column("operation", "string", "enqueue, retry, cancel, delete or update"),
        Column("queues", "array<string>", "the queues of its jobs"),
        Column("names", "array<string>", "the names of its jobs"),
        Column("started_at", "timestamp", "when it started"),
        Column("updated_at", "timestamp", "when the report was last updated"),
        Column("finished_at", "timestamp", "when it ended"),
        Column("rows", "bigint", "rows read"),
        Column("inserted", "bigint", "new jobs"),
        Column("duplicates", "bigint", "rows whose jobs already existed"),
        Column("rejected", "bigint", "invalid rows"),
        Column("skipped", "boolean", "whether the numbers are those of an earlier write of this version"),
        Column("batches", "bigint", "batches of a streaming query"),
        Column("spark", "string", "the Spark application's id"),
        Column("user", "string", "the user who ran it"),
        Column("error", "string", "why it did not finish"),
    ),
    None,
    _EVERYWHERE,
    is_by_queue=False,
)

TABLES: Mapping[str, Table] = {
    table.name: table for table in (JOBS, RESULTS, ATTEMPTS, DEAD, CRON, BULK, IMPORTS, EVENTS)
}
