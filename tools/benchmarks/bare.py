"""What the machine's Redis does at best: a script of a few lines, and calls on a bare socket."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from threading import Thread
from typing import Any, Self

import hiredis

from tests.servers import RedisServer

IN_FLIGHT = 2
"""Calls that are sent before the answer to the first is awaited."""
SCRIPTS = {b"EVAL", b"EVALSHA", b"FCALL"}


class RecordingProxy:
    """Passes bytes between clients and a Redis, and keeps the requests; `with` starts and ends it."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._sent: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._sockets):
            end.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def requests(self) -> list[bytes]:
        """Return the calls of scripts, in order, one connection after the other."""
        return [call for sent in self._sent for call, name in calls(bytes(sent)) if name in SCRIPTS]

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # the proxy ends
                return
            server = socket.create_connection(self._server.address)
            self._sockets += [client, server]
            self._sent.append(bytearray())
            self._start(self._pass, client, server, self._sent[-1])
            self._start(self._pass, server, client, bytearray())

    def _pass(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):  # either end has gone
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)


def calls(sent: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each request, as it was sent, and the name of its command."""
    place = 0
    while place < len(sent):
        start = place
        end = sent.index(b"\r\n", place)
        count, place = int(sent[place + 1 : end]), end + 2
        name = b""
        for number in range(count):
            end = sent.index(b"\r\n", place)
            size, place = int(sent[place + 1 : end]), end + 2
            if number == 0:
                name = sent[place : place + size].upper()
            place += size + 2
        yield sent[start:place], name


def replay(server: RedisServer, requests: list[bytes]) -> float:
    """Send the requests again, two in flight, and return the seconds until the last answer."""
    reader = hiredis.Reader()
    with socket.create_connection(server.address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def receive() -> None:
            while (answer := reader.gets()) is False:
                reader.feed(connection.recv(1 << 16))
            if isinstance(answer, Exception):
                raise RuntimeError(f"a recorded call failed: {answer}")

        start = time.perf_counter()
        remaining = iter(requests)
        waiting = 0
        for request in islice(remaining, IN_FLIGHT):
            connection.sendall(request)
            waiting += 1
        while waiting:
            receive()
            if request := next(remaining, b""):
                connection.sendall(request)
            else:
                waiting -= 1
        return time.perf_counter() - start


def bare_drain(client: Any, slots: int, jobs: int) -> float:
    """Jobs a second that one loop moves, each call ending `slots` jobs and claiming as many."""
    script = client.register_script(BARE)
    blob = b"x" * 160
    for first in range(0, jobs, 1_000):
        ids = [b"%036d" % n for n in range(first, min(first + 1_000, jobs))]
        client.hset("bare:jobs", mapping=dict.fromkeys(ids, blob))
        client.rpush("bare:waiting", *ids)
    done: list[Any] = []
    moved = 0
    start = time.perf_counter()
    while moved < jobs:
        found = script(
            keys=["bare:waiting", "bare:jobs", "bare:leases", *[b"bare:r:" + job_id for job_id in done]],
            args=[slots, *done],
        )
        done = found[::2]
        moved += len(done)
    rate = jobs / (time.perf_counter() - start)
    client.flushdb()
    return rate


BARE = """
local ended = {unpack(ARGV, 2)}
for i = 1, #ended do redis.call('SET', KEYS[3 + i], 'ok', 'PX', '3600000') end
if #ended > 0 then redis.call('ZREM', KEYS[3], unpack(ended)) redis.call('HDEL', KEYS[2], unpack(ended)) end
local ids = redis.call('LPOP', KEYS[1], ARGV[1]) or {}
local found, leases = {}, {}
if #ids > 0 then
  local blobs = redis.call('HMGET', KEYS[2], unpack(ids))
  for i = 1, #ids do
    found[2 * i - 1], found[2 * i] = ids[i], blobs[i]
    leases[2 * i - 1], leases[2 * i] = '1800000000000', ids[i]
  end
  redis.call('ZADD', KEYS[3], unpack(leases))
end
return found
"""


def percentile(values: list[float], share: int) -> float:
    """The value below which so many percent lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]
