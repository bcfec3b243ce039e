"""The kombu transport `djqueue://` and its channels, which publish, route and consume messages.

A message is a job: publishing enqueues it, a consumer claims it, and its acknowledgement completes it. The
job is active while the message is unacknowledged, under a lease that the `Broker` renews.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty
from typing import Any

from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.json import dumps

from djqueue._version import __version__
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError, StorageUnavailableError
from djqueue.core.job import Claimed
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.options import MAX_INTEGER, MAX_NAME, JobOptions
from djqueue.storage.base import Unsubscribe

from .broker import Broker, broker_for
from .routing import Binding
from .storages import location, storage_at
from .values import JSON, SHORTEST_RETENTION, read_message

logger = Log("djqueue.celery")

CLAIMED_AT_ONCE = 16
"""Maximum of messages that one call claims."""
POLL_INTERVAL = 5_000
"""Milliseconds after which queues are looked at without a wake-up: some wake-ups may be lost."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks in an event loop whether it is time to look."""
AUTO_DELETE = 60_000
"""Milliseconds without a consumer after which an `auto_delete` queue expires, unless it says when."""
DIRECTIONS = ("lowest_first", "highest_first")

_numbers = itertools.count(1)


class QoS(virtual.QoS):
    """Unacknowledged messages of a channel. Acknowledgements may come from any thread."""

    channel: "MessageChannel"

    def ack(self, delivery_tag: str) -> None:
        job = self.channel.claimed.pop(delivery_tag, None)
        # A message that was consumed without acknowledgements is complete already.
        if job is not None:
            self.channel.broker.acknowledge([job])
        self._settled(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        job = self.channel.claimed.pop(delivery_tag, None)
        if job is not None:
            if requeue:
                self.channel.broker.requeue([job])
            else:
                self.channel.broker.reject([job])
        self._settled(delivery_tag)

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        self._flush()
        messages = list(self._delivered.items())
        self._delivered.clear()
        jobs = [self.channel.claimed.pop(tag, None) for tag, _ in messages]
        try:
            self.channel.broker.requeue([job for job in jobs if job is not None])
        except DjqueueError as error:
            # The storage does so itself when the leases expire.
            return [(error, message) for _, message in messages]
        return []

    def _settled(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self.channel.has_room()


class MessageChannel(virtual.Channel):
    """A channel of the transport."""

    QoS = QoS
    supports_fanout = True
    connection: "Transport"
    closed: bool

    from_transport_options = (
        *virtual.Channel.from_transport_options,
        "priority_direction",
        "retention",
    )
    priority_direction = DIRECTIONS[0]
    """`lowest_first`: priority 0 is delivered first, as with Redis; `highest_first`: 9, as with RabbitMQ."""
    retention: float = 0
    """Seconds for which records of acknowledged messages are kept."""

    def __init__(self, connection: "Transport", **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        if self.priority_direction not in DIRECTIONS:
            raise ConfigurationError(
                f"broker_transport_options: priority_direction must be 'lowest_first' or 'highest_first'; "
                f"got {self.priority_direction!r}"
            )
        if (
            isinstance(self.retention, bool)
            or not isinstance(self.retention, (int, float))
            or self.retention < 0
        ):
            raise ConfigurationError(
                f"broker_transport_options: retention: expected seconds, got {self.retention!r}"
            )
        self.broker: Broker = connection.broker
        self.claimed: dict[str, Claimed] = {}
        """Delivered messages that are not acknowledged, by delivery tag."""
        self._ready: deque[tuple[str, dict[str, Any]]] = deque()
        """Claimed messages that are not delivered yet, by queue."""
        self._no_ack: set[str] = set()
        self._expires: dict[str, int] = {}
        """Milliseconds after which declared queues expire without a consumer."""
        self._auto_delete: set[str] = set()
        self._listening: Unsubscribe | None = None
        self._is_woken = True
        self._look_at = 0

    # Publishing.

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        # Text stays readable, in the dashboard too; only bytes need base64.
        if isinstance(body, str) and encoding == "base64":
            return body, "utf-8"
        encoded: tuple[Any, str | None] = super().encode_body(body, encoding)
        return encoded

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        properties = message["properties"]
        priority = self._get_message_priority(message)
        task = message["headers"].get("task")
        options = JobOptions(
            priority=priority if self.priority_direction == "highest_first" else -priority,
            max_attempts=MAX_INTEGER,
            max_stalls=MAX_INTEGER,
            ttl=_expiration(properties),
            result_ttl=max(SHORTEST_RETENTION, int(self.retention * 1_000)),
            # Transient messages do not join the caller's transaction: they are replies and events.
            durable=False if properties.get("delivery_mode") == 1 or queue in self._expires else None,
            tags=(task,) if isinstance(task, str) and 0 < len(task) <= MAX_NAME else (),
            content_type=JSON,
        )
        self.broker.put(queue, properties["delivery_tag"], dumps(message).encode(), options)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        for queue in {binding.queue for binding in self.broker.routing.table(exchange)}:
            self._put(queue, message, **kwargs)

    # Queues.

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        if passive and queue and self._has_queue(queue):
            return virtual.base.queue_declare_ok_t(queue, self._size(queue), 0)
        return super().queue_declare(queue, passive, **kwargs)

    def _new_queue(
        self,
        queue: str,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        expires = (arguments or {}).get("x-expires")
        if auto_delete:
            self._auto_delete.add(queue)
            expires = expires or AUTO_DELETE
        if expires:
            self._expires[queue] = int(expires)
        self.broker.routing.declare(queue, self._expires.get(queue))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.broker.routing.is_declared(queue)

    def _size(self, queue: str) -> int:
        return self.broker.size(queue)

    def _purge(self, queue: str) -> int:
        return self.broker.purge(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        if if_empty and self._size(queue):
            return
        self.broker.routing.delete(queue)
        self.state.queue_bindings_delete(queue)
        self._expires.pop(queue, None)
        self._auto_delete.discard(queue)

    # Exchanges.

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        exchange = exchange or "amq.direct"
        self.state.binding_declare(queue, exchange, routing_key, arguments)
        row = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
        self.broker.routing.bind(exchange, Binding(*row), self._expires.get(queue))

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        row = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
        self.broker.routing.unbind(exchange, Binding(*row))

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        super().exchange_delete(exchange, if_unused, nowait)
        self.broker.routing.delete_exchange(exchange)

    def get_table(self, exchange: str) -> list[Binding]:
        # Events are frequent, and may miss a queue that was bound less than a second ago.
        return self.broker.routing.table(exchange, cached=self.typeof(exchange).type == "topic")

    # Consuming.

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        if no_ack:
            self._no_ack.add(queue)
        result = super().basic_consume(queue, no_ack, *args, **kwargs)
        self._listen()
        return result

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues:
            self._no_ack.discard(queue)
            self._return(queue)
            if not self.closed:
                self._listen()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        raw = None
        while raw is None:
            jobs = self.broker.claim([queue], 1).jobs
            if not jobs:
                return None
            # After the claim: the maintenance ends where nothing is consumed and no message is held.
            self.connection.consume()
            raw = self._receive(jobs[0])
        message = self.Message(raw, channel=self)
        if no_ack:
            self.qos.ack(message.delivery_tag)
        else:
            self.qos.append(message, message.delivery_tag)
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        jobs = self.broker.claim([queue], 1).jobs
        raw = self._receive(jobs[0]) if jobs else None
        if raw is None:
            raise Empty
        return raw

    def next_message(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next message and its queue; None if there is none, or no room for one."""
        if not self._consumers or not self.qos.can_consume():
            return None
        if not self._ready:
            self._claim()
        return self._ready.popleft() if self._ready else None

    def _claim(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if not self._is_woken and now < self._look_at:
            return
        room = self.qos.can_consume_max_estimate()
        slots = CLAIMED_AT_ONCE if room is None else min(CLAIMED_AT_ONCE, room)
        # Before the claim, so that a message that arrives meanwhile is not missed.
        self._is_woken = False
        try:
            claims = self.broker.claim(tuple(dict.fromkeys(self._active_queues)), slots)
        except BaseException:
            self._is_woken = True
            raise
        self._is_woken |= len(claims.jobs) == slots
        self._look_at = now + POLL_INTERVAL if claims.wait is None else now + min(claims.wait, POLL_INTERVAL)
        raws = [(job.queue, raw) for job in claims.jobs if (raw := self._receive(job)) is not None]
        done = [raw["properties"]["delivery_tag"] for queue, raw in raws if queue in self._no_ack]
        if done:
            self.broker.acknowledge([self.claimed.pop(tag) for tag in done])
        self._ready.extend(raws)

    def _receive(self, job: Claimed) -> dict[str, Any] | None:
        """Return the message of a job, and remember the job by a new delivery tag.

        A message that cannot be read goes to the dead letters, and None is returned.
        """
        # Copies of a message in several queues share the id of the job.
        tag = f"{job.id}.{next(_numbers)}"
        try:
            raw = read_message(job.payload)
            raw["properties"]["delivery_tag"] = tag
            self.Message(raw, channel=self)
        except Exception as error:
            text = f"the message cannot be read: {type(error).__name__}: {in_one_line(error)}"
            logger.warning("Message %s of queue %s is now a dead letter: %s", job.id, job.queue, text)
            self.broker.reject([job], text, "invalid_payload")
            return None
        if job.attempts > 1 or job.stalls:
            raw["headers"]["redelivered"] = True
            raw["properties"]["delivery_info"]["redelivered"] = True
        self.claimed[tag] = job
        return raw

    def _return(self, queue: str | None = None) -> None:
        """Release messages that are not delivered yet, of one queue or of all."""
        kept: deque[tuple[str, dict[str, Any]]] = deque()
        tags = []
        for name, raw in self._ready:
            if queue is None or name == queue:
                tags.append(raw["properties"]["delivery_tag"])
            else:
                kept.append((name, raw))
        self._ready = kept
        jobs = [self.claimed.pop(tag, None) for tag in tags]
        self.broker.release([job for job in jobs if job is not None])

    def _listen(self) -> None:
        """Listen to the queues that are consumed now."""
        self._stop_listening()
        self._is_woken = True
        if self._active_queues:
            self.connection.consume()
            self._listening = self.broker.storage.listen(tuple(self._active_queues), self.wake)

    def _stop_listening(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening()

    def wake(self) -> None:
        """Look for messages. May be called from any thread."""
        self._is_woken = True
        self.connection.wake()

    def has_room(self) -> None:
        """Deliver the next message, now that one was acknowledged. May be called from any thread."""
        if self.connection is not None:
            self.connection.wake()

    @property
    def look_at(self) -> int | None:
        """When to look for messages without a wake-up, in monotonic milliseconds; None: only then."""
        return self._look_at if self._consumers and self.qos.can_consume() else None

    @property
    def is_consuming(self) -> bool:
        """Whether there is a consumer."""
        return bool(self._active_queues)

    def expiring_queues(self) -> dict[str, int]:
        """Return the queues that are consumed and would expire, with their expiry in milliseconds."""
        return {queue: self._expires[queue] for queue in tuple(self._active_queues) if queue in self._expires}

    def lasting_queues(self) -> list[str]:
        """Return the queues that are consumed and do not expire."""
        return [queue for queue in tuple(self._active_queues) if queue not in self._expires]

    def declare_again(self, queue: str) -> None:
        """Declare a queue that expired while this process did not run, with its bindings."""
        self.broker.routing.declare(queue, self._expires[queue])
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            self.queue_bind(queue, exchange, routing_key, arguments)

    def close(self) -> None:
        if self.closed:
            return
        deleted = self._auto_delete & set(self._active_queues)
        connection = self.connection
        self._stop_listening()
        try:
            self._return()
            super().close()
            for queue in deleted:
                self.broker.routing.delete(queue)
                connection.state.queue_bindings_delete(queue)
        except StorageUnavailableError as error:
            # The leases of the messages and of the queues expire by themselves.
            logger.warning("Could not return the messages of a closed channel, which expire soon: %s", error)
            self.closed = True
            if connection is not None:
                connection.close_channel(self)


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
        storage_location = location(
            client.hostname,
            client.port,
            client.userid,
            client.password,
            client.virtual_host,
            {**client.transport_options, "ssl": client.ssl or client.transport_options.get("ssl")},
        )
        self.broker = broker_for(storage_at(storage_location))
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
        loop.call_repeatedly(CHECK_INTERVAL, self._look)
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
        for offset in range(len(channels)):
            channel = channels[(self._turn + offset) % len(channels)]
            message = channel.next_message()
            if message is not None:
                queue, raw = message
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


def _expiration(properties: Mapping[str, Any]) -> int | None:
    """Return the milliseconds within which a message must be delivered, which AMQP has as text."""
    expiration = properties.get("expiration")
    text = "" if expiration is None else str(expiration)
    # No job has a `ttl` of zero.
    return max(1, int(text)) if text.isascii() and text.isdecimal() else None


class Waker:
    """A pipe that an event loop of kombu reads; `wake` lets the loop call a function soon."""

    def __init__(self, loop: Any, woken: Callable[[], None]) -> None:
        self._loop = loop
        self._woken = woken
        self._lock = threading.Lock()
        self._is_pending = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        loop.add_reader(self._read, self._readable)

    def wake(self) -> None:
        """Let the loop call the function. May be called from any thread."""
        with self._lock:
            # One byte at a time is enough, and the pipe never fills up.
            if self._is_pending or self._write < 0:
                return
            self._is_pending = True
            os.write(self._write, b"!")

    def _readable(self) -> None:
        with self._lock:
            if self._read < 0:
                return
            self._is_pending = False
            os.read(self._read, 1)
        self._woken()

    def close(self) -> None:
        """Stop, and close the pipe."""
        with self._lock:
            read, write = self._read, self._write
            self._read = self._write = -1
        if read >= 0:
            self._loop.remove_reader(read)
            os.close(read)
            os.close(write)
