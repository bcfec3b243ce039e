"""Event streams that tell open pages when something has changed.

A stream carries no data: pages request changes themselves, with a permission check. All streams of a process
are fed by one thread, which reads the shared board while streams are open. Only servers that can keep
connections open cheaply offer streams.
"""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db import close_old_connections, connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.translation import gettext as _

from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError, StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.threads import start_daemon
from djqueue.dashboard import boards, rights
from djqueue.dashboard.outages import watchdog
from djqueue.dashboard.reading import FRESH_TIME, read_cache
from djqueue.dashboard.site import DashboardSite, Pages

logger = Log("djqueue.dashboard")
pages = Pages()
MAX_STREAMS = 200
"""Maximum open streams of one process."""
HEARTBEAT = 15.0
"""Seconds after which an idle stream sends a comment."""
LIFETIME = 600.0
"""Seconds after which a stream ends. The page then reconnects, and its permission is checked again."""
RECONNECT = 3_000
"""Milliseconds after which a page reconnects."""
RETRY_AFTER = 60
"""Seconds after which a page may retry when the limit is reached."""
READ_LIMIT = 10.0
"""Seconds after which a read that PostgreSQL does not answer ends."""
TEXT = "text/plain; charset=utf-8"


class StreamSubscriber:
    """An open stream, of all queues or of one."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.changed = asyncio.Event()
        self.is_new = True
        """Whether the stream has sent no event yet: the page may be older than the board."""
        self.is_closing = False
        """Whether the process is shutting down."""
        self._loop = asyncio.get_running_loop()

    def notify(self, *, over: bool = False) -> None:
        """Let the stream send an event. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._notify, over)
        except RuntimeError:  # the event loop has ended, and the stream with it
            pass

    def _notify(self, over: bool) -> None:
        self.is_closing = self.is_closing or over
        self.changed.set()


class Watcher:
    """The thread that reads the board once per second while streams are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscribers: set[StreamSubscriber] = set()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether another stream can be opened."""
        return len(self._subscribers) < MAX_STREAMS

    @property
    def subscribers(self) -> int:
        """The number of open streams."""
        return len(self._subscribers)

    @property
    def is_watching(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None

    def join(self, queue: str) -> StreamSubscriber | None:
        """Open a stream; None if the limit is reached."""
        subscriber = StreamSubscriber(queue)
        with self._lock:
            if not self.has_room:
                return None
            if self._thread is None:
                self._thread = start_daemon("djqueue-dashboard", self._run)
            self._subscribers.add(subscriber)
            self._idle.clear()
        return subscriber

    def leave(self, subscriber: StreamSubscriber) -> None:
        """Close a stream."""
        with self._lock:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._idle.set()

    def _run(self) -> None:
        try:
            seen: dict[str, object] = {}
            while self._is_wanted():
                self._idle.wait(FRESH_TIME / 1_000)
                is_closing = is_shutting_down()
                now = queue_states()
                for subscriber in self._all():
                    queue = subscriber.queue
                    if subscriber.is_new or is_closing or now.get(queue) != seen.get(queue):
                        subscriber.is_new = False
                        subscriber.notify(over=is_closing)
                seen = now
        finally:
            connections.close_all()

    def _is_wanted(self) -> bool:
        with self._lock:
            if self._subscribers:
                return True
            self._thread = None
            return False

    def _all(self) -> list[StreamSubscriber]:
        with self._lock:
            return list(self._subscribers)


class EventStream:
    """The bytes of a stream. It holds no database connection."""

    def __init__(self, queue: str = "") -> None:
        self._queue = queue
        self._subscriber: StreamSubscriber | None = None

    def close(self) -> None:
        """Close the stream when the response ends."""
        if self._subscriber is not None:
            watcher.leave(self._subscriber)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            self._subscriber = subscriber = watcher.join(self._queue)
        except StorageUnavailableError as error:
            logger.warning("An open page does not learn of changes until it reconnects: %s", error)
            return
        if subscriber is None:
            return
        try:
            await sync_to_async(_close_connections, thread_sensitive=True)()
            yield b"retry: %d\n\n" % RECONNECT
            async for line in _lines(subscriber):
                yield line
        finally:
            self.close()


watcher = Watcher()
"""The watcher of this process."""


def queue_states() -> dict[str, object]:
    """Return what pages show of each queue, and under "" of everything, without mere changes of time."""
    try:
        with watchdog.within(READ_LIMIT):
            cached = read_cache.read("board", boards.read_board)
    except DjqueueError as error:
        return {"": str(error)}
    except Exception:
        logger.exception("Could not read the state of the queues for the event streams of open pages.")
        return {}
    finally:
        close_old_connections()
    board = cached.value
    states: dict[str, object] = {}
    for line in board.lines:
        # A new minute moves the charts.
        recent = line.buckets[-boards.OPEN_MINUTES :]
        states[line.name] = (line.row._replace(tokens=None), recent, line.workers, cached.error)
    silent = {worker.id for worker in board.workers if board.is_silent(worker)}
    states[""] = (list(states.items()), {worker.id for worker in board.workers}, silent, cached.error)
    return states


def is_shutting_down() -> bool:
    """Return whether uvicorn is shutting down, which it exposes nowhere else."""
    handler = signal.getsignal(signal.SIGTERM)
    return bool(getattr(getattr(handler, "__self__", None), "should_exit", False))


@pages.show("stream", "stream/", rights.VIEW)
def everything(request: HttpRequest, _site: DashboardSite) -> HttpResponseBase:
    """Stream changes of anything."""
    return _stream(request, "")


@pages.show("queue_stream", "stream/<djq:queue>/", rights.VIEW)
def of_queue(request: HttpRequest, _site: DashboardSite, queue: str) -> HttpResponseBase:
    """Stream changes of one queue."""
    return _stream(request, queue)


async def _lines(subscriber: StreamSubscriber) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    end = loop.time() + LIFETIME
    while (left := end - loop.time()) > 0:
        try:
            async with asyncio.timeout(min(HEARTBEAT, left)):
                await subscriber.changed.wait()
        except TimeoutError:
            yield b": heartbeat\n\n"
            continue
        if subscriber.is_closing:
            return
        subscriber.changed.clear()
        yield b"event: changed\ndata: %s\n\n" % (b"queue" if subscriber.queue else b"overview")


def _close_connections() -> None:
    """Close the database connections of the request's thread, which lives as long as the stream."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def _stream(request: HttpRequest, queue: str) -> HttpResponseBase:
    if not get_settings().dashboard.sse:
        return HttpResponse(_("DJQUEUE['DASHBOARD']['SSE'] is off, so pages poll."), TEXT, status=404)
    if not isinstance(request, ASGIRequest):
        text = _("This server uses WSGI, where each stream would occupy a thread, so pages poll.")
        return HttpResponse(text, TEXT, status=501)
    if not watcher.has_room:
        response = HttpResponse(
            _("The limit on open streams has been reached, so pages poll."), TEXT, status=503
        )
        response["Retry-After"] = str(RETRY_AFTER)
        return response
    if request.method == "HEAD":
        return HttpResponse(content_type="text/event-stream")
    stream = StreamingHttpResponse(EventStream(queue), content_type="text/event-stream")
    stream["X-Accel-Buffering"] = "no"
    # Compressing middleware skips responses with an encoding; it would delay the events.
    stream["Content-Encoding"] = "identity"
    return stream
