"""Export of all jobs in Redis: see `lua/export.lua` and `djqueue.storage.export`.

A part has the jobs with one remainder in the order of a hash's cursors. No two parts share jobs, and a job
that is not removed is read once, whatever states it goes through meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from djqueue.core.job import JobRecord
from djqueue.core.options import JobOptions
from djqueue.core.states import TERMINAL, State
from djqueue.storage.export import (
    ATTEMPT_COLUMNS,
    DEAD_COLUMNS,
    RESULT_COLUMNS,
    Export,
    ExportFilter,
    ExportPart,
    Page,
    attempt_rows,
    page_of,
    result_rows,
)

from . import records
from .keys import QueueKeys
from .keyspace import answers
from .records import ENDED, NUMBER, SIZE, STATE_CODES, STATES, TWO, text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

HASHES = {"jobs": "jobs", "results": "st", "attempts": "st", "dead": "dead_letters"}
"""The hash that is scanned for a table. A job that waits as it was enqueued is not in `st`."""
MIN_PART = 5_000
"""Minimum number of jobs in a part."""
MAX_PARTS = 256
"""Maximum number of parts of a queue."""
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
        kind = _hash_of(wanted)
        lengths = self._run(answers([RedisCommand((b"HLEN", self._keys(name).key(kind))) for name in names]))
        per_part = max(MIN_PART, sum(lengths) // many)
        parts: list[ExportPart] = []
        for name, length in zip(names, lengths, strict=True):
            divisor = 1
            while divisor < MAX_PARTS and length >= 2 * divisor * per_part:
                divisor *= 2
            parts += [ExportPart(name, rest, divisor, length // divisor) for rest in range(divisor)]
        return parts

    def pages(self, wanted: ExportFilter, part: ExportPart, size: int) -> Iterator[Page]:
        """Yield pages; the next one is requested while one is used."""
        seen: set[bytes] = set()
        with ThreadPoolExecutor(1, "djqueue-export") as aside:
            coming = aside.submit(self._read, wanted, part, b"%d" % part.first, size)
            while True:
                cursor, replies, results = coming.result()
                if cursor:
                    coming = aside.submit(self._read, wanted, part, cursor, size)
                yield _page(wanted, part.place, replies, results, seen)
                if not cursor:
                    return

    def _read(
        self, wanted: ExportFilter, part: ExportPart, cursor: bytes, size: int
    ) -> tuple[bytes, "Replies", dict[bytes, bytes | None]]:
        answer: tuple[bytes, Replies, dict[bytes, bytes | None]] = self._run(
            self._ask_page(wanted, part, cursor, size)
        )
        return answer

    def _ask_page(
        self, wanted: ExportFilter, part: ExportPart, cursor: bytes, size: int
    ) -> Steps[tuple[bytes, "Replies", dict[bytes, bytes | None]]]:
        keys = self._keys(part.place)
        arguments = [
            _hash_of(wanted).encode(),
            cursor,
            size,
            part.last,
            part.first,
            _codes(wanted),
            b"" if wanted.since is None or _is_looked_at_here(wanted) else wanted.since,
            b"" if wanted.until is None or _is_looked_at_here(wanted) else wanted.until,
            b"c" if wanted.table == "jobs" else b"f",
            b"1" if "payload" in wanted.columns else b"",
            b"1" if wanted.table == "attempts" else b"",
        ]
        [[following, now, columns]] = yield [ScriptCall(script("export"), keys, arguments, sequence=False)]
        count = 3 if wanted.table == "dead" else 4
        replies = Replies(int(now), *(columns[column::count] for column in range(count)))
        results: dict[bytes, bytes | None] = {}
        if wanted.table == "results" and "result" in wanted.columns and replies.ids:
            result_keys = [keys.result(text(job_id)) for job_id in replies.ids]
            [values] = yield [RedisCommand((b"MGET", *result_keys))]
            results = dict(zip(replies.ids, values, strict=True))
        return following, replies, results


class Replies(NamedTuple):
    """A reply of `export.lua`, as columns."""

    now: int
    ids: Sequence[bytes]
    heads: Sequence[bytes]
    states: Sequence[bytes]
    histories: Sequence[bytes] = ()


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
    fresh = seen.isdisjoint(replies.ids) and len(set(replies.ids)) == len(replies.ids)
    if not fresh:
        # While a hash grows or shrinks, a scan may repeat some of its fields.
        positions = [
            position
            for position, job_id in enumerate(replies.ids)
            if job_id not in seen and not seen.add(job_id)  # type: ignore[func-returns-value]
        ]
        replies = Replies(
            replies.now,
            *([column[position] for position in positions] if column else () for column in replies[1:]),
        )
    seen.update(replies.ids)
    if wanted.table == "jobs":
        return _jobs(queue, replies, payloads="payload" in wanted.columns)
    if wanted.table == "dead":
        return page_of(DEAD_COLUMNS, _dead(wanted, queue, replies))
    jobs = [
        record
        for job_id, head, st, history in zip(
            replies.ids, replies.heads, replies.states, replies.histories, strict=True
        )
        if (record := _record(queue, job_id, head, st, history, results.get(job_id), replies.now))
    ]
    if wanted.table == "results":
        return page_of(RESULT_COLUMNS, chain.from_iterable(map(result_rows, jobs)))
    rows = chain.from_iterable(map(attempt_rows, jobs))
    at = ATTEMPT_COLUMNS.index("finished_at")
    return page_of(ATTEMPT_COLUMNS, [row for row in rows if wanted.has_time(row[at])])


def _record(
    queue: str, job_id: bytes, head: bytes, st: bytes, history: bytes, result: bytes | None, now: int
) -> JobRecord | None:
    parts = (BLANK + head, st or None, result, None, history or None, ())
    return records.record(queue, text(job_id), parts, now)


def _dead(wanted: ExportFilter, queue: str, replies: Replies) -> Iterator[tuple[Any, ...]]:
    for job_id, data, st in zip(replies.ids, replies.heads, replies.states, strict=True):
        letter = records.dead_letter(queue, text(job_id), data)
        if not wanted.has_time(letter.entered_at):
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


NO_ATTEMPT = ("waiting", 0, 0, 0, None, None, None, None, None, None, None)
"""State, attempts, failures, stalls, run at, started at, finished at, worker, reason and error of a job that
waits as it was enqueued."""


@lru_cache(maxsize=4096)
def _common(envelope: bytes) -> tuple[Any, ...]:
    """Return the columns that jobs of one batch share: those of the name and the options."""
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


def _jobs(queue: str, replies: Replies, *, payloads: bool) -> Page:
    heads = replies.heads
    if payloads:
        ends = [_end(head) for head in heads]
        envelopes = [_common(head[LENGTH_AT:end]) for head, end in zip(heads, ends, strict=True)]
    else:
        envelopes = [_common(head[LENGTH_AT:]) for head in heads]
    created = [int.from_bytes(head[:8]) for head in heads]
    runs = [_run_of(st) if st else NO_ATTEMPT for st in replies.states]
    names, priorities, groups, keys, subjects, tags, headers, types = _columns(envelopes, 8)
    states, attempts, failures, stalls, run_at, started, finished, workers, reasons, kinds, words = _columns(
        runs, 11
    )
    page: dict[str, Sequence[Any]] = {
        "queue": [queue] * len(heads),
        "id": [text(job_id) for job_id in replies.ids],
        "name": names,
        "state": states,
        "priority": priorities,
        "attempts": attempts,
        "failures": failures,
        "stalls": stalls,
        "enqueued_at": created,
        "run_at": [at or made for at, made in zip(run_at, created, strict=True)],
        "started_at": started,
        "finished_at": finished,
        "concurrency_key": groups,
        "unique_key": keys,
        "subject": subjects,
        "tags": tags,
        "headers": headers,
        "worker": workers,
        "reason": reasons,
        "error_type": kinds,
        "error_message": words,
        "content_type": types,
    }
    if payloads:
        page["payload"] = [head[end:] for head, end in zip(heads, ends, strict=True)]
    return page


def _columns(rows: Sequence[tuple[Any, ...]], many: int) -> Sequence[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * many


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
