"""Follow the failovers that sentinels announce.

A sentinel that fails over makes a replica the master first and demotes the old master last. For about a
second in between, the old master still accepts writes, and all of them are lost. `FailoverWatch` hears of
the promotion from the sentinels' own channels: no call is sent from just before the promotion until the new
master is known, and connections that were opened before are not used again. See "Sentinel Pub/Sub Messages"
in the documentation of Redis Sentinel.
"""

import logging
import select
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import redis

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.forks import after_fork

Address = tuple[str, int]

PROMOTING = "+failover-state-send-slaveof-noone"
"""A replica is about to become the master."""
PROMOTED = "+promoted-slave"
"""A replica has become the master."""
SWITCHED = "+switch-master"
"""All sentinels are to use another master."""
ABORTED = ("-failover-abort-slave-timeout", "-failover-abort-no-good-slave", "-failover-abort-not-elected")
CHANNELS = (PROMOTING, PROMOTED, SWITCHED, *ABORTED)

LONGEST_PAUSE = 30_000
"""Milliseconds after which calls are sent again although no sentinel has announced the end of a failover."""
BELIEVED = 10_000
"""Milliseconds for which an announced master is preferred to what sentinels answer: those that do not lead
the failover hear of it a little later."""
POLL = 1.0
"""Seconds between tries to reach a sentinel, and between looks at whether the thread is still wanted."""

logger = logging.getLogger("djqueue.redis")


class FailoverWatch:
    """Subscribes to every sentinel of a master, on a thread of its own that starts with `start`.

    sentinels: addresses of some; the others are asked for.
    arguments: of redis-py's connections to the sentinels.

    `check` and `is_stale` cost next to nothing and may be called from any thread.
    """

    def __init__(self, master: str, sentinels: tuple[Address, ...], arguments: Mapping[str, Any]) -> None:
        self._master = master
        self._sentinels = sentinels
        self._arguments = dict(arguments)
        self.epoch = 0
        """Counts the masters. A connection opened in an earlier epoch leads to an old master."""
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._paused_until = 0
        """Monotonic milliseconds; 0 while no failover is under way."""
        self._announced: Address | None = None
        self._announced_at = 0

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._closed = threading.Event()
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), self._closed), name="djqueue-failover", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the thread, which notices within a second."""
        with self._lock:
            self._closed.set()
            self._thread = None

    def check(self) -> None:
        """Raise redis.ConnectionError while a replica is being promoted."""
        if self._paused_until and self._paused_until > SYSTEM_CLOCK.monotonic():
            raise redis.ConnectionError(f"the sentinels are failing over {self._master}")

    @property
    def announced(self) -> Address | None:
        """The new master, for some seconds after a failover."""
        if self._announced is not None and SYSTEM_CLOCK.monotonic() - self._announced_at > BELIEVED:
            self._announced = None
        return self._announced

    def hear(self, channel: str, message: str) -> None:
        """Take note of what a sentinel publishes."""
        words = message.split()
        if channel == SWITCHED:
            # <master name> <old ip> <old port> <new ip> <new port>
            if len(words) == 5 and words[0] == self._master:
                self._switch((words[3], int(words[4])))
            return
        # <type> <name> <ip> <port> [@ <master name> <master ip> <master port>]
        master = words[5] if len(words) > 5 else words[1] if len(words) > 1 else ""
        if master != self._master:
            return
        if channel == PROMOTING:
            self._paused_until = SYSTEM_CLOCK.monotonic() + LONGEST_PAUSE
            logger.info("Failover of %s: pausing calls until the new master is known.", self._master)
        elif channel == PROMOTED:
            self._switch((words[2], int(words[3])))
        elif channel in ABORTED:
            self._paused_until = 0
            logger.info("Failover of %s: aborted (%s); resuming calls.", self._master, channel)

    def compare(self, master: Address) -> None:
        """Take note of the master that a sentinel names after its messages may have been missed."""
        if self._known is not None and master != self._known:
            self._switch(master)
        self._known = master

    _known: Address | None = None
    """The master as last heard of."""

    def _switch(self, master: Address) -> None:
        if self._announced != master:
            self.epoch += 1
            logger.info("Failover of %s: the master is %s:%s.", self._master, *master)
        self._announced, self._announced_at = master, SYSTEM_CLOCK.monotonic()
        self._known = master
        self._paused_until = 0


class _Subscription:
    """A connection to one sentinel, which is opened again when it fails."""

    def __init__(self, master: str, address: Address, arguments: Mapping[str, Any]) -> None:
        self.address = address
        self._master = master
        self._client: Any = redis.Redis(host=address[0], port=address[1], **arguments)
        self._pubsub: Any = None
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._pubsub is not None

    def fileno(self) -> int:
        """For `select`."""
        number: int = self._pubsub.connection._sock.fileno()
        return number

    def open(self, watch: FailoverWatch) -> list[Address]:
        """Subscribe, unless that failed a moment ago; returns the addresses of other sentinels."""
        if time.monotonic() < self._retry_at:
            return []
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            pubsub.subscribe(*CHANNELS)
            master = self._client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self._master)
            others = self._client.execute_command("SENTINEL SENTINELS", self._master)
        except (redis.RedisError, OSError) as error:
            pubsub.close()
            self._failed(error)
            return []
        self._pubsub = pubsub
        if master:
            watch.compare((_text(master[0]), int(master[1])))
        return [_address(other) for other in others]

    def read(self, watch: FailoverWatch) -> None:
        """Pass on everything that has arrived."""
        try:
            while self._pubsub.connection.can_read(timeout=0):
                message = self._pubsub.get_message(timeout=0)
                if message is not None:
                    watch.hear(_text(message["channel"]), _text(message["data"]))
        except (redis.RedisError, OSError) as error:
            self.close()
            self._failed(error)

    def close(self) -> None:
        """Hang up."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
        self._client.close()

    def _failed(self, error: Exception) -> None:
        logger.debug("The sentinel %s:%s is away: %s", *self.address, error)
        self._retry_at = time.monotonic() + POLL


def _run(reference: "weakref.ref[FailoverWatch]", closed: threading.Event) -> None:
    """The thread. It ends when its watch is closed or gone."""
    watch = reference()
    if watch is None:
        return
    master, arguments = watch._master, watch._arguments
    links = {address: _Subscription(master, address, arguments) for address in watch._sentinels}
    del watch
    try:
        while not closed.is_set():
            watch = reference()
            if watch is None:
                return
            for link in [link for link in links.values() if not link.is_open]:
                for other in link.open(watch):
                    if other not in links:
                        links[other] = _Subscription(master, other, arguments)
            del watch
            opened = [link for link in links.values() if link.is_open]
            if not opened:
                closed.wait(POLL)
                continue
            ready, _, _ = select.select(opened, [], [], POLL)
            watch = reference()
            if watch is None:
                return
            for link in ready:
                link.read(watch)
            del watch
    finally:
        for link in links.values():
            link.close()


def _address(found: Any) -> Address:
    """Of a sentinel as another one describes it: a flat list of names and values, or a mapping."""
    pairs = found.items() if isinstance(found, Mapping) else zip(found[::2], found[1::2], strict=True)
    values = {_text(name): value for name, value in pairs}
    return _text(values["ip"]), int(values["port"])


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
