"""The scheduler's socket: its operations, and the frames in which they are requested and answered.

A connection begins with a greeting, [VERSION, client], which is answered by the scheduler's epoch: a name of
this run. Then each request, [operation, arguments, keyword arguments], has one answer: ["ok", value] or
["error", code, message]. On a connection that has subscribed, ["event", number, value] may precede an answer.
"""

import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from djqueue.core.errors import SerializationError
from djqueue.core.job import Batch
from djqueue.storage.facets import Jobs, Limiters, Queues, Reads, Workers
from djqueue.storage.snapshots import Part
from djqueue.storage.wire import LENGTH, MAX_FRAME, pack, unpack_frame

VERSION = 1
VALUE_ERROR = "value"
"""Code of a ValueError that is no error of djqueue."""
MAX_GREETING = 4_096
"""Maximum bytes of the first frame of a client."""
CHUNK = 1 << 16
MAX_BYTES = MAX_FRAME // 2
"""Bytes of payloads or results in a frame; the rest is for everything else."""
JOBS_PER_SECOND = 1_000
"""Jobs of one enqueue for which it gets another second: the ORM may have to write them."""

FACETS = {"jobs": Jobs, "queues": Queues, "limiters": Limiters, "workers": Workers, "reads": Reads}
SUBSCRIPTIONS = frozenset({"events.subscribe", "listen", "workers.on_command"})
"""Operations that are answered by events, until `unsubscribe`."""
STREAMS = frozenset({"snapshots.read", "snapshots.write"})
"""Operations with any number of frames."""
ASYNC_READS = frozenset({"reads.ajobs", "reads.aitems"})
OPERATIONS = {
    f"{facet}.{name}"
    for facet, protocol in FACETS.items()
    for name, member in vars(protocol).items()
    if callable(member) and not name.startswith("_")
} - SUBSCRIPTIONS - ASYNC_READS | {
    "renew",
    "report",
    "sweep",
    "probe",
    "snapshots.is_empty",
    "outbox_written",
}
"""Operations that are the same in the scheduler and elsewhere. `emit`, `enqueue` and `finish` are not."""
QUEUE_SETTINGS = frozenset(
    {"queues.pause", "queues.resume", "queues.pause_key", "queues.resume_key", "queues.set_limits"}
    | {"queues.set_key_limit", "queues.obliterate", "queues.hold", "queues.release"}
)
LIMITER_SETTINGS = frozenset({"limiters.set"})
REMOVALS = frozenset({"queues.clean", "queues.obliterate"})
WRITTEN = (
    QUEUE_SETTINGS | LIMITER_SETTINGS | REMOVALS | {name for name in OPERATIONS if name.startswith("jobs.")}
)
"""Changes that are answered when they are committed."""
LONG = REMOVALS | STREAMS | {"sweep", "snapshots.is_empty"}
"""Operations whose time depends on the number of jobs."""
LONG_TIMEOUT = 600.0
"""Seconds for one of them, or for a frame of it."""
FOR_COMMIT = 0.8
"""Part of a call's time for which the scheduler waits for a commit: its answer has to arrive in time."""


def receive(connection: socket.socket, buffer: bytearray, limit: int = MAX_FRAME) -> Any:
    """Return the next frame of a blocking socket. `buffer` keeps what was received beyond it.

    Raises EOFError if the other side has closed the connection, OSError, and SerializationError.
    """
    while (end := frame_end(buffer, limit)) is None or len(buffer) < end:
        data = connection.recv(CHUNK)
        if not data:
            raise EOFError("the connection was closed")
        buffer += data
    return take_frame(buffer, end)


def frame_end(buffer: bytearray, limit: int = MAX_FRAME) -> int | None:
    """Return the length of the first frame with its head; None if the head is incomplete."""
    if len(buffer) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(buffer)
    if length > limit:
        raise SerializationError(f"a frame of {length} bytes exceeds the limit of {limit}")
    return LENGTH.size + int(length)


def take_frame(buffer: bytearray, end: int) -> Any:
    """Remove the first frame from a buffer, and return its value."""
    body = bytes(memoryview(buffer)[LENGTH.size : end])
    del buffer[:end]
    return unpack_frame(body)


def frames_of(part: Part) -> Iterator[bytes]:
    """Yield a part of a snapshot, in as many frames as it needs."""
    try:
        frame = pack(["part", *part])
    except SerializationError:
        if len(part.records) < 2:
            raise
        half = len(part.records) // 2
        for records in (part.records[:half], part.records[half:]):
            yield from frames_of(part._replace(records=records))
    else:
        yield frame


def fitting(sizes: Iterable[int]) -> int:
    """Return how many of these values fit into a frame; the first one always does."""
    return max(1, sum(total <= MAX_BYTES for total in accumulate(sizes)))


def time_for(batches: Sequence[Batch]) -> float:
    """Return the seconds that jobs add to the time of an enqueue."""
    return sum(len(batch.payloads) for batch in batches) / JOBS_PER_SECOND
