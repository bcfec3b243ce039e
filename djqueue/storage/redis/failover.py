"""Follow the failovers that sentinels announce.

A sentinel that fails over makes a replica the master first and demotes the old master last. For about a
second in between, the old master still accepts writes, and all of them are lost. `FailoverWatch` listens to
the channels of the sentinels: no call is sent from just before the promotion until the new master is known,
and connections that were opened before are not used again. See "Sentinel Pub/Sub Messages" in the
documentation of Redis Sentinel.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import redis

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.logs import Log
from djqueue.core.threads import after_fork, start_daemon

Address = tuple[str, int]

PROMOTING = "+failover-state-send-slaveof-noone"
"""A replica is about to become the master."""
PROMOTED = "+promoted-slave"
"""A replica has become the master."""
SWITCHED = "+switch-master"
"""All sentinels switch to another master."""
ABORTED = ("-failover-abort-slave-timeout", "-failover-abort-no-good-slave", "-failover-abort-not-elected")
CHANNELS = (PROMOTING, PROMOTED, SWITCHED, *ABORTED)

LONGEST_PAUSE = 30_000
"""Milliseconds after which calls resume even if no sentinel has announced the end of a failover."""
ANNOUNCEMENT_TTL = 10_000
"""Milliseconds for which an announced master is preferred to replies of sentinels: those that do not lead the
failover learn of it a little later.
"""
POLL = 1.0
"""Seconds between attempts to reach a sentinel, and between checks whether the thread is still needed."""

logger = Log("djqueue.redis")


class FailoverWatch:
    """Subscribes to every sentinel of a master, each on a thread of its own, from `start` on.

    sentinels: addresses of some; the others are read from them.
    arguments: arguments of redis-py's connections to the sentinels.

    `check`, `epoch` and `announced` are cheap and may be used from any thread.
    """

    def __init__(self, master: str, sentinels: tuple[Address, ...], arguments: Mapping[str, Any]) -> None:
        self._master = master
        self._sentinels = sentinels
        self._arguments = dict(arguments)
        self.epoch = 0
        """Number of masters so far. A connection of an earlier epoch is one to an old master."""
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[Address, threading.Thread] = {}
        self._closed = threading.Event()
        self._paused_until = 0
        """Monotonic milliseconds; 0 while no failover is under way."""
        self._announced: Address | None = None
        self._announced_at = 0

    def start(self) -> None:
        """Follow the known sentinels, if not started already."""
        with self._lock:
            if self._closed.is_set():
                self._closed = threading.Event()
        self.follow(self._sentinels)

    def follow(self, sentinels: Iterable[Address]) -> None:
        """Follow these sentinels, too."""
        with self._lock:
            if self._closed.is_set():
                return
            for address in sentinels:
                thread = self._threads.get(address)
                if thread is not None and thread.is_alive():
                    continue
                link = _Subscription(self._master, address, self._arguments)
                name = f"djqueue-failover-{address[1]}"
                self._threads[address] = start_daemon(name, _run, weakref.ref(self), self._closed, link)

    def close(self) -> None:
        """End the threads, within a second."""
        with self._lock:
            self._closed.set()
            self._threads = {}

    def check(self) -> None:
        """Raise redis.ConnectionError while a replica is being promoted."""
        if self._paused_until and self._paused_until > SYSTEM_CLOCK.monotonic():
            raise redis.ConnectionError(f"Sentinel is failing over {self._master}")

    @property
    def announced(self) -> Address | None:
        """Return the new master for some seconds after a failover, otherwise None."""
        if self._announced is not None and SYSTEM_CLOCK.monotonic() - self._announced_at > ANNOUNCEMENT_TTL:
            self._announced = None
        return self._announced

    def hear(self, channel: str, message: str) -> None:
        """Process a message of a sentinel."""
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
        """Process the master that a sentinel names, after messages may have been missed."""
        if self._known is not None and master != self._known:
            self._switch(master)
        self._known = master

    _known: Address | None = None
    """The last known master."""

    def _switch(self, master: Address) -> None:
        if self._announced != master:
            self.epoch += 1
            logger.info("Failover of %s: the master is %s:%s.", self._master, *master)
        self._announced, self._announced_at = master, SYSTEM_CLOCK.monotonic()
        self._known = master
        self._paused_until = 0


class _Subscription:
    """A connection to one sentinel, which is reopened when it fails. One thread uses it."""

    def __init__(self, master: str, address: Address, arguments: Mapping[str, Any]) -> None:
        self._master = master
        self._address = address
        self._client: Any = redis.Redis(host=address[0], port=address[1], **arguments)
        self._pubsub: Any = None

    def open(self, watch: FailoverWatch) -> bool:
        """Subscribe, and let the watch follow the other sentinels; return False if unreachable."""
        if self._pubsub is not None:
            return True
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            pubsub.subscribe(*CHANNELS)
            master = self._client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self._master)
            others = self._client.execute_command("SENTINEL SENTINELS", self._master)
        except (redis.RedisError, OSError) as error:
            pubsub.close()
            logger.debug("Sentinel %s:%s cannot be reached: %s", *self._address, error)
            return False
        self._pubsub = pubsub
        if master:
            watch.compare((_text(master[0]), int(master[1])))
        watch.follow(map(_address, others))
        return True

    def read(self) -> tuple[str, str] | None:
        """Wait briefly for a message; return its channel and text."""
        try:
            message = self._pubsub.get_message(timeout=POLL)
        except (redis.RedisError, OSError) as error:
            logger.debug("Sentinel %s:%s disconnected: %s", *self._address, error)
            self.close()
            return None
        return (_text(message["channel"]), _text(message["data"])) if message is not None else None

    def close(self) -> None:
        """Disconnect."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
        self._client.close()


def _run(reference: "weakref.ref[FailoverWatch]", closed: threading.Event, link: _Subscription) -> None:
    """Run the thread of one sentinel, so that an unreachable one does not delay the others.

    It ends when its watch is closed or gone.
    """
    try:
        while not closed.is_set():
            watch = reference()
            if watch is None:
                return
            is_open = link.open(watch)
            del watch
            if not is_open:
                closed.wait(POLL)
                continue
            message = link.read()
            if message is not None and (watch := reference()) is not None:
                watch.hear(*message)
                del watch
    finally:
        link.close()


def _address(description: Any) -> Address:
    """Return the address in a sentinel's description: a flat list of names and values, or a mapping."""
    pairs = (
        description.items()
        if isinstance(description, Mapping)
        else zip(description[::2], description[1::2], strict=True)
    )
    values = {_text(name): value for name, value in pairs}
    return _text(values["ip"]), int(values["port"])


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
