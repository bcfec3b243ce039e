"""Subscriptions to published messages: connections, and the thread that reads them.

Only this thread uses the connections, since two threads can't share an encrypted one. Other threads change
the wanted channels and wake it up; it then brings its subscriptions in line. After a lost connection it
does the same, so that there is only one way to subscribe.
"""

import logging
import selectors
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from math import inf
from time import monotonic, sleep
from typing import Any, Literal, NamedTuple

import redis
from redis.exceptions import (
    ClusterDownError,
    MovedError,
    RedisClusterException,
    SlotNotCoveredError,
    TryAgainError,
)

from djqueue.core.deadlines import GrowingPause, remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.threads import after_fork, resources_for, start_daemon

from .client import Address, Connection
from .connections import Connections
from .retries import is_refused, with_remedy

PING_AFTER = 10.0
"""Seconds of silence before a ping, and for its reply."""
AT_ONCE = 1_000
"""Replies that are read at a time."""
logger = Log("djqueue.redis")
FIRST_WAIT, LAST_WAIT = 0.05, 2.0
"""Seconds between attempts: the first wait, which doubles, and the longest."""
FAILURES = (redis.RedisError, RedisClusterException, StorageUnavailableError, OSError)
"""Exceptions of a connection that fails."""
PASSING = (MovedError, ClusterDownError, TryAgainError)
"""Temporary errors of a node."""
CLOSE_TIMEOUT = 10.0
"""Seconds that closing waits for the thread, which may be connecting."""


class News(NamedTuple):
    """A message of the server about a channel."""

    what: Literal["message", "subscribed", "lost", "refused"]
    """`lost`: the server ended the subscription, because another node has the slot now."""
    channel: bytes
    detail: Any = None
    """The message, or the error."""


class PubSubConnection:
    """A connection that one thread writes to and reads from."""

    def __init__(self, connection: Connection, *, sharded: bool) -> None:
        self._connection: Any = connection
        self._prefix = "S" if sharded else ""
        self.channels: set[bytes] = set()
        """Channels that are subscribed to."""
        self._asked: deque[tuple[bytes, bytes]] = deque()
        """(SUBSCRIBE or UNSUBSCRIBE, channel) of requests without a reply."""
        self._heard_at = monotonic()
        self._pinged_at = 0.0
        """When a ping was sent that has no reply yet; 0: none."""
        self.has_more = False
        """True if there is something to read even if the socket is empty."""

    def open(self) -> None:
        """Connect. Raises a RedisError."""
        self._connection.connect()
        self._heard_at = monotonic()

    def close(self) -> None:
        """Disconnect. In a forked child, the parent's connection stays open."""
        self._connection.disconnect()

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        number: int = self._connection._sock.fileno()
        return number

    def subscribe(self, channels: Collection[bytes]) -> None:
        """Subscribe to channels. Raises a RedisError."""
        self.channels.update(channels)
        self._send(b"SUBSCRIBE", channels)

    def unsubscribe(self, channels: Collection[bytes]) -> None:
        """Unsubscribe from channels. Raises a RedisError."""
        self.channels.difference_update(channels)
        self._send(b"UNSUBSCRIBE", channels)

    def _send(self, operation: bytes, channels: Collection[bytes]) -> None:
        # One command for each: in a cluster, a command may not name channels of two slots.
        command = self._prefix + operation.decode()
        commands = [(command, channel) for channel in channels]
        self._asked.extend((operation, channel) for channel in channels)
        self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)

    @property
    def due(self) -> float:
        """Return when `check` has to be called."""
        return (self._pinged_at or self._heard_at) + PING_AFTER

    def check(self) -> None:
        """Check that the server still replies. Raises a RedisError."""
        if monotonic() < self.due:
            return
        if self._pinged_at:
            raise redis.TimeoutError(f"the server has been silent for {2 * PING_AFTER:g} s")
        self._pinged_at = monotonic()
        self._connection.send_command("PING", check_health=False)

    def read(self) -> Iterator[News]:
        """Yield the messages that have arrived. Raises a RedisError."""
        for _ in range(AT_ONCE):
            self.has_more = self._connection.can_read(0)
            if not self.has_more:
                return
            try:
                reply = self._connection.read_response()
            except redis.ResponseError as error:
                news = self._refused(error)
            else:
                news = self._message(reply)
            self._heard_at, self._pinged_at = monotonic(), 0.0
            if news is not None:
                yield news

    def _refused(self, error: redis.ResponseError) -> News | None:
        if not self._asked:
            raise error
        operation, channel = self._asked.popleft()
        if operation == b"UNSUBSCRIBE":
            return None
        self.channels.discard(channel)
        return News("refused", channel, error)

    def _message(self, reply: Any) -> News | None:
        if not isinstance(reply, list) or len(reply) != 3:
            return None  # the reply to a ping
        kind, channel, detail = reply
        if kind in (b"message", b"smessage"):
            return News("message", channel, detail)
        operation = kind.removeprefix(b"s").upper() if self._prefix else kind.upper()
        if self._asked and self._asked[0] == (operation, channel):
            self._asked.popleft()
        elif operation == b"UNSUBSCRIBE":
            self.channels.discard(channel)
            return News("lost", channel)
        if operation == b"UNSUBSCRIBE" or any(asked == channel for _, asked in self._asked):
            return None  # otherwise a later reply decides
        return News("subscribed", channel)


class Subscriber:
    """A subscriber of a channel."""

    def __init__(self, callback: Callable[[bytes], None], on_reconnect: Callable[[], None] | None) -> None:
        self.callback = callback
        self.on_reconnect = on_reconnect
        self.settled = threading.Event()
        """Set when the server has confirmed or refused the subscription."""
        self.refusal = ""
        """Why the subscription was refused."""
        self.gone = False
        """True if the subscription has ended."""

    @property
    def is_confirmed(self) -> bool:
        """True if the server has confirmed the subscription."""
        return self.settled.is_set() and not self.refusal

    def settle(self, refusal: str = "") -> None:
        """Record the result of subscribing, once."""
        if not self.settled.is_set():
            self.refusal = refusal
            self.settled.set()


class ReconnectPause(GrowingPause):
    """When a failed connection is tried again."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        super().__init__(FIRST_WAIT, LAST_WAIT)
        self.at = 0.0
        """Monotonic seconds before which it is not tried again."""

    def failed(self) -> float:
        """Wait longer than the last time."""
        self.at = monotonic() + super().failed()
        return self.length

    def succeeded(self) -> None:
        """Let the next attempt begin at once."""
        super().succeeded()
        self.at = 0.0


class Channel:
    """A wanted channel. Only the thread uses more than its name and subscribers."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.subscribers: list[Subscriber] = []
        self.link: PubSubConnection | None = None
        """The connection on which it is subscribed."""
        self.confirmed = False
        self.was_confirmed = False
        """True if it was confirmed before, so that messages may have been missed since."""
        self.home: Address | None = None
        """The node of a cluster to which another one has redirected."""
        self.retry = ReconnectPause()


class PubSubReader:
    """The thread and its connections. It ends when no channel is wanted any more."""

    def __init__(self, connections: Connections, lock: threading.Lock) -> None:
        self.channels: dict[bytes, Channel] = {}
        """Wanted channels by name; changed only with the lock held."""
        self.over = False
        """True if the thread no longer reads `channels`; set with the lock held."""
        self.trouble = ""
        """The last failure."""
        self._is_refused = False
        """True if nothing listens at the only server's address: new subscriptions fail at once."""
        self._connections = connections
        self._lock = lock
        self._links: dict[Address | None, PubSubConnection] = {}
        """Connections by cluster node; without a cluster, the only one."""
        self._retries: defaultdict[Address | None, ReconnectPause] = defaultdict(ReconnectPause)
        """Backoff by unreachable server; in a cluster, None is the lookup of slots."""
        self._next_try = inf
        self._astray = False
        """True if the client's table of the cluster's slots may be outdated."""
        self._inbox: deque[tuple[list[Subscriber], bytes | None]] = deque()
        """Subscribers and messages to deliver; None: messages may have been missed."""
        self._waker, self._wake_event = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_event.setblocking(False)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. A channel must be wanted already."""
        try:
            self._thread = start_daemon("djqueue-redis-listener", self._run)
        except BaseException:
            self.disconnect()
            raise

    def wake(self) -> None:
        """Let the thread check the wanted channels."""
        try:
            self._waker.send(b"!")
        except OSError:  # the last wake-up is still pending, or the thread has ended
            pass

    def wait_for(self, subscriber: Subscriber, timeout: float) -> None:
        """Wait until the server has confirmed or refused a subscription, or the time is over."""
        if threading.current_thread() is not self._thread:
            subscriber.settled.wait(timeout)
            return
        # In a callback, this thread has to read the reply; messages that arrive meanwhile are kept.
        until = monotonic() + timeout
        while not subscriber.settled.is_set() and monotonic() < until:
            self._subscribe()
            self._read(until)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, unless called on it."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def disconnect(self) -> None:
        """Close all sockets; in a forked child, its copies of them."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._waker.close()
        self._wake_event.close()

    def _run(self) -> None:
        self._thread = threading.current_thread()  # before a callback asks which thread this is
        try:
            while self._is_wanted():
                try:
                    self._subscribe()
                    self._read()
                    self._deliver()
                except Exception as error:
                    logger.exception("The Redis listener failed; reconnecting.")
                    for address in list(self._links):
                        self._lose(address, error)
                    sleep(FIRST_WAIT)
        finally:
            with self._lock:
                self.over = True
            self.disconnect()

    def _is_wanted(self) -> bool:
        with self._lock:
            self.over = not self.channels
            return not self.over

    # Subscribing.

    def _subscribe(self) -> None:
        """Bring the subscriptions in line with the wanted channels."""
        with self._lock:
            wanted = dict(self.channels)
        for address, link in list(self._links.items()):
            self._give_back(address, link, wanted)
        self._next_try = inf
        by_address: defaultdict[Address | None, list[Channel]] = defaultdict(list)
        for channel in wanted.values():
            if channel.link is not None or not self._may_try(channel.retry, self._retries[None]):
                continue
            try:
                by_address[self._home(channel)].append(channel)
            except SlotNotCoveredError:
                channel.retry.failed()
                self._astray = True
            except FAILURES as error:
                self._failed(None, error)
        for address, channels in by_address.items():
            self._ask(address, channels)

    def _give_back(
        self, address: Address | None, link: PubSubConnection, wanted: dict[bytes, Channel]
    ) -> None:
        gone = [name for name in link.channels if name not in wanted or wanted[name].link is not link]
        if len(gone) == len(link.channels) and self._connections.is_cluster:
            del self._links[address]
            link.close()
        elif gone:
            try:
                link.unsubscribe(gone)
            except FAILURES as error:
                self._lose(address, error)

    def _home(self, channel: Channel) -> Address | None:
        """Return the node that has a channel's slot. Raises one of FAILURES."""
        if not self._connections.is_cluster or channel.home is not None:
            return channel.home
        client: Any = self._connections.sync()
        if self._astray:
            client.nodes_manager.initialize()
            self._astray = False
        node = client.get_node_from_key(channel.name)
        return node.host, int(node.port)

    def _ask(self, address: Address | None, channels: list[Channel]) -> None:
        link = self._links.get(address) or self._open(address)
        if link is None:
            for channel in channels:
                channel.home = None
                if self._is_refused:
                    for subscriber in channel.subscribers:
                        subscriber.settle(refusal=self.trouble)
            return
        try:
            link.subscribe([channel.name for channel in channels])
        except FAILURES as error:
            self._lose(address, error)
            return
        for channel in channels:
            channel.link = link

    def _open(self, address: Address | None) -> PubSubConnection | None:
        if not self._may_try(self._retries[address]):
            return None
        try:
            link = PubSubConnection(
                self._connections.dedicated(address), sharded=self._connections.is_cluster
            )
            link.open()
        except FAILURES as error:
            self._astray = True
            self._failed(address, error)
            return None
        self._links[address] = link
        return link

    def _lose(self, address: Address | None, error: Exception) -> None:
        """Drop a connection; its channels are subscribed to again."""
        link = self._links.pop(address)
        link.close()
        with self._lock:
            for channel in self.channels.values():
                if channel.link is link:
                    channel.link = channel.home = None
                    channel.confirmed = False
        self._astray = True
        self._failed(address, error)

    def _failed(self, address: Address | None, error: BaseException) -> None:
        retry = self._retries[address]
        if isinstance(error, StorageUnavailableError):
            error = error.__cause__ or error  # the outer error does not say where
        self.trouble = with_remedy(error)
        self._is_refused = self._connections.is_single and is_refused(error)
        self._log(retry)
        retry.failed()
        self._next_try = min(self._next_try, retry.at)

    def _log(self, retry: ReconnectPause) -> None:
        """Log the last failure; further ones of the same connection or channel only for debugging."""
        level = logging.DEBUG if retry.failures else logging.WARNING
        logger.log(level, "%s: could not subscribe: %s", self._connections.describe(), self.trouble)

    def _may_try(self, *retries: ReconnectPause) -> bool:
        at = max(retry.at for retry in retries)
        if at <= monotonic():
            return True
        self._next_try = min(self._next_try, at)
        return False

    # Reading.

    def _read(self, until: float = inf) -> None:
        """Wait for messages or tasks, and read the messages."""
        links = list(self._links.items())
        until = min(until, self._next_try, *(link.due for _, link in links))
        if any(link.has_more for _, link in links):
            until = 0
        with selectors.PollSelector() as selector:
            selector.register(self._wake_event, selectors.EVENT_READ)
            for _, link in links:
                selector.register(link, selectors.EVENT_READ)
            selector.select(None if until == inf else max(0.0, until - monotonic()))
        self._drain_wake_ups()
        for address, link in links:
            try:
                for news in link.read():
                    self._process(address, link, news)
                link.check()
            except FAILURES as error:
                self._lose(address, error)

    def _drain_wake_ups(self) -> None:
        try:
            while self._wake_event.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _process(self, address: Address | None, link: PubSubConnection, news: News) -> None:
        with self._lock:
            channel = self.channels.get(news.channel)
            if channel is None or channel.link is not link:
                return  # it is no longer wanted, or subscribed to again
            if news.what == "message":
                subscribers = [subscriber for subscriber in channel.subscribers if subscriber.is_confirmed]
                self._inbox.append((subscribers, news.detail))
            elif news.what == "subscribed":
                self._confirmed(address, channel)
            else:
                channel.link = None
                channel.confirmed = False
                if news.what == "refused":
                    self._refused(address, channel, news.detail)

    def _confirmed(self, address: Address | None, channel: Channel) -> None:
        if channel.was_confirmed:
            subscribers = [subscriber for subscriber in channel.subscribers if subscriber.is_confirmed]
            self._inbox.append((subscribers, None))
        channel.confirmed = channel.was_confirmed = True
        channel.retry.succeeded()
        self._retries.pop(address, None)
        for subscriber in channel.subscribers:
            subscriber.settle()

    def _refused(self, address: Address | None, channel: Channel, error: redis.ResponseError) -> None:
        self.trouble = with_remedy(error)
        if not isinstance(error, PASSING):
            self._log(channel.retry)
        channel.retry.failed()
        if isinstance(error, MovedError):
            assert address is not None
            channel.home = (error.host or address[0], error.port)
        elif not isinstance(error, PASSING):
            for subscriber in channel.subscribers:
                subscriber.settle(refusal=self.trouble)

    def _deliver(self) -> None:
        """Call the subscribers of received messages."""
        while self._inbox:
            subscribers, message = self._inbox.popleft()
            for subscriber in subscribers:
                if subscriber.gone:
                    continue
                try:
                    if message is not None:
                        subscriber.callback(message)
                    elif subscriber.on_reconnect is not None:
                        subscriber.on_reconnect()
                except Exception:
                    logger.exception(
                        "A subscriber raised an exception; the other subscribers are not affected."
                    )


class Listener:
    """A subscribing connection (in a cluster, one for each node needed) and the thread that reads it.

    The thread starts with the first subscription and ends with the last one. Exceptions of callbacks are
    logged. A forked child starts without subscriptions, and so without a thread.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._begin()
        after_fork(self._forget)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._reader: PubSubReader | None = None

    def add(
        self, channel: str, callback: Callable[[bytes], None], on_reconnect: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        """Subscribe to a channel, and return the function that ends the subscription.

        `callback` is called with each message on the listener's thread. May be called from anywhere,
        including callbacks.

        on_reconnect: called on that thread after a reconnect, when messages may have been missed.
        Raises StorageUnavailableError if the server does not confirm the subscription in time.
        """
        name = channel.encode()
        subscriber = Subscriber(callback, on_reconnect)
        reader = self._want(name, subscriber)

        def remove() -> None:
            with self._lock:
                subscriber.gone = True
                wanted = reader.channels.get(name)
                if wanted is None or subscriber not in wanted.subscribers:
                    return
                wanted.subscribers.remove(subscriber)
                if not wanted.subscribers:
                    del reader.channels[name]
            reader.wake()

        try:
            reader.wait_for(subscriber, remaining(self._connections.timeout))
        except BaseException:
            remove()
            raise
        if not subscriber.is_confirmed:
            remove()
            where, why = self._connections.describe(), subscriber.refusal or reader.trouble or "no answer"
            raise StorageUnavailableError(f"{where}: could not subscribe: {why}")
        return remove

    def close(self) -> None:
        """End all subscriptions."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is None:
                return
            for channel in reader.channels.values():
                for subscriber in channel.subscribers:
                    subscriber.gone = True
                    subscriber.settle(refusal="the listener has been closed")
            reader.channels.clear()
        reader.wake()
        reader.join(CLOSE_TIMEOUT)

    def _want(self, name: bytes, subscriber: Subscriber) -> PubSubReader:
        with self._lock:
            reader = self._reader
            if reader is None or reader.over:
                with resources_for("the thread that reads messages of Redis"):
                    reader = PubSubReader(self._connections, self._lock)
                    reader.channels[name] = Channel(name)
                    reader.start()
                self._reader = reader
            channel = reader.channels.setdefault(name, Channel(name))
            channel.subscribers.append(subscriber)
            if channel.confirmed:
                subscriber.settle()
        reader.wake()
        return reader

    def _forget(self) -> None:
        """Drop the parent's thread and connections in a forked child."""
        reader = self._reader
        self._begin()
        if reader is not None:
            reader.disconnect()
