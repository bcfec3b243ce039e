"""The link between a worker and the process of a job: a socket with length-prefixed messages of plain values.

A worker trusts nothing in a message from a job: a frame is bounded, contains only numbers, text, bytes and
lists, and is about the job that the worker has given to that process. The worker's end of the socket reads
only whole messages, and no more of them at once than is fair.
"""

import asyncio
import errno
import socket
import struct
from collections.abc import Iterator
from typing import Any, Protocol

import msgpack

from djqueue.core.options import MSGPACK

JOB, CHILDREN, ADDRESSES, ENQUEUED = 1, 2, 3, 4
"""To a job's process: the next job, and the records, the addresses or the results that it asked for."""
RESULT, PROGRESS, LOG, ITEM, READ, RESOLVE, ENQUEUE = 11, 12, 13, 14, 15, 16, 17
"""From a job's process: the outcome, what `JobContext` offers, host names, and jobs to enqueue."""
LENGTH = struct.Struct(">I")
SMALL = 64 * 1024
"""Bytes of a frame beside the value that it contains."""
HELLO = b"\x00"
"""First byte that a process sends. The kernel adds the process's id to it."""
BEGIN = b"\x01"
"""Byte behind a job, which the process reads when it begins the job. A process that ends before that leaves
it unread, and the kernel reports this to the worker as ECONNRESET. So the start of a job costs the worker no
message."""
CHUNK = 256 * 1024
"""Bytes that are read at once."""
CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid, as the kernel adds them to a message (unix(7), SCM_CREDENTIALS)."""
MAX_MESSAGES = 1_000
"""Maximum of messages that are read from a process per tick; the rest waits in its socket."""
MAX_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a process's messages and of its output that are read at once."""
SAFE_CONTENT = frozenset({MSGPACK, "application/json"})
"""Content types whose payloads and results cannot run code in the process that reads them."""


class FrameError(Exception):
    """A process sent something that is not a message."""


def pack(*message: Any) -> bytes:
    """Return the frame of a message: its kind and its values."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


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


def checked(value: Any, kind: type) -> Any:
    """Return a value of exactly this type. Raises FrameError for any other."""
    if type(value) is not kind:
        raise FrameError(f"it sent a value of type {type(value).__name__}, not {kind.__name__}")
    return value


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


class LinkOwner(Protocol):
    """Receives what comes over a link."""

    def on_hello(self, pid: int) -> None:
        """Take the id of the process, when it is ready; 0 if it has ended before."""

    def on_message(self, kind: int, *values: Any) -> None:
        """Take a message. Whatever it raises ends the process."""

    def on_violation(self, error: Exception) -> None:
        """Learn that the process sent what it must not send. Nothing more is read."""

    def on_link_end(self) -> None:
        """Learn that the process has closed its end."""


class ProcessLink:
    """The socket to a process. All methods are called on the worker's loop.

    limit: Maximum bytes of a message.
    """

    def __init__(self, opened: socket.socket, limit: int, owner: LinkOwner) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = opened
        self._owner = owner
        self._frames = FrameReader(limit)
        self._unsent = bytearray()
        self._messages = 0
        """Messages read since the last tick."""
        self._received = 0
        """Bytes read since the last tick."""
        self._is_reading = False
        self._is_held = False
        self._is_at_end = False
        self._is_broken = False
        self.left_unread = False
        """Whether the process ended before it had read everything that was sent to it."""
        self._loop.add_reader(opened.fileno(), self._read_hello)

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message is waiting for its rest."""
        return self._frames.is_empty

    @property
    def has_unsent(self) -> bool:
        """Whether the process does not read what it has been sent."""
        return bool(self._unsent)

    def open(self) -> None:
        """Begin to read messages, after the hello."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        self._is_reading = True
        self._loop.add_reader(self._socket.fileno(), self._read)

    def send(self, data: bytes) -> None:
        """Send bytes; what the socket does not take now follows later."""
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                # The process is ending, which its descriptor reports next.
                self.left_unread = True
                return
        if data:
            self._unsent += data
            self._loop.add_writer(self._socket.fileno(), self._send_rest)

    def tick(self) -> None:
        """Read on if the process has sent too much before."""
        self._messages = self._received = 0
        self._read_on()

    def hold(self) -> None:
        """Read nothing more until `release`."""
        self._is_held = True
        self._pause()

    def release(self) -> None:
        """Read on after `hold`."""
        self._is_held = False
        self._read_on()

    def read_rest(self) -> None:
        """Take the messages that a process sent before it ended by itself."""
        left = MAX_BYTES
        while left > 0 and not self._is_broken:
            data = self._received_now()
            if not data:
                break
            left -= len(data)
            self._frames.feed(data)
            self._take_all()
        self._take_all()
        self._pause()

    def close(self) -> None:
        """Close the socket."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _read_hello(self) -> None:
        try:
            data, extra, _, _ = self._socket.recvmsg(len(HELLO), socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        pid = 0
        for level, kind, value in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, _, _ = CREDENTIALS.unpack(value[: CREDENTIALS.size])
        self._owner.on_hello(pid if data == HELLO else 0)

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.left_unread = True
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _received_now(self) -> bytes | None:
        """Return the next bytes; None if there are none now, and nothing if there will be no more."""
        try:
            return self._socket.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            self.left_unread |= error.errno == errno.ECONNRESET
            return b""

    def _read(self) -> None:
        data = self._received_now()
        if data is None:
            return
        if not data:
            self._pause()
            self._is_at_end = True
            self._owner.on_link_end()
            return
        self._frames.feed(data)
        self._received += len(data)
        self._take_frames()

    def _take_frames(self) -> None:
        try:
            for message in self._frames:
                self._owner.on_message(*message)
                self._messages += 1
                if self._is_held or self._messages >= MAX_MESSAGES:
                    self._pause()
                    return
            if self._received >= MAX_BYTES:
                self._pause()
        except Exception as error:
            # Whatever the process has sent, it must not disturb the worker.
            self._is_broken = True
            self._pause()
            self._owner.on_violation(error)

    def _take_all(self) -> None:
        """Take all frames that have arrived, however many: there will be no later tick."""
        before = -1
        while not self._is_broken and self._messages != before:
            self._is_held = False
            before = self._messages = 0
            self._take_frames()

    def _pause(self) -> None:
        if self._is_reading and self._socket.fileno() >= 0:
            self._is_reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _read_on(self) -> None:
        if self._is_reading or self._is_held or self._is_at_end or self._is_broken:
            return
        if self._socket.fileno() < 0:
            return
        self._is_reading = True
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._take_frames()
