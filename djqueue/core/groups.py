"""Keyed concurrency: of each group, so many jobs at once; the rest wait in lists of their own."""

from collections import deque
from typing import NamedTuple

from .job import Job


class GroupLimit(NamedTuple):
    """What was said to a group while its queue ran."""

    concurrency: int | None = None
    """Its jobs active at once; None: as the queue has it for every group."""
    paused: bool = False


NO_LIMIT = GroupLimit()


class Group:
    """The jobs of one group."""

    __slots__ = ("active", "parked", "ready")

    def __init__(self) -> None:
        self.active = 0
        self.ready: list[Job] = []
        """Those that may be claimed: one, but for jobs that were active and came back."""
        self.parked: deque[Job] = deque()

    def __bool__(self) -> bool:
        return bool(self.active or self.ready or self.parked)


class Groups:
    """Groups of one queue. Those with no job are forgotten, what was said to them is not.

    One job of a group is among the ready ones, if its limit allows; the next gets there, behind all
    others, when that one is claimed. So a claim never meets a blocked job, and groups take turns however
    many jobs each has. Within a group jobs go in the order of their arrival.
    """

    __slots__ = ("_groups", "_own", "limit", "parked")

    def __init__(self, limit: int = 1) -> None:
        self._groups: dict[str, Group] = {}
        self._own: dict[str, GroupLimit] = {}
        self.limit = limit
        self.parked = 0
        """Jobs that wait for their group, over all groups."""

    def admit(self, job: Job, *, front: bool = False) -> bool:
        """Whether a job may be ready now; else it is parked, before the others or behind them."""
        name = self._name(job)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group()
        if not group.ready and self._has_room(name, group):
            group.ready.append(job)
            return True
        self._park(group, job, front=front)
        return False

    def readmit(self, job: Job) -> bool:
        """As `admit` for an active job that comes back before all others of its group."""
        name = self._name(job)
        group = self._groups[name]
        group.active -= 1
        if self._has_room(name, group):
            group.ready.insert(0, job)
            return True
        self._park(group, job, front=True)
        return False

    def claimed(self, job: Job) -> Job | None:
        """A ready job is active; the next that may be ready."""
        group = self._groups[self._name(job)]
        group.ready.remove(job)
        group.active += 1
        return self.advance(self._name(job))

    def leave(self, job: Job, *, was_ready: bool) -> Job | None:
        """A job that was ready, or active, is neither any more; the next that may be ready."""
        group = self._groups[self._name(job)]
        if was_ready:
            group.ready.remove(job)
        else:
            group.active -= 1
        return self.advance(self._name(job))

    def remove(self, job: Job) -> None:
        """Take out a parked job."""
        name = self._name(job)
        self._groups[name].parked.remove(job)
        self.parked -= 1
        job.generation = 0
        self._forget_if_empty(name)

    def advance(self, name: str) -> Job | None:
        """The next job of a group that may be ready."""
        group = self._groups.get(name)
        if group is None:
            return None
        if group.parked and not group.ready and self._has_room(name, group):
            job = group.parked.popleft()
            job.generation = 0
            self.parked -= 1
            group.ready.append(job)
            return job
        self._forget_if_empty(name)
        return None

    def hold_back(self, name: str) -> list[Job]:
        """Ready jobs of a group that may not be so any more, last first: the caller parks them."""
        group = self._groups.get(name)
        if group is None:
            return []
        room = 0 if self.own(name).paused else max(0, self._limit_of(name) - group.active)
        held, group.ready = group.ready[room:], group.ready[:room]
        return held[::-1]

    def park(self, job: Job) -> None:
        """Park a job, which is in no list, before the others of its group."""
        self._park(self._groups[self._name(job)], job, front=True)

    def own(self, name: str) -> GroupLimit:
        """What was said to a group."""
        return self._own.get(name, NO_LIMIT)

    def set_own(self, name: str, limit: GroupLimit) -> None:
        """Say something to a group."""
        if limit == NO_LIMIT:
            self._own.pop(name, None)
        else:
            self._own[name] = limit

    def said(self) -> dict[str, GroupLimit]:
        """What was said to groups."""
        return dict(self._own)

    def names(self) -> list[str]:
        """The groups that have jobs."""
        return list(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def _park(self, group: Group, job: Job, *, front: bool) -> None:
        if front:
            group.parked.appendleft(job)
        else:
            group.parked.append(job)
        job.generation = PARKED
        self.parked += 1

    def _has_room(self, name: str, group: Group) -> bool:
        return not self.own(name).paused and group.active + len(group.ready) < self._limit_of(name)

    def _limit_of(self, name: str) -> int:
        return self.own(name).concurrency or self.limit

    def _forget_if_empty(self, name: str) -> None:
        if not self._groups[name]:
            del self._groups[name]

    @staticmethod
    def _name(job: Job) -> str:
        assert job.options.group is not None
        return job.options.group


PARKED = -1 << 62
"""Generation of a job that waits in its group's list."""
