"""Values by key, kept in a storage as jobs that are never run, and the names of Celery's jobs and queues.

A value is the payload of a delayed job, due when the value expires. Every storage keeps such jobs, shows
them, and changes them atomically, so that values need no tables or keys of their own.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from kombu.utils.json import loads

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import MAX_INTEGER, MAX_NAME, JobOptions
from djqueue.core.states import State
from djqueue.storage.base import Storage, Unsubscribe

MESSAGE = "kombu.message"
"""Job name of messages."""
DECLARED_QUEUE, DECLARED_QUEUES = "kombu.queue", "kombu.queues"
"""Job name and queue of the records of declared queues."""
EXCHANGE, EXCHANGES = "kombu.exchange", "kombu.exchanges"
"""Job name and queue of the routing tables of exchanges."""
RESULT, RESULTS = "celery.result", "celery.results"
"""Job name and queue of Celery's results."""

JSON = "application/json"
SHORTEST_RETENTION = 1
"""Milliseconds for which the record of an ended job is kept at least."""
FOREVER = 100 * 365 * 86_400_000
"""Milliseconds, for values that do not expire."""
VALUE_OPTIONS = JobOptions(
    max_attempts=MAX_INTEGER,
    max_stalls=MAX_INTEGER,
    result_ttl=SHORTEST_RETENTION,
    durable=False,
    content_type=JSON,
)
"""Options of a value's job. It is not `durable`, because it must not join a transaction of the caller: other
processes must see it at once."""
ATTEMPTS = 100
"""Maximum of tries of a change that other processes keep overtaking."""
REMOVED_AT_ONCE = 500
"""Maximum of expired values that one round removes."""


def read_message(data: bytes) -> dict[str, Any]:
    """Return the fields of a stored message. Raises an exception for one that the transport did not write."""
    raw = loads(data.decode())
    properties = raw["properties"]
    raw["headers"] = raw.get("headers") or {}
    delivery_info = properties.setdefault("delivery_info", {})
    for name, field in (("headers", raw["headers"]), ("delivery_info", delivery_info)):
        if not isinstance(field, dict):
            raise TypeError(f"its {name} are not a mapping")
    found: dict[str, Any] = raw
    return found


class Values:
    """The values of one kind.

    Args:
        queue: Queue of the jobs.
        name: Name of the jobs.
        call: Calls a function with arguments; may repeat it while the storage is unavailable. A change whose
            answer was lost is then made again, to the value that it has left.
    """

    def __init__(
        self,
        storage: Storage,
        queue: str,
        name: str,
        call: Callable[..., Any] = lambda function, *args, **kwargs: function(*args, **kwargs),
    ) -> None:
        self.storage = storage
        self.queue = queue
        self._name = name
        self._call = call

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return values by key; None for a missing one, or an expired one."""
        jobs = self._call(self.storage.reads.jobs, self.queue, [job_id(key) for key in keys])
        return [job.payload if job is not None and job.state is State.DELAYED else None for job in jobs]

    def add(self, key: str, value: bytes, expires: int | None = None) -> bool:
        """Add a value unless the key has one; return whether it was added.

        Args:
            expires: Milliseconds; None keeps the value until it is removed.
        """
        batch = Batch(self.queue, self._name, VALUE_OPTIONS, [value], [job_id(key)], delay=expires or FOREVER)
        answers: list[EnqueueResult] = self._call(self.storage.enqueue, [batch])
        return answers[0].status == "queued"

    def set(self, key: str, value: bytes, expires: int | None = None) -> None:
        """Set a value, and notify subscribers."""
        for _ in range(ATTEMPTS):
            if self.add(key, value, expires):
                return
            changed = self._call(self.storage.jobs.update, self.queue, [job_id(key)], payload=value)[0]
            # This sends the event that subscribers wait for, and so it comes last.
            if changed and self.expire(key, expires):
                return
        raise self._overtaken(key)

    def change(self, key: str, changed: Callable[[bytes | None], bytes], expires: int | None = None) -> bytes:
        """Replace a value by what a function returns for it, atomically; return the new value.

        The function is called again if another process was faster.
        """
        for _ in range(ATTEMPTS):
            old = self.get([key])[0]
            new = changed(old)
            if new == old:
                return new
            if old is None:
                if self.add(key, new, expires):
                    return new
            else:
                replace = self.storage.jobs.replace_payload
                if self._call(replace, self.queue, job_id(key), new, old) == "updated":
                    return new
        raise self._overtaken(key)

    def expire(self, key: str, expires: int | None) -> bool:
        """Let a value expire after some milliseconds, None: never; return whether there is one."""
        run_at = SYSTEM_CLOCK.now() + (expires or FOREVER)
        moved: list[bool] = self._call(self.storage.jobs.reschedule, self.queue, [job_id(key)], run_at)
        return moved[0]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove values; return for each whether there was one."""
        removed: list[bool] = self._call(self.storage.jobs.remove, self.queue, [job_id(key) for key in keys])
        return removed

    def subscribe(self, key: str, changed: Callable[[], None]) -> Unsubscribe:
        """Call a function, from any thread, when a value has been set or removed."""
        return self.storage.events.subscribe(self.queue, lambda _: changed(), job_id(key))

    def expired(self) -> list[tuple[str, bytes]]:
        """Return some values that have expired, by job id."""
        due = self.storage.reads.page(self.queue, State.WAITING, REMOVED_AT_ONCE)
        return [(job.id, job.payload) for job in due]

    def remove_expired(self) -> int:
        """Remove values that have expired, at most some hundreds at once, and return their number."""
        self._call(self.storage.sweep)
        waiting, ever = frozenset({State.WAITING}), SYSTEM_CLOCK.now() + MAX_INTEGER
        removed: int = self._call(self.storage.queues.clean, self.queue, waiting, ever, REMOVED_AT_ONCE)
        return removed

    def _overtaken(self, key: str) -> StorageError:
        return StorageError(
            f"{key!r} in queue {self.queue!r} could not be changed: other processes changed it "
            f"{ATTEMPTS} times in the meantime"
        )


def job_id(key: str) -> str:
    """Return a job id for a key of any length."""
    if 1 <= len(key) <= MAX_NAME and "\0" not in key:
        return key
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
