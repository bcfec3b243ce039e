"""Names of keys and channels. All keys of a queue have one hash tag, which keeps them in one slot."""

from collections.abc import Iterable
from functools import lru_cache

_ESCAPED = {ord("%"): "%25", ord("{"): "%7B", ord("}"): "%7D"}
RESULT, LOG_LINES, ITEMS, MOVED, SEQUENCE, GONE = "r", "l", "i", "m", "sequence", "gone"
READ_KEYS, JOB_KEYS, MOVING_KEYS = (
    RESULT + LOG_LINES,
    RESULT + LOG_LINES + ITEMS,
    RESULT + LOG_LINES + ITEMS + MOVED,
)
"""Kinds of keys that a job has of its own: to be read, all, and those in the queues that it moves between."""


class QueueKeys:
    """The keys of one queue, as bytes."""

    __slots__ = ("_named", "_prefix", "prefix", "queue")

    def __init__(self, prefix: str, queue: str) -> None:
        self.queue = queue
        # A brace in a queue's name would end the hash tag early, and mix up the keys of queues.
        self.prefix = f"{prefix}{{q:{queue.translate(_ESCAPED)}}}"
        self._prefix = f"{self.prefix}:".encode()
        self._named: dict[tuple[str, ...], list[bytes]] = {}

    def of(self, names: tuple[str, ...]) -> list[bytes]:
        """Return the keys of several names."""
        found = self._named.get(names)
        if found is None:
            found = self._named[names] = [self.key(name) for name in names]
        return found

    def key(self, name: str) -> bytes:
        """Return the key of a name."""
        return self._prefix + name.encode()

    def of_jobs(self, ids: Iterable[str], kinds: str = JOB_KEYS) -> list[bytes]:
        """Return the keys that jobs have of their own, job by job."""
        prefixes = [self._prefix + kind.encode() + b":" for kind in kinds]
        return [prefix + job_id.encode() for job_id in ids for prefix in prefixes]

    def result(self, job_id: str) -> bytes:
        """Return the key of a job's result."""
        return self._prefix + b"r:" + job_id.encode()

    def log_lines(self, job_id: str) -> bytes:
        """Return the key of a job's log lines."""
        return self._prefix + b"l:" + job_id.encode()

    def items(self, job_id: str) -> bytes:
        """Return the key of the items that a job's last attempt has sent."""
        return self._prefix + b"i:" + job_id.encode()

    def moved(self, job_id: str) -> bytes:
        """Return the key of the queue that a job was moved to, which is kept for an hour."""
        return self._prefix + b"m:" + job_id.encode()

    def sequence(self, name: bytes) -> bytes:
        """Return the key of the last reply in a request sequence."""
        return self._prefix + b"sequence:" + name

    @property
    def replicated(self) -> bytes:
        """The key written after a durable call for replicas to confirm; it expires at once."""
        return self._prefix + b"replicated"

    def staged(self, write: str, part: str) -> bytes:
        """Return the key of the staged chunks of a part, by number."""
        return self._prefix + f"stage:{write}:{part}".encode()

    def parts(self, write: str) -> bytes:
        """Return the key of the names of a write's parts."""
        return self._prefix + f"stage:{write}".encode()

    def published(self, app: str, *, chunks: bool = False) -> bytes:
        """Return the key of the last publication of an application, or of the results of its chunks."""
        return self._prefix + (b"chunks:" if chunks else b"published:") + app.encode()

    @property
    def events(self) -> str:
        """The channel of job events."""
        return self.prefix + ":events"

    @property
    def wake(self) -> str:
        """The channel of wake-ups: jobs may be claimable."""
        return self.prefix + ":wake"


@lru_cache(maxsize=4096)
def keys_of(prefix: str, queue: str) -> QueueKeys:
    """Return the keys of a queue, from a cache."""
    return QueueKeys(prefix, queue)


class CommonKeys(QueueKeys):
    """The keys that belong to no queue: queue names, workers, reports of bulk writes."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, "")
        self.prefix = f"{prefix}{{djqueue}}"
        self._prefix = f"{self.prefix}:".encode()

    def report(self, write: str) -> bytes:
        """Return the key of the report of a bulk write."""
        return self.key(f"bulk_write:{write}")

    def plan(self, app: str, target: str) -> bytes:
        """Return the key of the last plan of an application for a target."""
        return self.key(f"plan:{len(target)}:{target}{app}")

    @property
    def new_queues(self) -> str:
        """The channel of the names of new queues."""
        return self.prefix + ":new-queues"

    @property
    def commands(self) -> str:
        """The channel of the ids of workers that have commands."""
        return self.prefix + ":commands"


class LimiterKeys(QueueKeys):
    """The keys of a shared limiter."""

    def __init__(self, prefix: str, limiter: str) -> None:
        super().__init__(prefix, limiter)
        self.prefix = f"{prefix}{{limiter:{limiter.translate(_ESCAPED)}}}"
        self._prefix = f"{self.prefix}:".encode()


@lru_cache(maxsize=4096)
def limiter_keys_of(prefix: str, limiter: str) -> LimiterKeys:
    """Return the keys of a shared limiter, from a cache."""
    return LimiterKeys(prefix, limiter)
