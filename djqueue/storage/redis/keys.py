"""Names of keys and channels: all of one queue carry one hash tag, so that they lie in one slot."""

from functools import lru_cache

_ESCAPED = {ord("%"): "%25", ord("{"): "%7B", ord("}"): "%7D"}
RESULT, LOG_LINES, ITEMS, SEQUENCE, GONE = "r", "l", "i", "sequence", "gone"


class QueueKeys:
    """The keys of one queue, as bytes."""

    __slots__ = ("_named", "_prefix", "prefix", "queue")

    def __init__(self, prefix: str, queue: str) -> None:
        self.queue = queue
        # A brace in a queue's name would end the hash tag early; queues' keys would be mixed up.
        self.prefix = f"{prefix}{{q:{queue.translate(_ESCAPED)}}}"
        self._prefix = f"{self.prefix}:".encode()
        self._named: dict[tuple[str, ...], list[bytes]] = {}

    def of(self, names: tuple[str, ...]) -> list[bytes]:
        """The keys of these names."""
        found = self._named.get(names)
        if found is None:
            found = self._named[names] = [self.key(name) for name in names]
        return found

    def key(self, name: str) -> bytes:
        """One key of the queue."""
        return self._prefix + name.encode()

    def result(self, job_id: str) -> bytes:
        """Where the result of a job is, for as long as it can be read."""
        return self._prefix + b"r:" + job_id.encode()

    def log_lines(self, job_id: str) -> bytes:
        """The list of a job's log lines."""
        return self._prefix + b"l:" + job_id.encode()

    def items(self, job_id: str) -> bytes:
        """The list of what a job's last run has sent."""
        return self._prefix + b"i:" + job_id.encode()

    def moved(self, job_id: str) -> bytes:
        """The queue that a job was moved to, kept for an hour."""
        return self._prefix + b"m:" + job_id.encode()

    def sequence(self, name: bytes) -> bytes:
        """What is remembered of a caller's last request."""
        return self._prefix + b"sequence:" + name

    @property
    def replicated(self) -> bytes:
        """What is written behind a durable call, so that replicas can confirm it. It expires at once."""
        return self._prefix + b"replicated"

    def staged(self, write: str, part: str) -> bytes:
        """What a part of a write has put aside, by the numbers of its chunks."""
        return self._prefix + f"stage:{write}:{part}".encode()

    def parts(self, write: str) -> bytes:
        """The names of a write's parts."""
        return self._prefix + f"stage:{write}".encode()

    def published(self, app: str, *, chunks: bool = False) -> bytes:
        """What an application has published last.

        told: what became of each of its chunks, as long as it is not finished.
        """
        return self._prefix + (b"chunks:" if chunks else b"published:") + app.encode()

    @property
    def events(self) -> str:
        """The channel of what happens to jobs."""
        return self.prefix + ":events"

    @property
    def wake(self) -> str:
        """The channel that says that jobs may be claimable."""
        return self.prefix + ":wake"


@lru_cache(maxsize=4096)
def keys_of(prefix: str, queue: str) -> QueueKeys:
    """The keys of a queue; kept, as they are asked for at every call."""
    return QueueKeys(prefix, queue)


class CommonKeys(QueueKeys):
    """The keys that are of no queue: the queues' names, the workers, and the reports of bulk writes."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, "")
        self.prefix = f"{prefix}{{djqueue}}"
        self._prefix = f"{self.prefix}:".encode()

    def report(self, write: str) -> bytes:
        """The report of a bulk write."""
        return self.key(f"bulk_write:{write}")

    @property
    def new_queues(self) -> str:
        """The channel that names queues on their first use."""
        return self.prefix + ":new-queues"

    @property
    def commands(self) -> str:
        """The channel that names workers for which a command waits."""
        return self.prefix + ":commands"


class LimiterKeys(QueueKeys):
    """The keys of a limiter that queues share."""

    def __init__(self, prefix: str, limiter: str) -> None:
        super().__init__(prefix, limiter)
        self.prefix = f"{prefix}{{limiter:{limiter.translate(_ESCAPED)}}}"
        self._prefix = f"{self.prefix}:".encode()


@lru_cache(maxsize=4096)
def limiter_keys_of(prefix: str, limiter: str) -> LimiterKeys:
    """The keys of a limiter."""
    return LimiterKeys(prefix, limiter)
