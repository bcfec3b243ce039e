"""Messages between a worker and the processes of its jobs: length-prefixed MessagePack of plain values.

A worker trusts nothing in a message from a job: a frame is bounded, contains only numbers, text, bytes and
lists, and is about the job that the worker has given to that process.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

JOB, CHILDREN, ADDRESSES, ENQUEUED = 1, 2, 3, 4
"""To a job's process: the next job, and the records, the addresses or the results that it asked for."""
RESULT, PROGRESS, LOG, ITEM, READ, RESOLVE, ENQUEUE = 11, 12, 13, 14, 15, 16, 17
"""From a job's process: the outcome, what `JobContext` offers, host names, and jobs to enqueue."""
LENGTH = struct.Struct(">I")
SMALL = 64 * 1024
"""Bytes of a frame beside the value that it contains."""


class FrameError(Exception):
    """A process sent something that is not a message."""


def pack(*message: Any) -> bytes:
    """Return the frame of a message: its kind and its values."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a stream into messages.

    limit: Maximum bytes of one frame.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message is waiting for its rest."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self._buffer += data

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the complete messages. Raises FrameError."""
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > self._limit:
                raise FrameError(f"a message of {length:,} bytes exceeds the limit of {self._limit:,}")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield unpack(body)


def unpack(body: bytes) -> list[Any]:
    """Return the kind and the values of a message. Raises FrameError."""
    try:
        message = msgpack.unpackb(
            body, strict_map_key=True, unicode_errors="surrogatepass", max_ext_len=0, max_map_len=0
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], int):
        raise FrameError("not a message: it has no kind")
    return message
