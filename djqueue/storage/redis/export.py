"""Export of all jobs in Redis: see `lua/export.lua` and `djqueue.storage.export`.

A part has the jobs with one remainder in the order of a hash's cursors. No two parts share jobs, and a job
that is not removed is read once, whatever states it goes through meanwhile.

The server copies a job's record, with its payload, whenever it reads any part of it. Therefore a call ends
after `PAGE_BYTES` that it has looked at, and leaves out records if no column needs them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple

from djqueue.core.job import JobRecord
from djqueue.core.options import JobOptions
from djqueue.core.states import TERMINAL, State
from djqueue.storage.export import (
    ATTEMPT_COLUMNS,
    DEAD_COLUMNS,
    PAGE_BYTES,
    RESULT_COLUMNS,
    CallRetry,
    Export,
    ExportFilter,
    ExportPart,
    Page,
    attempt_rows,
    once,
    page_of,
    result_rows,
)

from . import records
from .keys import RESULT, QueueKeys
from .keyspace import answer, answers
from .records import (
    ENDED,
    NOTHING,
    NUMBER,
    SIZE,
    STATE_CODES,
    STATES,
    TWO,
    pack,
    pack_text,
    text,
    unpack,
)
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

HASHES = {"jobs": "jobs", "results": "st", "attempts": "st", "dead": "dead_letters"}
"""The hash that is scanned for a table. A job that waits as it was enqueued is not in `st`."""
PARTS_PER_READER = 8
"""Parts for each reader. One part may be twice as large as another, but what readers get differs by less."""
MIN_PART = 1_000
"""Minimum number of jobs in a part."""
MAX_PARTS = 1_024
"""Maximum number of parts of a queue."""
RUN_COLUMNS = (
    *("state", "attempts", "failures", "stalls", "run_at", "started_at", "finished_at", "worker", "reason"),
    *("error_type", "error_message"),
)
"""Columns of jobs that need the state entry."""
NO_ATTEMPT = ("waiting", 0, 0, 0, None, None, None, None, None, None, None)
"""`RUN_COLUMNS` of a job that waits as it was enqueued."""
COMMON_COLUMNS = (
    *("name", "priority", "concurrency_key", "unique_key", "subject", "tags", "headers", "content_type"),
)
"""Columns that the jobs of one batch share: those of the name and the options."""
OF_RECORD = {
    "jobs": frozenset({*COMMON_COLUMNS, "enqueued_at", "run_at"}),
    "results": frozenset({"name", "result", "content_type", "unique_key", "subject", "tags"}),
    "attempts": frozenset({"name", "wait_seconds"}),
    "dead": frozenset(DEAD_COLUMNS) - {"attempts"},
}
"""Columns that need the record of a job, or its dead letter."""
HEAD_WITHOUT_NUMBER = records.HEAD.size - NUMBER.size
LENGTH_AT = HEAD_WITHOUT_NUMBER - 2
BLANK = bytes(NUMBER.size)


class RedisExport(Export):
    """Export of a storage.

    run, keys: of the storage.
    queues: the names of all queues.
    """

    tables = frozenset(HASHES)

    def __init__(
        self,
        run: Callable[[Steps[Any]], Any],
        keys: Callable[[str], QueueKeys],
        queues: Callable[[], list[str]],
    ) -> None:
        self._run = run
        self._keys = keys
        self._queues = queues

    def parts(self, wanted: ExportFilter, many: int) -> list[ExportPart]:
        names = list(wanted.queues) if wanted.queues is not None else self._queues()
        if wanted.ids is not None:
            return [ExportPart(name, 0, 0, len(wanted.ids)) for name in names]
        kind = _hash_of(wanted)
        lengths = self._run(answers([RedisCommand((b"HLEN", self._keys(name).key(kind))) for name in names]))
        per_part = max(MIN_PART, sum(lengths) // (many * PARTS_PER_READER))
        parts: list[ExportPart] = []
        for name, length in zip(names, lengths, strict=True):
            divisor = 1
            while divisor < MAX_PARTS and length >= 2 * divisor * per_part:
                divisor *= 2
            parts += [ExportPart(name, rest, divisor, length // divisor) for rest in range(divisor)]
        return parts

    def pages(
        self, wanted: ExportFilter, part: ExportPart, size: int, retry: CallRetry = once
    ) -> Iterator[Page]:
        """Yield pages; the next one is requested while one is used."""
        seen: set[bytes] = set()
        replies = self._replies(wanted, part, size, retry)
        with ThreadPoolExecutor(1, "djqueue-export") as aside:
            coming = aside.submit(next, replies, None)
            while (reply := coming.result()) is not None:
                coming = aside.submit(next, replies, None)
                yield _page(wanted, part.place, *reply, seen)

    def _replies(
        self, wanted: ExportFilter, part: ExportPart, size: int, retry: CallRetry
    ) -> Iterator[tuple["Replies", dict[bytes, bytes | None]]]:
        """Yield the jobs of each page, with their results."""
        cursor, parts = b"%d" % part.first, _parts_of(wanted)
        while cursor:
            cursor, replies = retry(self._read, wanted, part, parts, cursor, size)
            if wanted.table != "results" or "result" not in wanted.columns:
                yield replies, {}
                continue
            first, limit = 0, len(replies.ids)
            while first < len(replies.ids):
                results = retry(self._read_results, part, replies.ids[first : first + limit])
                page = _rows_at(replies, range(first, first + len(results)))
                yield page, dict(zip(page.ids, results, strict=True))
                first, limit = first + len(results), 2 * len(results)

    def _read_results(self, part: ExportPart, ids: Sequence[bytes]) -> list[bytes | None]:
        """Return the results of the first of these jobs."""
        keys = self._keys(part.place)
        theirs = keys.of_jobs(map(text, ids), RESULT)
        call = ScriptCall(script("results"), keys, [PAGE_BYTES], theirs, sequence=False)
        results: list[bytes | None] = self._run(answer(call))
        return results

    def _read(
        self, wanted: ExportFilter, part: ExportPart, parts: bytes, cursor: bytes, size: int
    ) -> tuple[bytes, "Replies"]:
        """Return the next cursor, and jobs."""
        keys = self._keys(part.place)
        arguments = [
            _hash_of(wanted).encode(),
            cursor,
            size,
            PAGE_BYTES,
            part.last,
            part.first,
            _codes(wanted),
            b"" if wanted.since is None or _is_looked_at_here(wanted) else wanted.since,
            b"" if wanted.until is None or _is_looked_at_here(wanted) else wanted.until,
            b"c" if wanted.table == "jobs" else b"f",
            parts,
            _filter(wanted),
        ]
        ids = [] if wanted.ids is None else wanted.ids[int(cursor) : int(cursor) + size]
        arguments += map(pack_text, ids)
        call = ScriptCall(script("export"), keys, arguments, sequence=False)
        following, now, *columns = self._run(answer(call))
        if wanted.ids is not None:
            position = int(cursor) + int(following)
            following = b"%d" % position if position < len(wanted.ids) else b""
        return following, Replies(int(now), *columns)


class Replies(NamedTuple):
    """A reply of `export.lua`, as columns; those that were not wanted are empty."""

    now: int
    ids: Sequence[bytes]
    records: Sequence[bytes]
    states: Sequence[bytes]
    histories: Sequence[bytes]


def _option_filters(wanted: ExportFilter) -> list[tuple[str, ...]]:
    """Return the texts of which the options of a job must contain one of each."""
    filters = (wanted.tags, wanted.unique_keys, wanted.subjects)
    return [texts for texts in filters if texts is not None]


def _filter(wanted: ExportFilter) -> bytes:
    """Return the filter of `export.lua`. Jobs that pass it may have a text in another option."""
    options = _option_filters(wanted)
    return pack([wanted.names or (), *options]) if wanted.names or options else b""


def _parts_of(wanted: ExportFilter) -> bytes:
    """Return the codes of `export.lua` for the parts that the columns and filters need."""
    parts = b"b" if wanted.columns & OF_RECORD[wanted.table] or _option_filters(wanted) else b""
    if wanted.table == "jobs":
        parts += b"p" if "payload" in wanted.columns else b""
        return parts + (b"s" if wanted.columns & set(RUN_COLUMNS) else b"")
    if wanted.table == "dead":
        return parts + (b"s" if "attempts" in wanted.columns else b"")
    return parts + (b"sh" if wanted.table == "attempts" else b"s")


def _hash_of(wanted: ExportFilter) -> str:
    if wanted.table == "jobs" and wanted.states is not None and State.WAITING not in wanted.states:
        return "st"
    return HASHES[wanted.table]


def _codes(wanted: ExportFilter) -> bytes:
    states: frozenset[State] = wanted.states or frozenset(State)
    if wanted.table == "results":
        states &= TERMINAL
    return b"".join(STATE_CODES[state] for state in states)


def _is_looked_at_here(wanted: ExportFilter) -> bool:
    """Return whether the times are checked here: a job has several, or others than the script checks."""
    return wanted.table in ("attempts", "dead")


def _page(
    wanted: ExportFilter, queue: str, replies: Replies, results: dict[bytes, bytes | None], seen: set[bytes]
) -> Page:
    if _option_filters(wanted):
        replies = _rows_at(replies, [at for at, head in enumerate(replies.records) if _passes(wanted, head)])
    fresh = seen.isdisjoint(replies.ids) and len(set(replies.ids)) == len(replies.ids)
    if not fresh:
        # While a hash grows or shrinks, a scan may repeat some of its fields.
        positions = [
            position
            for position, job_id in enumerate(replies.ids)
            if job_id not in seen and not seen.add(job_id)  # type: ignore[func-returns-value]
        ]
        replies = _rows_at(replies, positions)
    seen.update(replies.ids)
    if wanted.table == "jobs":
        return _jobs(queue, replies, wanted.columns)
    if wanted.table == "dead":
        return _chosen(wanted, page_of(DEAD_COLUMNS, _dead(wanted, queue, replies)))
    jobs = [
        record
        for job_id, head, st, history in zip(
            replies.ids,
            replies.records or repeat(NOTHING[NUMBER.size :]),
            replies.states,
            replies.histories or repeat(b""),
            strict=False,
        )
        if (record := _record(queue, job_id, head, st, history, results.get(job_id), replies.now))
    ]
    if wanted.table == "results":
        return _chosen(wanted, page_of(RESULT_COLUMNS, chain.from_iterable(map(result_rows, jobs))))
    rows = chain.from_iterable(map(attempt_rows, jobs))
    at = ATTEMPT_COLUMNS.index("finished_at")
    return _chosen(wanted, page_of(ATTEMPT_COLUMNS, [row for row in rows if wanted.has_time(row[at])]))


def _rows_at(replies: Replies, positions: Sequence[int]) -> Replies:
    """Return the rows of a reply at these positions."""
    columns = ([column[at] for at in positions] if column else () for column in replies[1:])
    return Replies(replies.now, *columns)


def _passes(wanted: ExportFilter, head: bytes) -> bool:
    """Return whether the options of a job pass the filters."""
    _, _, _, unique_key, subject, tags, _, _ = _common(head[LENGTH_AT : _end(head)])
    return (
        wanted.has_tags(tags)
        and (wanted.unique_keys is None or unique_key in wanted.unique_keys)
        and (wanted.subjects is None or subject in wanted.subjects)
    )


def _chosen(wanted: ExportFilter, page: Page) -> Page:
    """Return the wanted columns of a page."""
    return {name: values for name, values in page.items() if name in wanted.columns}


def _record(
    queue: str, job_id: bytes, head: bytes, st: bytes, history: bytes, result: bytes | None, now: int
) -> JobRecord | None:
    parts = (BLANK + head, st or None, result, None, history or None, ())
    return records.record(queue, text(job_id), parts, now)


def _dead(wanted: ExportFilter, queue: str, replies: Replies) -> Iterator[tuple[Any, ...]]:
    for job_id, data, st in zip(replies.ids, replies.records, replies.states or repeat(b""), strict=False):
        letter = records.dead_letter(queue, text(job_id), data)
        if not wanted.has_time(letter.entered_at) or not wanted.has_name(letter.name):
            continue
        body = _body(st)
        yield (
            queue,
            letter.id,
            letter.name,
            letter.reason,
            letter.entered_at,
            letter.expires_at,
            body[0] if body else None,
            letter.retries,
            letter.next_retry_at or None,
            letter.error_type or None,
            letter.error_message or None,
        )


def _body(st: bytes) -> Sequence[Any] | None:
    if not st:
        return None
    body: Sequence[Any] = unpack(st[25:] if st[:1] in ENDED else st[9:])
    return body


@lru_cache(maxsize=4096)
def _common(envelope: bytes) -> tuple[Any, ...]:
    """Return `COMMON_COLUMNS`."""
    length = int.from_bytes(envelope[:2])
    options: JobOptions = records.unpack_options(envelope[2 + length + SIZE.size :])
    return (
        text(envelope[2 : 2 + length]),
        options.priority,
        options.concurrency_key,
        options.unique_key,
        options.subject,
        options.tags,
        options.headers.text or None,
        options.content_type,
    )


def _jobs(queue: str, replies: Replies, columns: frozenset[str]) -> Page:
    page: dict[str, Sequence[Any]] = {
        "queue": [queue] * len(replies.ids),
        "id": [text(job_id) for job_id in replies.ids] if "id" in columns else (),
    }
    heads: Sequence[bytes] = replies.records
    created: Sequence[int] = ()
    if "payload" in columns:
        ends = [_end(head) for head in heads]
        page["payload"] = [head[end:] for head, end in zip(heads, ends, strict=True)]
        heads = [head[:end] for head, end in zip(heads, ends, strict=True)]
    if columns & OF_RECORD["jobs"]:
        created = page["enqueued_at"] = [int.from_bytes(head[:8]) for head in heads]
        page |= _columns(COMMON_COLUMNS, [_common(head[LENGTH_AT:]) for head in heads])
    if columns & set(RUN_COLUMNS):
        page |= _columns(RUN_COLUMNS, [_run_of(st) if st else NO_ATTEMPT for st in replies.states])
    if "run_at" in columns:
        page["run_at"] = [at or made for at, made in zip(page["run_at"], created, strict=True)]
    return {name: values for name, values in page.items() if name in columns}


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Sequence[Any]]:
    return dict(zip(names, zip(*rows, strict=True) if rows else repeat(()), strict=False))


def _end(head: bytes) -> int:
    """Return where the options end and the payload begins."""
    at = HEAD_WITHOUT_NUMBER + int.from_bytes(head[LENGTH_AT:HEAD_WITHOUT_NUMBER])
    return at + SIZE.size + int.from_bytes(head[at : at + SIZE.size])


def _run_of(st: bytes) -> tuple[Any, ...]:
    """Decode a state entry to the columns of `NO_ATTEMPT`."""
    code = st[:1]
    finished = TWO.unpack_from(st, 9)[0] if code in ENDED else None
    values = _body(st)
    assert values is not None
    attempts, failures, stalls, worker, started_at, run_at, reason, kind, word = values[:9]
    if code == b"c":
        kind = ""
    return (
        STATES[code].value,
        attempts,
        failures,
        stalls,
        run_at,
        started_at or None,
        finished,
        worker or None,
        reason or None,
        kind or None,
        word if kind else None,
    )
