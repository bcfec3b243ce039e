"""The kombu transport `djqueue://`."""

import threading
from collections.abc import Iterable
from typing import Any

from kombu.transport import virtual

from djqueue._version import __version__
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError, StorageUnavailableError

from .broker import broker_for
from .channel import CLAIMED_AT_ONCE, MessageChannel
from .locating import location, storage_at
from .waking import Waker

LOOK = 1.0
"""Seconds between two checks in an event loop whether it is time to look."""


class Transport(virtual.Transport):
    """The transport: `djqueue://` for the storage of the project, `djqueue://host:port/0` for a Redis."""

    Channel = MessageChannel
    polling_interval = None
    default_port = None
    driver_type = "djqueue"
    driver_name = "djqueue"

    connection_errors = (*virtual.Transport.connection_errors, StorageUnavailableError, ConnectionError)
    channel_errors = (*virtual.Transport.channel_errors, OptionError)

    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        where = location(
            client.hostname,
            client.port,
            client.userid,
            client.password,
            client.virtual_host,
            {**client.transport_options, "ssl": client.ssl or client.transport_options.get("ssl")},
        )
        self.broker = broker_for(storage_at(where))
        self._woken = threading.Event()
        self._turn = 0
        self._waker: Waker | None = None
        """Wakes the event loop of kombu that delivers the messages, if there is one."""

    def establish_connection(self) -> Any:
        # This fails now if the storage is unavailable: kombu retries, and tries other brokers.
        self.broker.check()
        return super().establish_connection()

    def driver_version(self) -> str:
        return __version__

    def verify_connection(self, connection: Any) -> bool:
        return True

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        return uri

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {}

    def consume(self) -> None:
        """Keep the leases of the messages of this connection alive."""
        self.broker.consume(self)

    def wake(self) -> None:
        """End the wait for messages. May be called from any thread."""
        self._woken.set()
        waker = self._waker
        if waker is not None:
            waker.wake()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver messages from kombu's event loop instead of `drain_events`."""
        if self._waker is not None:
            self._waker.close()
        self._waker = Waker(loop, self._on_woken)
        loop.call_repeatedly(LOOK, self._look)
        self.wake()

    def _look(self) -> None:
        """Wake the event loop if it is time to look for messages without a wake-up."""
        now = SYSTEM_CLOCK.monotonic()
        if any(at <= now for at in self._look_times()):
            self.wake()

    def _on_woken(self) -> None:
        for _ in range(CLAIMED_AT_ONCE):
            if not self._deliver_next():
                return
        # Other readers of the event loop get their turn before the next messages.
        self.wake()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises TimeoutError if there is none within `timeout` seconds."""
        began = SYSTEM_CLOCK.monotonic()
        while True:
            # Before the look, so that a message that arrives meanwhile ends the wait.
            self._woken.clear()
            if self._deliver_next():
                return
            now = SYSTEM_CLOCK.monotonic()
            waits: list[float] = [at - now for at in self._look_times()]
            if timeout is not None:
                left = began + timeout * 1_000 - now
                if left <= 0:
                    raise TimeoutError
                waits.append(left)
            self._woken.wait(max(0.0, min(waits)) / 1_000 if waits else None)

    def _deliver_next(self) -> bool:
        channels = [channel for channel in self.channels if channel is not None]
        # Every channel gets its turn, however many messages another one has.
        self._turn += 1
        for at in range(len(channels)):
            channel = channels[(self._turn + at) % len(channels)]
            found = channel.next_message()
            if found is not None:
                queue, raw = found
                self._deliver(raw, queue)
                return True
        return False

    def _look_times(self) -> Iterable[int]:
        return (at for channel in self.channels if (at := channel.look_at) is not None)

    @property
    def is_consuming(self) -> bool:
        """Whether a channel has a consumer."""
        return any(channel.is_consuming for channel in tuple(self.channels))

    def expiring_queues(self) -> dict[str, int]:
        """Return the queues that are consumed and would expire, with their expiry in milliseconds."""
        return {
            queue: expires
            for channel in tuple(self.channels)
            for queue, expires in channel.expiring_queues().items()
        }

    def lasting_queues(self) -> list[str]:
        """Return the queues that are consumed and do not expire."""
        return [queue for channel in tuple(self.channels) for queue in channel.lasting_queues()]

    def declare_again(self, queue: str) -> None:
        """Declare a queue that expired while this process did not run."""
        for channel in tuple(self.channels):
            if queue in channel.expiring_queues():
                channel.declare_again(queue)
                return

    def close_connection(self, connection: Any) -> None:
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()
        try:
            super().close_connection(connection)
        finally:
            self.broker.leave(self)
