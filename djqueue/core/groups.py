"""Keyed concurrency: of each group, so many jobs at once; the rest wait in lists of their own."""

from collections import deque

from .job import Job


class Group:
    """The jobs of one group. `out` counts those that are ready or active."""

    __slots__ = ("out", "parked")

    def __init__(self) -> None:
        self.out = 0
        self.parked: deque[Job] = deque()


class Groups:
    """Groups of one queue. Those with no job are forgotten.

    At most `limit` jobs of a group are ever among the ready jobs or active, so a claim never meets a
    blocked one. Within a group jobs go in the order of their arrival.
    """

    __slots__ = ("_groups", "limit", "parked")

    def __init__(self, limit: int = 1) -> None:
        self._groups: dict[str, Group] = {}
        self.limit = limit
        self.parked = 0
        """Jobs that wait for their group, over all groups."""

    def admit(self, job: Job, *, front: bool = False) -> bool:
        """Whether the job may be among the ready ones now; else it is parked."""
        group = self._groups.get(self._name(job))
        if group is None:
            group = self._groups[self._name(job)] = Group()
        if group.out < self.limit:
            group.out += 1
            return True
        if front:
            group.parked.appendleft(job)
        else:
            group.parked.append(job)
        job.generation = PARKED
        self.parked += 1
        return False

    def leave(self, job: Job) -> Job | None:
        """A job that was ready or active is neither any more; the parked job that takes its place."""
        group = self._groups[self._name(job)]
        group.out -= 1
        return self._advance(group, self._name(job))

    def step_back(self, job: Job) -> None:
        """An active job is about to be admitted again, before those that wait for its place."""
        self._groups[self._name(job)].out -= 1

    def remove(self, job: Job) -> None:
        """Take out a parked job."""
        group = self._groups[self._name(job)]
        group.parked.remove(job)
        self.parked -= 1
        job.generation = 0
        self._forget_if_empty(group, self._name(job))

    def resize(self, limit: int) -> list[Job]:
        """Change the limit; the parked jobs that may now be ready."""
        self.limit = limit
        freed = []
        for name, group in list(self._groups.items()):
            while (job := self._advance(group, name)) is not None:
                freed.append(job)
        return freed

    def __len__(self) -> int:
        return len(self._groups)

    def _advance(self, group: Group, name: str) -> Job | None:
        if group.parked and group.out < self.limit:
            job = group.parked.popleft()
            job.generation = 0
            self.parked -= 1
            group.out += 1
            return job
        self._forget_if_empty(group, name)
        return None

    def _forget_if_empty(self, group: Group, name: str) -> None:
        if not group.out and not group.parked:
            del self._groups[name]

    @staticmethod
    def _name(job: Job) -> str:
        assert job.options.group is not None
        return job.options.group


PARKED = -1 << 62
"""Generation of a job that waits in its group's list."""
