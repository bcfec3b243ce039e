"""Telling open pages that something has changed, so that they look when there is something to see.

A stream says no more than that: what there is to see comes by a request of its own, with its own rights. All
streams of a process are fed by one watcher, which reads what the pages share, while there are any.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections

from djqueue.core.errors import DjqueueError

from . import queries
from .snapshot import FRESH, snapshots
from .watchdog import watchdog

logger = logging.getLogger("djqueue.dashboard")

MOST = 200
"""Streams that are open at once in one process."""
HEARTBEAT = 15.0
"""Seconds after which a stream that has nothing to say says that it is there."""
LASTS = 600.0
"""Seconds of a stream; then the page opens another, and its right is looked at again."""
AGAIN = 3_000
"""Milliseconds until a page opens another."""
RETRY_AFTER = 60
"""Seconds after which a page that found no room may ask again."""
LOOK = 10.0
"""Seconds after which a look ends whose query PostgreSQL has not answered."""
NOTE_EVERY = 5_000
"""Milliseconds after which numbers that stop at 10,000 count as others: what is above cannot be seen."""


class StreamSubscriber:
    """One open stream: of everything, or of one queue."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.told = asyncio.Event()
        self.is_new = True
        """Whether it has been told nothing yet: what the page shows may be older than what is known."""
        self.is_over = False
        """Whether the process is about to end."""
        self._loop = asyncio.get_running_loop()

    def tell(self, *, over: bool = False) -> None:
        """Have the stream say that something has changed; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._told, over)
        except RuntimeError:  # its loop has ended, and it with it
            pass

    def _told(self, over: bool) -> None:
        self.is_over = self.is_over or over
        self.told.set()


class Watcher:
    """The thread that looks, once a second, for as long as somebody follows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: set[StreamSubscriber] = set()
        self._thread: threading.Thread | None = None
        self._nobody = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether another may follow."""
        return len(self._followers) < MOST

    @property
    def followers(self) -> int:
        """Streams that are open."""
        return len(self._followers)

    @property
    def is_watching(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def join(self, queue: str) -> StreamSubscriber | None:
        """Begin to follow; None: there is no room."""
        follower = StreamSubscriber(queue)
        with self._lock:
            if not self.has_room:
                return None
            self._followers.add(follower)
            self._nobody.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djqueue-dashboard", daemon=True)
                self._thread.start()
        return follower

    def leave(self, follower: StreamSubscriber) -> None:
        """Follow no more."""
        with self._lock:
            self._followers.discard(follower)
            if not self._followers:
                self._nobody.set()

    def _run(self) -> None:
        try:
            seen: dict[str, object] = {}
            while self._is_wanted():
                self._nobody.wait(FRESH / 1_000)
                leaving = is_leaving()
                now = look()
                for follower in self._all():
                    if follower.is_new or leaving or now.get(follower.queue) != seen.get(follower.queue):
                        follower.is_new = False
                        follower.tell(over=leaving)
                seen = now
        finally:
            connections.close_all()

    def _is_wanted(self) -> bool:
        with self._lock:
            if self._followers:
                return True
            self._thread = None
            return False

    def _all(self) -> list[StreamSubscriber]:
        with self._lock:
            return list(self._followers)


watcher = Watcher()
"""That of this process."""


def look() -> dict[str, object]:
    """What pages show of each queue, and (empty name) of everything, but for what only passes with time."""
    try:
        with watchdog.within(LOOK):
            cached = snapshots.read("board", queries._board)
    except DjqueueError as error:
        return {"": str(error)}
    except Exception:
        logger.exception("What the pages share could not be read.")
        return {}
    finally:
        close_old_connections()
    board = cached.value
    common = (cached.error, board.at // NOTE_EVERY if board.capped else 0)
    found: dict[str, object] = {}
    for line in board.lines:
        # A minute that begins moves the charts.
        recent = line.buckets[-queries.RECENT :]
        found[line.name] = (line.row._replace(tokens=None), recent, line.workers, common)
    silent = {worker.id for worker in board.workers if board.is_silent(worker)}
    found[""] = (list(found.items()), {worker.id for worker in board.workers}, silent, common)
    return found


def is_leaving() -> bool:
    """Whether uvicorn has been told to end, and waits for its connections; it says so nowhere else."""
    handler = signal.getsignal(signal.SIGTERM)
    return bool(getattr(getattr(handler, "__self__", None), "should_exit", False))


class EventStream:
    """The bytes of a stream, of everything or of one queue. It holds no connection to a database."""

    def __init__(self, queue: str = "") -> None:
        self._queue = queue
        self._follower: StreamSubscriber | None = None

    def close(self) -> None:
        """The answer is sent, or nobody hears it any more."""
        if self._follower is not None:
            watcher.leave(self._follower)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._follower = follower = watcher.join(self._queue)
        if follower is None:
            return
        try:
            await sync_to_async(_leave_databases, thread_sensitive=True)()
            yield b"retry: %d\n\n" % AGAIN
            async for line in _lines(follower):
                yield line
        finally:
            self.close()


async def _lines(follower: StreamSubscriber) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    end = loop.time() + LASTS
    while (left := end - loop.time()) > 0:
        try:
            async with asyncio.timeout(min(HEARTBEAT, left)):
                await follower.told.wait()
        except TimeoutError:
            yield b": still there\n\n"
            continue
        if follower.is_over:
            return
        follower.told.clear()
        yield b"event: changed\ndata: %s\n\n" % (b"queue" if follower.queue else b"overview")


def _leave_databases() -> None:
    """The connections of the request's own thread, which lives as long as the stream."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()
