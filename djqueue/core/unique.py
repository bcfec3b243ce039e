"""Who owns which unique key of a queue."""

from .job import Job


class UniqueKeys:
    """Keys with their owners and, for those that have one, the time at which they are free anyway."""

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        self._owners: dict[str, tuple[Job, int | None]] = {}

    def owner(self, key: str, now: int) -> Job | None:
        """The job that holds the key; a key past its own time has none."""
        held = self._owners.get(key)
        if held is None:
            return None
        job, free_at = held
        if free_at is not None and free_at <= now:
            del self._owners[key]
            return None
        return job

    def take(self, job: Job) -> None:
        """Give the job its key; the caller has seen that it is free."""
        key, ttl = job.options.unique_key, job.options.unique_ttl
        if key is not None:
            self._owners[key] = (job, None if ttl is None else job.created_at + ttl)

    def release(self, job: Job) -> None:
        """Free the job's key, unless another job has it by now."""
        key = job.options.unique_key
        if key is not None and (held := self._owners.get(key)) is not None and held[0] is job:
            del self._owners[key]

    def sweep(self, now: int) -> None:
        """Forget the keys whose time is over."""
        for key in [key for key, (_, free_at) in self._owners.items() if free_at and free_at <= now]:
            del self._owners[key]

    def __len__(self) -> int:
        return len(self._owners)
