"""Jobs between their Python values and the bytes that the scripts keep: see `lua/job.lua`."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any
from zlib import crc32

import msgpack

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.core.backoff import Backoff
from djqueue.core.groups import GroupLimit
from djqueue.core.job import (
    DEAD_LETTER_REASONS,
    Attempt,
    Batch,
    Claimed,
    DeadLetter,
    Event,
    Incident,
    JobError,
    JobRecord,
    Outcome,
    WorkerInfo,
)
from djqueue.core.options import JobOptions
from djqueue.core.states import State

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
LETTERS = {state: b"".join(letter for letter, other in STATES.items() if other is state) for state in State}
ENDED = b"cfx"
HEAD = Struct(">8sQcH")
"""Number, when it was enqueued, whether its end concerns no other key, length of its name."""
VARIED = HEAD.size - 3
"""What comes before this is every job's own."""
SIZE = Struct(">I")
NUMBER = Struct(">Q")
TWO = Struct(">QQ")
SALT_BITS = 20
SALT = (1 << SALT_BITS) - 1
TOKENS = 1 << (64 + SALT_BITS)
"""No queue gives so many."""
PLAIN, NOT_PLAIN = b"p", b"x"
NOTHING = HEAD.pack(bytes(8), 0, PLAIN, 0) + SIZE.pack(1) + b"\x80"
"""The record of a job that is gone: without name, options, payload."""
RESULT_TTL = JobOptions().result_ttl


def pack_text(value: str) -> bytes:
    """A text for a script; also one with halves of surrogate pairs, as names of files have them."""
    return value.encode("utf-8", "surrogatepass")


def text(value: bytes) -> str:
    """A text from a script."""
    return value.decode("utf-8", "surrogatepass")


def pack(value: Any) -> bytes:
    """A value for `cmsgpack`."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes) -> Any:
    """A value of `cmsgpack`, whose texts are bytes to it."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


@lru_cache(maxsize=1024)
def pack_options(options: JobOptions) -> bytes:
    """Options for a script, to which a nil in a map is nothing: False says that results are kept."""
    values = options.as_dict()
    if "result_ttl" in values and values["result_ttl"] is None:
        values["result_ttl"] = False
    return pack(values)


@lru_cache(maxsize=4096)
def unpack_options(data: bytes) -> JobOptions:
    """The options that `pack_options` packed; equal ones are one object."""
    values = unpack(data)
    if values.get("result_ttl") is False:
        values["result_ttl"] = None
    return JobOptions.from_dict(values)


def is_plain(options: JobOptions) -> bool:
    """Whether such a job waits in the list, is kept as most are, and its end concerns no other key."""
    return (
        options.plain
        and options.weight == 1
        and options.ttl is None
        and not options.priority
        and not options.lifo
        and not options.depends_on
        and options.result_ttl == RESULT_TTL
        and options.retention is None
    )


def envelope(batch: Batch) -> bytes:
    """What the records of a batch's jobs have in common: all between the time and the payload."""
    name, options = pack_text(batch.name), pack_options(batch.options)
    flag = PLAIN if is_plain(batch.options) else NOT_PLAIN
    return flag + len(name).to_bytes(2) + name + SIZE.pack(len(options)) + options


class Envelope:
    """A job's record taken apart."""

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
    """A claim's token as the scripts keep it; empty for one that this queue has not given.

    Each queue counts its own tokens; so that those of two are not the same, a trace of its name is in them.
    """
    if 0 <= token < TOKENS and token & SALT == _salt(queue):
        return NUMBER.pack(token >> SALT_BITS)
    return b""


def claimed(queue: str, found: Sequence[Any], first: int, lease: int) -> list[Claimed]:
    """Claims as `work` answers them: id, record, and counters of one that has run before, for each."""
    new = tuple.__new__
    jobs = []
    token = first << SALT_BITS | _salt(queue)
    name, options, heading, begin = "", None, b"", 0
    for at in range(0, len(found), 3):
        token += 1 << SALT_BITS
        job_id, blob, counters = found[at : at + 3]
        # Most of the jobs that come together have name and options in common.
        if options is None or not blob.startswith(heading, VARIED):
            job = Envelope(blob)
            name, options = job.name, job.options
            begin = len(blob) - len(job.payload)
            heading = blob[VARIED:begin]
        created_at = int.from_bytes(blob[NUMBER.size : VARIED])
        attempts, failures, stalls = unpack(counters) if counters else (1, 0, 0)
        # Without the call of a constructor, which takes longer than all of this.
        fields = (text(job_id), queue, name, blob[begin:], options, token)
        jobs.append(new(Claimed, (*fields, attempts, failures, stalls, created_at, lease)))
    return jobs


def outcome_arguments(queue: str, outcomes: Iterable[Outcome]) -> list[bytes]:
    """For `work`: kind, id, token and data of each outcome of a queue."""
    words: list[bytes] = []
    salt, number = _salt(queue), NUMBER.pack
    for outcome in outcomes:
        _, job_id, token, kind, result, *_ = outcome
        packed = number(token >> SALT_BITS) if 0 <= token < TOKENS and token & SALT == salt else b""
        if kind != "complete":
            letter, data = _other_end(outcome)
        elif result is None:
            letter, data = b"n", b""
        else:
            letter, data = b"c", result
        words += (letter, pack_text(job_id), packed, data)
    return words


def _other_end(outcome: Outcome) -> tuple[bytes, bytes]:
    if outcome.kind == "retry":
        return b"r", pack([outcome.delay, _error(outcome.error)])
    if outcome.kind == "release":
        return b"l", pack([outcome.delay, _error(outcome.error)])
    if outcome.kind == "fail":
        reason = outcome.reason if outcome.reason in DEAD_LETTER_REASONS else "unknown"
        return b"f", pack([reason, _error(outcome.error)])
    return b"x", pack([outcome.reason])


def _error(error: JobError | None) -> Any:
    return False if error is None else list(error)


def record(queue: str, job_id: str, found: Sequence[Any], now: int) -> JobRecord | None:
    """A record as `read` answers it; None if its time is over."""
    blob, st, result, progress, history, lines = found
    job = Envelope(blob)
    state, finished_at, body = State.WAITING, 0, None
    if st is not None:
        letter = st[:1]
        state = STATES[letter]
        if letter in ENDED:
            finished_at, expires = TWO.unpack_from(st, 9)
            if expires and expires <= now:
                return None
            body = unpack(st[25:])
        else:
            body = unpack(st[9:])
    values = body or [0, 0, 0, "", 0, 0, "", "", "", "", 0, 0]
    attempts, failures, stalls, worker, started_at, run_at, reason = values[:7]
    error = JobError(*values[7:10]) if values[7] and state is not State.COMPLETED else None
    return JobRecord(
        job_id,
        queue,
        job.name,
        job.payload,
        job.options,
        state,
        job.created_at,
        run_at or job.created_at,
        attempts,
        failures,
        stalls,
        worker,
        started_at,
        finished_at,
        result if state is State.COMPLETED and _is_readable(job.options, finished_at, now) else None,
        error,
        reason,
        decode(progress, MSGPACK) if progress is not None else None,
        _history(history),
        tuple(_line(line) for line in lines),
    )


def _is_readable(options: JobOptions, finished_at: int, now: int) -> bool:
    return options.result_ttl is None or finished_at + options.result_ttl > now


def _history(data: bytes | None) -> tuple[Attempt, ...]:
    if data is None:
        return ()
    unpacker = msgpack.Unpacker(unicode_errors="surrogatepass")
    unpacker.feed(data[2:])
    return tuple(
        Attempt(attempt, worker, started_at, finished_at, outcome, JobError(*error) if error else None)
        for attempt, worker, started_at, finished_at, outcome, error in unpacker
    )


def pack_line(at: int, line: str) -> bytes:
    """A log line."""
    return pack([at, line])


def _line(data: bytes) -> tuple[int, str]:
    at, line = unpack(data)
    return at, line


def pack_progress(value: Any) -> bytes:
    """A job's progress."""
    return encode(value, MSGPACK)


def incident(queue: str, found: Sequence[Any]) -> Incident:
    """What a script tells beside its answer."""
    job_id, name, event, *rest = map(text, found)
    reason = rest[0] if rest else ""
    return Incident(queue, job_id, name, event, reason, JobError(*rest[1:]) if rest[1:] else None)


def letter(queue: str, job_id: str, data: bytes) -> DeadLetter:
    """A dead letter."""
    return DeadLetter(queue, job_id, *unpack(data))


def pack_delay(delay: int | Backoff) -> int | bytes:
    """The wait before a dead letter is retried by itself, for a script: see `wait_of` in `ends.lua`."""
    if isinstance(delay, int):
        return delay
    return pack([delay.kind, delay.base, math.log2(delay.factor), delay.cap, delay.jitter])


def events(queue: str, message: bytes) -> Iterable[Event]:
    """The events of one message of a queue's channel."""
    for job_id, name, event, state, at in unpack(message):
        yield Event(queue, job_id, name, event, State(state), at)


def group_limit(data: bytes) -> GroupLimit:
    """What was said to a group."""
    return GroupLimit(int(data[1:]) if data[1:] else None, data[:1] == b"1")


def pack_worker(info: WorkerInfo) -> bytes:
    """A worker as it describes itself."""
    return pack(list(info))


def worker(data: bytes, seen_at: int) -> WorkerInfo:
    """A worker, heard of at a time."""
    values = unpack(data)
    info = WorkerInfo(*values)
    queues = None if info.queues is None else tuple(info.queues)
    return info._replace(queues=queues, names=tuple(info.names), seen_at=seen_at)
