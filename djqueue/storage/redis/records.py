"""Conversion of jobs to and from the bytes that scripts store: see `lua/job.lua`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any
from zlib import crc32

import msgpack

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.core.backoff import Backoff
from djqueue.core.job import (
    DEAD_LETTER_REASONS,
    AttemptRecord,
    Batch,
    Claimed,
    DeadLetterRecord,
    Event,
    Incident,
    ItemPage,
    JobFailure,
    JobRecord,
    Outcome,
)
from djqueue.core.options import JobOptions
from djqueue.core.pages import are_readable
from djqueue.core.policies import (
    DeadLetterPolicy,
    Hold,
    KeyLimit,
    KeyLimitChanges,
    QueuePolicy,
    Rate,
    Retention,
)
from djqueue.core.states import State

CODES = {
    "WAITING": "w",
    "WAITING_UNHANDLED": "s",
    "WAITING_IN_GROUP": "g",
    "DELAYED": "d",
    "BLOCKED": "b",
    "ACTIVE": "a",
    "LINKED_ACTIVE": "A",
    "COMPLETED": "c",
    "FAILED": "f",
    "CANCELLED": "x",
}
"""State codes in `st`, by their names in the scripts. The end of a linked job concerns other keys."""
STATES = {
    b"w": State.WAITING,
    b"s": State.WAITING,
    b"g": State.WAITING,
    b"d": State.DELAYED,
    b"b": State.BLOCKED,
    b"a": State.ACTIVE,
    b"A": State.ACTIVE,
    b"c": State.COMPLETED,
    b"f": State.FAILED,
    b"x": State.CANCELLED,
}
STATE_CODES = {state: b"".join(code for code, other in STATES.items() if other is state) for state in State}
ENDED = b"cfx"
NO_BODY: list[Any] = [0, 0, 0, "", 0, 0, "", "", "", "", 0, 0]
ITEMS_SENT, READABLE = 12, 13
"""Indices of optional values in a body: the number of items, and when the result expires."""
HEAD = Struct(">8sQcH")
"""Number, enqueue time, flag (plain or not), length of the name."""
VARIED = HEAD.size - 3
"""Length of the part of a record that differs between the jobs of a batch."""
SIZE = Struct(">I")
TWO_SIZES = Struct(">II")
NUMBER = Struct(">Q")
TWO = Struct(">QQ")
SALT_BITS = 20
SALT = (1 << SALT_BITS) - 1
TOKENS = 1 << (64 + SALT_BITS)
"""The first number that is too high for a token."""
PLAIN, PLACED, NOT_PLAIN = b"p", b"q", b"x"
"""Flags of records. A placed job is plain but for its place among the waiting jobs."""
COMPLETED_KINDS = {True: b"c", False: b"n"}
"""Kinds of the outcomes of completed jobs, by whether there is a result."""
COMPLETED_STATES = {given: kind + CODES["ACTIVE"].encode() for given, kind in COMPLETED_KINDS.items()}
"""The same, and the state that the jobs must have."""
SHORT_HEADING = 1_024
"""Maximum bytes of a name with its options whose decoded form is kept."""
NO_TOKEN = bytes(8)
NOTHING = HEAD.pack(bytes(8), 0, PLAIN, 0) + SIZE.pack(1) + b"\x80"
"""The record of a job that was removed: no name, no options, no payload."""
RESULT_TTL = JobOptions().result_ttl


def pack_text(value: str) -> bytes:
    """Encode a string for a script. File names may contain lone surrogates."""
    return value.encode("utf-8", "surrogatepass")


def text(value: bytes) -> str:
    """Decode a string from a script."""
    return value.decode("utf-8", "surrogatepass")


def pairs(reply: Any) -> Iterable[tuple[bytes, Any]]:
    """Return the names and values of a hash. A client may have turned the reply into a dict."""
    return reply.items() if isinstance(reply, dict) else zip(*[iter(reply)] * 2, strict=True)


def mapping(reply: Any) -> dict[str, int]:
    """Return counters by name."""
    return {text(name): int(number) for name, number in pairs(reply)}


def pack(value: Any) -> bytes:
    """Encode a value for `cmsgpack`."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def pack_raw(value: Any) -> bytes:
    """Encode a value with bytes in it, which are strings to `cmsgpack`."""
    packed: bytes = msgpack.packb(value, use_bin_type=False, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes) -> Any:
    """Decode a value of `cmsgpack`."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def unpack_ids(data: bytes) -> list[str]:
    """Decode the ids of an entry of the stream: see `lua/packed_ids.lua`."""
    # As bytes, since a length counts those.
    ids: list[Any] = msgpack.unpackb(data, raw=True)
    if len(ids) == 4 and type(ids[2]) is int:
        heading, tail, size, parts = ids
        ids = [heading + parts[at : at + size] + tail for at in range(0, len(parts), size)]
    return list(map(text, ids))


@lru_cache(maxsize=1024)
def pack_options(options: JobOptions) -> bytes:
    """Encode options. False stands for a result that is kept, since Lua tables have no nil."""
    values = options.as_dict()
    if "result_ttl" in values and values["result_ttl"] is None:
        values["result_ttl"] = False
    return pack(values)


@lru_cache(maxsize=4096)
def unpack_options(data: bytes) -> JobOptions:
    """Decode options; equal ones are one object."""
    values = unpack(data)
    if values.get("result_ttl") is False:
        values["result_ttl"] = None
    return JobOptions.from_dict(values)


def flag_of(options: JobOptions) -> bytes:
    """Return the flag of a record. A plain job is kept for the default time and ends without other keys."""
    if (
        not options.plain
        or options.weight != 1
        or options.ttl is not None
        or options.depends_on
        or options.result_ttl != RESULT_TTL
        or options.retention is not None
    ):
        return NOT_PLAIN
    return PLACED if options.priority or options.lifo else PLAIN


def envelope(batch: Batch) -> bytes:
    """Return the part that the records of a batch share: from the flag to the options."""
    name, options = pack_text(batch.name), pack_options(batch.options)
    return flag_of(batch.options) + len(name).to_bytes(2) + name + SIZE.pack(len(options)) + options


def start(batch: Batch) -> bytes:
    """Return when a batch's jobs start, for `enqueue.lua`: "" for now, a delay, or @ and a time."""
    if batch.run_at is not None:
        return b"@%d" % batch.run_at
    return b"%d" % batch.delay if batch.delay else b""


class Envelope:
    """The parts of a job's record."""

    __slots__ = ("created_at", "name", "options", "payload")

    def __init__(self, blob: bytes) -> None:
        _, self.created_at, _, length = HEAD.unpack_from(blob)
        at = HEAD.size + length
        self.name = text(blob[HEAD.size : at])
        (size,) = SIZE.unpack_from(blob, at)
        at += SIZE.size
        self.options = unpack_options(blob[at : at + size])
        self.payload = blob[at + size :]


@lru_cache(maxsize=4096)
def _salt(queue: str) -> int:
    return crc32(queue.encode()) & SALT


def pack_token(queue: str, token: int) -> bytes:
    """Encode the token of a claim; return b"" for a token of another queue.

    Each queue counts its own tokens. A hash of the queue's name makes them unique.
    """
    if 0 <= token < TOKENS and token & SALT == _salt(queue):
        return NUMBER.pack(token >> SALT_BITS)
    return b""


def _name_and_options(heading: bytes) -> tuple[str, JobOptions]:
    """Decode the part of a record from the flag to the options; short ones, which jobs share, are kept."""
    return (_kept_options if len(heading) <= SHORT_HEADING else _decoded_options)(heading)


def _decoded_options(heading: bytes) -> tuple[str, JobOptions]:
    job = Envelope(bytes(VARIED) + heading)
    return job.name, job.options


_kept_options = lru_cache(maxsize=1024)(_decoded_options)


def claimed(queue: str, found: Sequence[Any], first: int, lease: int, now: int) -> list[Claimed]:
    """Decode claims from a reply of `finish_and_claim.lua` or its fast variant."""
    new = tuple.__new__
    jobs = []
    token = first << SALT_BITS | _salt(queue)
    name, options, heading, begin = "", None, b"", 0
    for at in range(0, len(found), 3):
        token += 1 << SALT_BITS
        job_id, blob, counters = found[at : at + 3]
        # Jobs that are claimed together usually share name and options.
        if options is None or not blob.startswith(heading, VARIED):
            at_size = HEAD.size + int.from_bytes(blob[HEAD.size - 2 : HEAD.size])
            begin = at_size + SIZE.size
            begin += int.from_bytes(blob[at_size:begin])
            heading = blob[VARIED:begin]
            name, options = _name_and_options(heading)
        created_at = int.from_bytes(blob[NUMBER.size : VARIED])
        attempts, failures, stalls, run_at = unpack(counters) if counters else (1, 0, 0, 0)
        waited = now - (run_at if run_at > created_at else created_at)
        # Calling the constructor would take longer than all of this.
        fields = (text(job_id), queue, name, blob[begin:], options, token)
        counted = (attempts, failures, stalls, created_at, lease, waited if waited > 0 else 0)
        jobs.append(new(Claimed, (*fields, *counted)))
    return jobs


def plain_reply(data: bytes, outcomes: int) -> tuple[bytes, bytes, int, int, int, Any, int]:
    """Decode a reply of `finish_and_claim_plain.lua`, which has accepted the outcomes."""
    token, now = TWO.unpack_from(data, 1)
    at = 1 + TWO.size
    if data[:1] == b"a":
        return b"again", b"1" * outcomes, token, -1, 0, data[at:], now
    claims: list[bytes] = []
    while at < len(data):
        id_size, size = TWO_SIZES.unpack_from(data, at)
        at += TWO_SIZES.size
        end = at + id_size
        claims += (data[at:end], data[end : end + size], b"")
        at = end + size
    return b"done", b"1" * outcomes, token, -1, 0, claims, now


def outcome_arguments(queue: str, outcomes: Iterable[Outcome]) -> list[bytes]:
    """Return kind, id, token and data of each outcome, for `finish_and_claim.lua`."""
    words: list[bytes] = []
    salt, number = _salt(queue), NUMBER.pack
    for outcome in outcomes:
        _, job_id, token, kind, result, *_ = outcome
        packed = number(token >> SALT_BITS) if 0 <= token < TOKENS and token & SALT == salt else b""
        if kind != "complete":
            kind_code, data = _other_end(outcome)
        elif result is None:
            kind_code, data = COMPLETED_KINDS[False], b""
        else:
            kind_code, data = COMPLETED_KINDS[True], result
        words += (kind_code, pack_text(job_id), packed, data)
    return words


def completed_arguments(queue: str, outcomes: Iterable[Outcome]) -> tuple[list[Any], list[str]]:
    """Encode completed jobs for the short scripts; return also the ids of those with a result."""
    salt, number = _salt(queue), NUMBER.pack
    ids, results, with_result = [], [], []
    ends = b""
    for outcome in outcomes:
        _, job_id, token, _, result, *_ = outcome
        valid = 0 <= token < TOKENS and token & SALT == salt
        ends += COMPLETED_STATES[result is not None] + (number(token >> SALT_BITS) if valid else NO_TOKEN)
        ids.append(pack_text(job_id))
        if result is not None:
            results.append(result)
            with_result.append(job_id)
    return [ends, *ids, *results], with_result


def _other_end(outcome: Outcome) -> tuple[bytes, bytes]:
    if outcome.kind == "retry":
        return b"r", pack([outcome.delay, _error(outcome.error)])
    if outcome.kind == "release":
        return b"l", pack([outcome.delay, _error(outcome.error)])
    if outcome.kind == "fail":
        reason = outcome.reason if outcome.reason in DEAD_LETTER_REASONS else "unknown"
        return b"f", pack([reason, _error(outcome.error)])
    return b"x", pack([outcome.reason])


def _error(error: JobFailure | None) -> Any:
    return False if error is None else list(error)


def record(queue: str, job_id: str, found: Sequence[Any], now: int) -> JobRecord | None:
    """Decode a job from `read.lua`; None if it has expired."""
    return next(records(queue, [job_id], [[part] for part in found], now))


def records(
    queue: str, ids: Iterable[str], parts: Iterable[Iterable[Any]], now: int
) -> Iterator[JobRecord | None]:
    """Decode jobs; None for those that have expired or do not exist.

    Args:
        ids: Their ids.
        parts: Lists of their records, state entries, results, progress, ended attempts and log lines.
    """
    new = tuple.__new__
    name, options, heading, begin = "", None, b"", 0
    for job_id, blob, st, result, progress, history, lines in zip(ids, *parts, strict=True):
        if blob is None:
            yield None
            continue
        # Jobs that were enqueued together share name and options.
        if options is None or not blob.startswith(heading, VARIED):
            at_size = HEAD.size + int.from_bytes(blob[HEAD.size - 2 : HEAD.size])
            begin = at_size + SIZE.size
            begin += int.from_bytes(blob[at_size:begin])
            heading = blob[VARIED:begin]
            name, options = _name_and_options(heading)
        created_at = int.from_bytes(blob[NUMBER.size : VARIED])
        state, finished_at, expires, values = State.WAITING, 0, 0, NO_BODY
        if st is not None:
            code = st[:1]
            state = STATES[code]
            if code in ENDED:
                finished_at, expires = TWO.unpack_from(st, 9)
                if expires and expires <= now:
                    yield None
                    continue
                values = unpack(st[25:])
            else:
                values = unpack(st[9:])
        attempts, failures, stalls, worker, started_at, run_at, reason = values[:7]
        error = JobFailure(*values[7:10]) if values[7] and state is not State.COMPLETED else None
        if result is not None and (
            state is not State.COMPLETED or now >= _result_until(options, finished_at, expires, values)
        ):
            result = None
        # Calling the constructor would take longer than all of this.
        known = (job_id, queue, name, blob[begin:], options, state, created_at, run_at or created_at)
        counted = (attempts, failures, stalls, worker, started_at, finished_at, result, error, reason)
        details = (
            None if progress is None else decode(progress, MSGPACK),
            () if history is None else _history(history),
            tuple(map(_line, lines)) if lines else (),
            _items_sent(values),
        )
        yield new(JobRecord, (*known, *counted, *details))


def item_page(queue: str, found: Sequence[Any], now: int) -> ItemPage | None:
    """Decode a page of `items.lua`; None if the job has expired."""
    blob, st, start, items = found
    options = Envelope(blob).options
    if st is None:
        return ItemPage(State.WAITING, options.content_type, 0, 0, (), 0)
    code, state, finished_at = st[:1], STATES[st[:1]], 0
    if code in ENDED:
        finished_at, expires = TWO.unpack_from(st, 9)
        if expires and expires <= now:
            return None
    body = unpack(st[25 if code in ENDED else 9 :])
    count = _items_sent(body)
    run = 0
    if count or state is State.ACTIVE:
        run = int.from_bytes(st[1:9]) << SALT_BITS | _salt(queue)
    readable = are_readable(state, options, finished_at, now)
    if len(body) > READABLE:
        readable = now < abs(body[READABLE])
    return ItemPage(state, options.content_type, run, start, tuple(items) if readable else (), count)


def _items_sent(body: Sequence[Any]) -> int:
    return body[ITEMS_SENT] or 0 if len(body) > ITEMS_SENT else 0


def _result_until(options: JobOptions, finished_at: int, expires: int, body: Sequence[Any]) -> float:
    """Return when the result of a completed job expires."""
    if len(body) > READABLE:
        # Negative: the record is held.
        return float(body[READABLE]) if body[READABLE] > 0 else math.inf
    # A record without an end is kept forever, or held.
    if options.result_ttl is None or not expires:
        return math.inf
    return finished_at + options.result_ttl


def _history(data: bytes) -> tuple[AttemptRecord, ...]:
    unpacker = msgpack.Unpacker(unicode_errors="surrogatepass")
    unpacker.feed(data[2:])
    return tuple(
        AttemptRecord(
            attempt, worker, started_at, finished_at, outcome, JobFailure(*error) if error else None
        )
        for attempt, worker, started_at, finished_at, outcome, error in unpacker
    )


def pack_history(attempts: Sequence[AttemptRecord]) -> bytes:
    """Encode ended attempts."""
    runs = b"".join(pack([*attempt[:5], _error(attempt.error)]) for attempt in attempts)
    return len(attempts).to_bytes(2) + runs


def pack_dead_letter(letter: DeadLetterRecord) -> bytes:
    """Encode a dead letter."""
    values = [*letter[2:-1], *([[*map(list, letter.unmet)]] if letter.unmet else [])]
    return pack(values)


def pack_line(at: int, line: str) -> bytes:
    """Encode a log line."""
    return pack([at, line])


def _line(data: bytes) -> tuple[int, str]:
    at, line = unpack(data)
    return at, line


def pack_progress(value: Any) -> bytes:
    """Encode a job's progress."""
    return encode(value, MSGPACK)


def incident(queue: str, found: Sequence[Any]) -> Incident:
    """Decode an incident that a script reports with its reply."""
    job_id, name, event, *rest = map(text, found)
    reason = rest[0] if rest else ""
    return Incident(queue, job_id, name, event, reason, JobFailure(*rest[1:]) if rest[1:] else None)


def dead_letter(queue: str, job_id: str, data: bytes) -> DeadLetterRecord:
    """Decode a dead letter."""
    values = unpack(data)
    found = DeadLetterRecord(queue, job_id, *values[:8])
    return found._replace(unmet=tuple(map(tuple, values[8]))) if len(values) > 8 else found


def pack_delay(delay: int | Backoff) -> int | bytes:
    """Encode the wait before an automatic retry: see `wait_of` in `completion.lua`."""
    if isinstance(delay, int):
        return delay
    return pack([delay.kind, delay.base, math.log2(delay.factor), delay.cap, delay.jitter])


BOUNDS = (b"age:c", b"age:x", b"age:r", b"age:h", b"age:l", b"bytes", b"bounds")
"""Fields of a queue's `meta` with its bounds, in the order of `sweep.lua`."""


def pack_bounds(kept: Retention, dead: DeadLetterPolicy) -> list[int | bytes]:
    """Return the values of `BOUNDS`, b"" for none."""
    ages = [each.age for each in (kept.completed, kept.cancelled, kept.results, kept.attempts, kept.logs)]
    measures = kept.measures or dead.max_bytes is not None
    concerns_completed = measures or any(ages[place] is not None for place in (0, 2, 3, 4))
    flags = [b"1" if flag else b"" for flag in (measures, concerns_completed)]
    return [*(b"" if age is None else age for age in ages), *flags]


def events(queue: str, message: bytes) -> list[Event]:
    """Decode the events of one message. Raises ValueError or TypeError if it is malformed."""
    found = []
    for job_id, name, event, state, *numbers in unpack(message):
        texts = isinstance(job_id, str) and isinstance(name, str) and isinstance(event, str)
        if not texts or not all(type(number) is int for number in numbers):
            raise ValueError("it is not a list of events")
        found.append(Event(queue, job_id, name, event, State(state), *numbers))
    return found


def pack_limits(rate: Rate | None, concurrency: int | None) -> list[int | bytes]:
    """Return capacity, per and concurrency, b"" for none."""
    capacity, per = (b"", b"") if rate is None else (rate.capacity, rate.per)
    return [capacity, per, b"" if concurrency is None else concurrency]


def unpack_limits(
    capacity: bytes | None, per: bytes | None, concurrency: bytes | None
) -> tuple[Rate | None, int | None]:
    """Decode the rate and the concurrency that are set on a queue or limiter."""
    rate = Rate(int(capacity), int(per)) if capacity and per else None
    return rate, int(concurrency) if concurrency else None


def key_limits(found: Any) -> dict[str | None, KeyLimit]:
    """Decode the overrides of groups, by group; None is the key of the defaults for all."""
    return {text(group) or None: key_limit(overrides) for group, overrides in pairs(found)}


def key_limit(data: bytes) -> KeyLimit:
    """Decode the overrides of a group: see `ready.lua`."""
    limit, capacity, per, weight = [*map(_number, data[1:].split(b"/")), None, None, None][:4]
    rate = Rate(capacity, per) if capacity and per else None
    return KeyLimit(limit, data[:1] == b"1", rate, weight)


def _number(data: bytes) -> int | None:
    return int(data) if data else None


def group_words(overrides: KeyLimitChanges) -> list[bytes]:
    """Encode limit, rate and weight of a group, for `group.lua`."""
    words = []
    for name in ("concurrency", "rate", "weight"):
        value = overrides.get(name, UNCHANGED)
        if isinstance(value, Rate):
            value = f"{value.capacity}/{value.per}"
        words.append(b"" if value is None else str(value).encode())
    return words


UNCHANGED = "-"


def pack_holds(holds: Iterable[Hold]) -> bytes:
    """Encode holds: see `control.lua`."""
    return pack([[hold.name, hold.since, hold.until or 0, hold.reason] for hold in holds])


def unpack_holds(data: bytes | None) -> tuple[Hold, ...]:
    """Decode holds, by name, among them some that have ended."""
    found = [] if data is None else unpack(data)
    return tuple(sorted(Hold(name, since, until or None, reason) for name, since, until, reason in found))


def pack_groups(policy: QueuePolicy) -> int | bytes:
    """Encode the configuration of groups: see `configure_groups` in `ready.lua`."""
    rate, weights = policy.key_rate, policy.key_weights
    if rate is None and not weights:
        return policy.key_limit
    return pack([policy.key_limit, False if rate is None else [rate.capacity, rate.per], dict(weights)])
