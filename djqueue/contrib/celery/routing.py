"""Declared queues and the routing tables of exchanges, shared by all processes of a storage.

Both are values: a declared queue has its bindings, and an exchange has its table. A queue that may expire is
due when no consumer has renewed it in time; any process then removes it with its bindings and messages.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.storage.base import Storage

from .values import DECLARED_QUEUE, DECLARED_QUEUES, EXCHANGE, EXCHANGES, Values

CACHED = 1_000
"""Milliseconds for which a table may be cached where the caller allows it."""


class Binding(NamedTuple):
    """A row of an exchange's table, as kombu's exchange types expect it."""

    routing_key: str
    pattern: str | None
    queue: str


Change = Callable[[list[Binding]], list[Binding]]


class Routing:
    """The queues and tables of one storage."""

    def __init__(self, storage: Storage) -> None:
        self._queues = Values(storage, DECLARED_QUEUES, DECLARED_QUEUE)
        self._exchanges = Values(storage, EXCHANGES, EXCHANGE)
        self._storage = storage
        self._cache: dict[str, tuple[int, list[Binding]]] = {}

    # Queues.

    def declare(self, queue: str, expires: int | None) -> None:
        """Record a queue; a queue that may expire is renewed."""
        value = _dump({"queue": queue, "exchanges": [], "expires": expires})
        if not self._queues.add(queue, value, expires) and expires is not None:
            self._queues.expire(queue, expires)

    def is_declared(self, queue: str) -> bool:
        """Return whether a queue is declared and has not expired."""
        return self._queues.get([queue])[0] is not None

    def renew(self, queue: str, expires: int) -> bool:
        """Let a queue expire later; False if it is no longer declared."""
        return self._queues.expire(queue, expires)

    def delete(self, queue: str) -> None:
        """Remove a queue with its bindings and messages."""
        value = self._queues.get([queue])[0]
        self._remove(queue, value)
        self._queues.remove([queue])

    def delete_expired(self) -> None:
        """Remove the queues that have expired."""
        for _, value in self._queues.expired():
            queue = json.loads(value)["queue"]
            # The bindings go first: if this process stops in between, the next round finds the queue again.
            self._remove(queue, value)
            self._queues.remove([queue])

    def _remove(self, queue: str, value: bytes | None) -> None:
        for exchange in [] if value is None else json.loads(value)["exchanges"]:
            self._change_table(exchange, lambda rows: [row for row in rows if row.queue != queue])
        self._storage.queues.obliterate(queue, force=True)

    # Exchanges.

    def bind(self, exchange: str, binding: Binding, expires: int | None) -> None:
        """Add a binding."""

        def add_exchange(value: bytes | None) -> bytes:
            empty: dict[str, Any] = {"queue": binding.queue, "exchanges": [], "expires": expires}
            stored: dict[str, Any] = json.loads(value) if value else empty
            return _dump({**stored, "exchanges": sorted({*stored["exchanges"], exchange})})

        # The queue knows its exchanges first, so that no binding outlives it.
        self._queues.change(binding.queue, add_exchange, expires)
        self._change_table(exchange, lambda rows: rows if binding in rows else [*rows, binding])

    def unbind(self, exchange: str, binding: Binding) -> None:
        """Remove a binding."""
        self._change_table(exchange, lambda rows: [row for row in rows if row != binding])

    def table(self, exchange: str, *, cached: bool = False) -> list[Binding]:
        """Return the bindings of an exchange.

        Args:
            cached: Whether a table that was read within the last second is good enough.
        """
        now = SYSTEM_CLOCK.monotonic()
        if cached:
            read_at, rows = self._cache.get(exchange, (now - CACHED, []))
            if now - read_at < CACHED:
                return rows
        rows = _rows(self._exchanges.get([exchange])[0])
        self._cache[exchange] = (now, rows)
        return rows

    def delete_exchange(self, exchange: str) -> None:
        """Remove the table of an exchange."""
        self._cache.pop(exchange, None)
        self._exchanges.remove([exchange])

    def _change_table(self, exchange: str, changed: Change) -> None:
        self._exchanges.change(exchange, lambda value: _dump(changed(_rows(value))))
        self._cache.pop(exchange, None)


def _rows(value: bytes | None) -> list[Binding]:
    return [] if value is None else [Binding(*row) for row in json.loads(value)]


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
