"""Parse and check the options of a read, on the driver before any task."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.options import check_text
from djqueue.core.states import TERMINAL, State
from djqueue.core.suggest import nearest
from djqueue.core.units import to_milliseconds
from djqueue.storage.export import ExportFilter

from .options import unknown
from .tables import EVENTS, JOBS, PAYLOAD, RESULTS, TABLES, Column, Table

EARLIEST, LATEST = "earliest", "latest"
SPARK_OPTIONS = frozenset({"checkpointlocation"})
"""Options of a stream that are meant for Spark itself."""
MAX_BATCH_SIZE = 3_000
"""Maximum rows per call. A larger call would block Redis for too long."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a read; docs/spark.md describes them."""

    url: str = field(repr=False)
    """The storage's address, which may contain a password."""
    prefix: str = ""
    table: Table = JOBS
    queues: tuple[str, ...] | None = None
    states: frozenset[State] | None = None
    since: int | None = None
    """Start of the time range, in UTC milliseconds."""
    until: int | None = None
    """End of the time range, in UTC milliseconds; exclusive."""
    columns: tuple[str, ...] | None = None
    payload: bool = False
    partitions: int = 8
    batch_size: int = 1_000
    starting: str = LATEST
    max_rows: int | None = None
    fail_on_data_loss: bool = True

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "ReadOptions":
        """Parse the options of a read, or of a stream of events. Names are case-insensitive.

        Raises:
            OptionError: An option is unknown, invalid, or not supported for the table.
        """
        values: dict[str, Any] = {}
        given_names: set[str] = set()
        for name, text in given.items():
            if name.lower() in SPARK_OPTIONS:
                continue
            known = _KNOWN.get(name.lower())
            if known is None:
                raise unknown(name, _SPELLED)
            spelled, parse = known
            given_names.add(spelled)
            parse(values, text)
        if "url" not in values:
            raise OptionError(
                "url: set the storage to read from: redis://…, postgresql://…, sqlite:///…, env:NAME or "
                "file:/path. Spark does not pass the options of a table in its catalog: name them in the "
                "query, with SELECT … FROM name WITH (url = 'env:NAME'), or use a temporary view"
            )
        if "queue" in values and "queues" in values:
            raise OptionError("queue and queues can't be combined: remove one of them")
        if "queue" in values:
            values["queues"] = values.pop("queue")
        options = cls(**values)
        foreign = given_names & (BATCH_OPTIONS if options.table is EVENTS else STREAM_OPTIONS)
        for name in sorted(foreign):
            raise OptionError(f"{name}: not an option for reading {options.table.name}")
        options._check()
        return options

    def _check(self) -> None:
        table = self.table
        if self.queues is not None and not table.is_by_queue:
            raise OptionError(f"queue: rows of {table.name} have no queue")
        if self.states is not None and not table.is_by_state:
            raise OptionError(f"state: rows of {table.name} cannot be filtered by state")
        if self.states is not None and table is RESULTS and self.states - TERMINAL:
            raise OptionError("state: results exist only for completed, failed and cancelled jobs")
        if (self.since, self.until) != (None, None) and table.time is None:
            raise OptionError(f"since, until: rows of {table.name} cannot be filtered by time")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise OptionError("until: must be later than since")
        if self.payload and table is not JOBS:
            raise OptionError(f"includePayload: supported only by the table jobs, not {table.name}")
        if self.payload and self.columns is not None and PAYLOAD not in self.columns:
            raise OptionError(
                "includePayload: has no effect, because columns does not name payload: add it to columns, or "
                "remove includePayload"
            )
        self.schema()

    def schema(self) -> list[Column]:
        """Return the columns to read. Raises OptionError for an unknown one."""
        try:
            return self.table.chosen(self.columns, payload=self.payload)
        except KeyError as error:
            name = str(error.args[0])
            if name == PAYLOAD and self.table is JOBS:
                raise OptionError("columns: payload requires includePayload=true") from None
            known = self.table.names(payload=self.payload)
            raise OptionError(
                f"columns: {self.table.name} has no column {name!r}{nearest(name, known)}"
            ) from None

    def wanted(self) -> ExportFilter:
        """Return the filter to pass to the storage."""
        return ExportFilter(
            self.table.name,
            frozenset(column.name for column in self.schema()),
            self.queues,
            self.states,
            self.since,
            self.until,
        )


Parser = Callable[[dict[str, Any], str], None]


def _text(field: str, spelled: str) -> Parser:
    def read(values: dict[str, Any], text: str) -> None:
        if not text:
            raise OptionError(f"{spelled}: is empty")
        values[field] = text

    return read


def _table(values: dict[str, Any], text: str) -> None:
    found = TABLES.get(text.lower())
    if found is None:
        raise OptionError(f"table: {text!r} is not one of {', '.join(TABLES)}{nearest(text, TABLES)}")
    values["table"] = found


def _words(spelled: str, text: str) -> list[str]:
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words:
        raise OptionError(f"{spelled}: is empty")
    return words


def _queue(values: dict[str, Any], text: str) -> None:
    values["queue"] = (check_text("queue", text),)


def _queues(values: dict[str, Any], text: str) -> None:
    values["queues"] = tuple(dict.fromkeys(check_text("queues", name) for name in _words("queues", text)))


def _states(values: dict[str, Any], text: str) -> None:
    known: Iterable[str] = [state.value for state in State]
    words = [word.lower() for word in _words("state", text)]
    for word in words:
        if word not in known:
            raise OptionError(f"state: {word!r} is not one of {', '.join(known)}{nearest(word, known)}")
    values["states"] = frozenset(map(State, words))


def _columns(values: dict[str, Any], text: str) -> None:
    values["columns"] = tuple(dict.fromkeys(_words("columns", text)))


def _time(field: str) -> Parser:
    def read(values: dict[str, Any], text: str) -> None:
        try:
            found = datetime.fromisoformat(text.strip())
        except ValueError:
            raise OptionError(
                f"{field}: {text!r} is neither a date, such as {date(2026, 1, 31)}, nor a time, such as "
                "2026-01-31T12:00:00+01:00"
            ) from None
        # Without a time zone, it is UTC, as are all times of the tables.
        values[field] = to_milliseconds(found if found.tzinfo else found.replace(tzinfo=UTC))

    return read


def _flag(field: str, spelled: str) -> Parser:
    def read(values: dict[str, Any], text: str) -> None:
        if text.lower() not in ("true", "false"):
            raise OptionError(f"{spelled}: must be true or false; got {text!r}")
        values[field] = text.lower() == "true"

    return read


def _number(field: str, spelled: str, limit: int) -> Parser:
    def read(values: dict[str, Any], text: str) -> None:
        try:
            number = int(text)
        except ValueError:
            raise OptionError(f"{spelled}: {text!r} is not a whole number") from None
        if not 1 <= number <= limit:
            raise OptionError(f"{spelled}: must be from 1 to {limit:,}; got {text}")
        values[field] = number

    return read


def _start(values: dict[str, Any], text: str) -> None:
    if text.lower() not in (EARLIEST, LATEST):
        raise OptionError(f"startingOffsets: must be {EARLIEST} or {LATEST}; got {text!r}")
    values["starting"] = text.lower()


STREAM_OPTIONS = frozenset({"startingOffsets", "maxRowsPerTrigger", "failOnDataLoss"})
BATCH_OPTIONS = frozenset({"state", "since", "until", "includePayload", "numPartitions"})
OPTIONS: Mapping[str, Parser] = {
    "url": _text("url", "url"),
    "keyPrefix": _text("prefix", "keyPrefix"),
    "table": _table,
    "queue": _queue,
    "queues": _queues,
    "state": _states,
    "since": _time("since"),
    "until": _time("until"),
    "columns": _columns,
    "includePayload": _flag("payload", "includePayload"),
    "numPartitions": _number("partitions", "numPartitions", 1_000),
    "batchSize": _number("batch_size", "batchSize", MAX_BATCH_SIZE),
    "startingOffsets": _start,
    "maxRowsPerTrigger": _number("max_rows", "maxRowsPerTrigger", 2**31 - 1),
    "failOnDataLoss": _flag("fail_on_data_loss", "failOnDataLoss"),
}
_SPELLED = list(OPTIONS)
_KNOWN = {name.lower(): (name, parse) for name, parse in OPTIONS.items()}
