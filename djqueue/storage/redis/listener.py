"""Being told what the server publishes."""

import threading
from collections.abc import Callable

from djqueue.core.deadline import remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.forks import after_fork

from .connections import Connections
from .reader import Channel, PubSubReader, Subscriber

CLOSE_TIMEOUT = 10.0
"""Seconds that closing waits for the thread, which may be connecting."""


class Listener:
    """One subscribing connection (a cluster: one for each node that is needed) and the thread that reads it.

    The thread begins with the first `add` and ends with the last removal. What callbacks raise is logged.
    A forked child begins with no subscriptions, and so with no thread.
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
        """Have messages of a channel given to `callback`, on the listener's thread, from now on; returns
        what ends that. May be called from anywhere, callbacks included.

        on_reconnect: called on that thread when messages may have been missed and will be no more.
        Raises StorageUnavailableError if the server does not confirm the subscription in time.
        """
        name = channel.encode()
        subscriber = Subscriber(callback, on_reconnect)
        reader = self._wish(name, subscriber)

        def remove() -> None:
            with self._lock:
                subscriber.gone = True
                wished = reader.channels.get(name)
                if wished is None or subscriber not in wished.subscribers:
                    return
                wished.subscribers.remove(subscriber)
                if not wished.subscribers:
                    del reader.channels[name]
            reader.ring()

        try:
            reader.wait_for(subscriber, remaining(self._connections.timeout))
        except BaseException:
            remove()
            raise
        if not subscriber.is_told:
            remove()
            where, why = self._connections.describe(), subscriber.refusal or reader.trouble or "no answer"
            raise StorageUnavailableError(f"{where}: subscribing failed: {why}")
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
        reader.ring()
        reader.join(CLOSE_TIMEOUT)

    def _wish(self, name: bytes, subscriber: Subscriber) -> PubSubReader:
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
        reader.ring()
        return reader

    def _forget(self) -> None:
        """In a forked child: thread and connections are the parent's."""
        reader = self._reader
        self._begin()
        if reader is not None:
            reader.hang_up()
