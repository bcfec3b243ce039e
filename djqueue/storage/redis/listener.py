"""Subscriptions to published messages."""

import threading
from collections.abc import Callable

from djqueue.core.deadlines import remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.threads import after_fork

from .connections import Connections
from .reader import Channel, PubSubReader, Subscriber

CLOSE_TIMEOUT = 10.0
"""Seconds that closing waits for the thread, which may be connecting."""


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
