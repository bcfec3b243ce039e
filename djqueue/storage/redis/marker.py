"""A marker key, which tells that Redis has lost keys: it was flushed, came back with old data, or evicts."""

import json
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import redis

from djqueue.core.errors import StorageError
from djqueue.core.overview import Finding

from .connections import Connections
from .health import evicted_keys
from .keyspace import Keyspace
from .roundtrips import RedisCommand

RED_FOR = 600_000
"""Milliseconds for which a loss stays a problem, so that all who watch see it."""
FLUSHED = "keys were flushed, or Redis came back without them: jobs are lost"
EVICTED = "Redis has evicted keys, because its memory is full: jobs or results are lost"
REMEDIES = {
    FLUSHED: "Give djqueue a server or database of its own, and keep its data on disk. Jobs come back with "
    "`manage.py djqueue restore-from-mirror`, or from a backup.",
    EVICTED: "Set maxmemory-policy to noeviction, and raise maxmemory.",
}


class Mark(NamedTuple):
    """The value of the marker."""

    id: str
    lost_at: int = 0
    """When a loss was noticed, in UTC milliseconds; 0 for never."""
    loss: str = ""
    evicted: int = 0
    """Keys that the servers had evicted when it was written."""


class Marker:
    """The marker of a storage, and what this process knows of it.

    A process that has seen the marker notices that it has gone or is another one. It then writes one that
    says so, for all other processes.
    """

    def __init__(self, keyspace: Keyspace, connections: Connections, now: Callable[[], int]) -> None:
        self._keyspace = keyspace
        self._connections = connections
        self._key = keyspace.common.key("marker")
        self._now = now
        self._seen: str | None = None

    def look(self) -> Sequence[Finding]:
        """Write the marker, and return the loss of keys that was noticed in the last minutes."""
        mark = self._read()
        evicted = self._evicted(0 if mark is None else mark.evicted)
        new = Mark(secrets.token_hex(8), evicted=evicted)
        if self._seen is not None and (mark is None or (mark.id != self._seen and not mark.lost_at)):
            mark = new._replace(lost_at=self._now(), loss=FLUSHED)
        elif mark is not None and evicted > mark.evicted:
            mark = new._replace(lost_at=self._now(), loss=EVICTED)
        elif mark is None:
            mark = new
        self._keyspace.ask(RedisCommand((b"SET", self._key, json.dumps(mark._replace(evicted=evicted)))))
        self._seen = mark.id
        if not mark.lost_at or self._now() - mark.lost_at > RED_FOR:
            return ()
        ago = (self._now() - mark.lost_at) // 1_000
        text = f"{mark.loss} (noticed {ago} s ago; reported for {RED_FOR // 60_000} minutes)"
        return [Finding("health.storage", "error", text, REMEDIES.get(mark.loss, REMEDIES[FLUSHED]))]

    def _read(self) -> Mark | None:
        found = self._keyspace.ask(RedisCommand((b"GET", self._key)))
        return None if found is None else Mark(*json.loads(found))

    def _evicted(self, before: int) -> int:
        """Return how many keys the servers have evicted since they started."""
        try:
            return evicted_keys(self._connections)
        except (redis.RedisError, OSError, StorageError):
            return before  # The other calls of the probe tell whether the server answers.
