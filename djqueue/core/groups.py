"""Keyed concurrency: limits of each group; jobs above them wait in lists of their own."""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple, TypedDict

from .enginejob import EngineJob
from .grouprates import GroupBuckets, Times
from .limiter import Rate


class GroupLimit(NamedTuple):
    """Overrides of a group's limits, set while the queue runs."""

    concurrency: int | None = None
    """Maximum number of active jobs; None: the default of the queue."""
    paused: bool = False
    rate: Rate | None = None
    """Maximum starts per time; None: the default of the queue."""
    weight: int | None = None
    """Turns for each turn of a group with weight 1; None: the default of the queue."""


NO_LIMIT = GroupLimit()


class GroupOverview(NamedTuple):
    """One group of a queue."""

    name: str
    waiting: int
    """Waiting jobs, ready or held back by the group."""
    active: int
    limit: int
    """Current maximum number of active jobs; 0: groups hold no job back."""
    rate: Rate | None
    """Current starts per time."""
    weight: int
    """Current turns for each turn of a group with weight 1."""
    paused: bool
    overrides: GroupLimit
    """Overrides, set while the queue runs."""


class GroupWords(TypedDict, total=False):
    """Changes of a group's overrides; None removes an override."""

    concurrency: int | None
    rate: Rate | None
    weight: int | None


class Group:
    """The jobs of one group."""

    __slots__ = ("active", "group_waiting", "ready")

    def __init__(self) -> None:
        self.active = 0
        self.ready: list[EngineJob] = []
        """Jobs that may be claimed: as many as the weight, and active jobs that came back."""
        self.group_waiting: deque[EngineJob] = deque()

    def __bool__(self) -> bool:
        return bool(self.active or self.ready or self.group_waiting)

    @property
    def waiting(self) -> int:
        """Number of jobs that are not active."""
        return len(self.ready) + len(self.group_waiting)


class Groups:
    """Groups of one queue. Groups without jobs are dropped; their overrides are kept.

    As many jobs of a group as its weight are ready, if its limit and its rate allow; when one is claimed, the
    next becomes ready, behind all others. So a claim never meets a job that its group holds back, and groups
    take turns by their weights, however many jobs each has. Within a group, jobs keep the order of arrival. A
    group that waits for its rate alone rests until a known time.

    Args:
        tick: returns the monotonic time in milliseconds.
    """

    __slots__ = ("_buckets", "_groups", "_own", "_tick", "group_waiting", "limit", "rate", "rests", "weights")

    def __init__(self, tick: Callable[[], int], limit: int = 1) -> None:
        self._tick = tick
        self._groups: dict[str, Group] = {}
        self._own: dict[str, GroupLimit] = {}
        self._buckets = GroupBuckets()
        self.limit = limit
        self.rate: Rate | None = None
        self.weights: Mapping[str, int] = {}
        self.rests: Times[str] = Times()
        """Times at which resting groups continue."""
        self.group_waiting = 0
        """Number of jobs held back, over all groups."""

    def admit(self, job: EngineJob, *, front: bool = False) -> bool:
        """Return whether a job may be ready now; otherwise it waits in its group, first or last."""
        name = self._name(job)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group()
        if not group.group_waiting and len(group.ready) < self._share(name, group):
            group.ready.insert(0 if front else len(group.ready), job)
            return True
        self._park(group, job, front=front)
        self._note_rest(name, group)
        return False

    def readmit(self, job: EngineJob) -> bool:
        """Like `admit`, for an active job that comes back before all others of its group."""
        name = self._name(job)
        group = self._groups[name]
        group.active -= 1
        if len(group.ready) < self._room(name, group):
            group.ready.insert(0, job)
            if name in self.rests:
                self._note_rest(name, group)
            return True
        self._park(group, job, front=True)
        self._note_rest(name, group)
        return False

    def claimed(self, job: EngineJob) -> list[EngineJob]:
        """Record that a ready job is active; return the jobs that became ready."""
        name = self._name(job)
        group = self._groups[name]
        group.ready.remove(job)
        group.active += 1
        rate = self._rate_of(name)
        if rate is not None:
            self._buckets.consume(name, rate, self._tick())
        return self.advance(name)

    def resume(self, job: EngineJob) -> None:
        """Count a job that is active already; no other job of its group is ready yet."""
        self._groups.setdefault(self._name(job), Group()).active += 1

    def leave(self, job: EngineJob, *, was_ready: bool) -> list[EngineJob]:
        """Record that a job is no longer ready or active; return the jobs that became ready."""
        group = self._groups[self._name(job)]
        if was_ready:
            group.ready.remove(job)
        else:
            group.active -= 1
        return self.advance(self._name(job))

    def remove(self, job: EngineJob) -> list[EngineJob]:
        """Remove a waiting job of a group; return the jobs that became ready if the group's rest is over."""
        name = self._name(job)
        group = self._groups[name]
        group.group_waiting.remove(job)
        self.group_waiting -= 1
        job.generation = 0
        if not group.group_waiting:
            self.rests.drop(name)
        return self.advance(name)

    def advance(self, name: str) -> list[EngineJob]:
        """Return the next jobs of a group that may be ready."""
        group = self._groups.get(name)
        if group is None:
            return []
        freed: list[EngineJob] = []
        if group.group_waiting:
            room = self._share(name, group) - len(group.ready)
            while room > 0 and group.group_waiting:
                job = group.group_waiting.popleft()
                job.generation = 0
                self.group_waiting -= 1
                group.ready.append(job)
                freed.append(job)
                room -= 1
            self._note_rest(name, group)
        self._forget_if_empty(name)
        return freed

    def hold_back(self, name: str) -> list[EngineJob]:
        """Take out ready jobs of a group that may no longer be ready, last first; the caller parks them."""
        group = self._groups.get(name)
        if group is None:
            return []
        room = max(0, self._room(name, group))
        held, group.ready = group.ready[room:], group.ready[:room]
        return held[::-1]

    def park(self, job: EngineJob) -> None:
        """Put a job that is in no list before the waiting jobs of its group."""
        self._park(self._groups[self._name(job)], job, front=True)

    def own(self, name: str) -> GroupLimit:
        """Return the overrides of a group."""
        return self._own.get(name, NO_LIMIT)

    def set_own(self, name: str, limit: GroupLimit) -> None:
        """Replace the overrides of a group."""
        if limit == NO_LIMIT:
            self._own.pop(name, None)
        else:
            self._own[name] = limit

    def limit_of(self, name: str) -> int:
        """Return the maximum number of active jobs of a group."""
        return self.own(name).concurrency or self.limit

    def before(self, job: EngineJob) -> int:
        """Return the number of jobs before a waiting job of a group, without active ones."""
        group = self._groups[self._name(job)]
        return len(group.ready) + group.group_waiting.index(job)

    def overview(self, name: str) -> GroupOverview:
        """Return a group as it is now."""
        group, own = self._groups.get(name), self.own(name)
        return GroupOverview(
            name,
            0 if group is None else group.waiting,
            0 if group is None else group.active,
            self.limit_of(name),
            self._rate_of(name),
            self._weight_of(name),
            own.paused,
            own,
        )

    def busiest(self, limit: int, considered: int) -> list[str]:
        """Return the groups with most waiting jobs, considering the first `considered` groups."""
        groups = islice(self._groups.items(), considered)
        found = ((-group.waiting, name) for name, group in groups if group.waiting)
        return [name for _, name in heapq.nsmallest(limit, found)]

    def overrides(self) -> dict[str, GroupLimit]:
        """Return the overrides of all groups."""
        return dict(self._own)

    def names(self) -> list[str]:
        """Return the names of the groups that have jobs."""
        return list(self._groups)

    def forget_full(self) -> None:
        """Drop buckets that are full again."""
        if self._buckets:
            self._buckets.forget_full(self._tick())

    def __len__(self) -> int:
        return len(self._groups)

    def _park(self, group: Group, job: EngineJob, *, front: bool) -> None:
        if front:
            group.group_waiting.appendleft(job)
        else:
            group.group_waiting.append(job)
        job.generation = GROUP_WAITING
        self.group_waiting += 1

    def _share(self, name: str, group: Group) -> int:
        """Return how many jobs of a group may be ready for it to take its turns."""
        return min(self._weight_of(name), self._room(name, group))

    def _room(self, name: str, group: Group) -> int:
        """Return how many jobs of a group may be ready if all of them may start."""
        own = self.own(name)
        if own.paused:
            return 0
        room = self.limit_of(name) - group.active
        rate = self._rate_of(name)
        if rate is None or room <= 0:
            return room
        return min(room, self._buckets.available(name, rate, self._tick()))

    def _note_rest(self, name: str, group: Group) -> None:
        """Let a group rest if its rate alone holds back its next job."""
        rate = self._rate_of(name)
        if rate is None:
            if self.rests:
                self.rests.drop(name)
            return
        own, ready, tick = self.own(name), len(group.ready), self._tick()
        room = min(self.limit_of(name) - group.active, self._weight_of(name), rate.capacity)
        if not group.group_waiting or own.paused or ready >= room:
            self.rests.drop(name)
        else:
            self.rests.set(name, self._buckets.available_at(name, rate, ready + 1, tick))

    def _rate_of(self, name: str) -> Rate | None:
        return self.own(name).rate or self.rate

    def _weight_of(self, name: str) -> int:
        return self.own(name).weight or self.weights.get(name, 1)

    def _forget_if_empty(self, name: str) -> None:
        if not self._groups[name]:
            del self._groups[name]

    @staticmethod
    def _name(job: EngineJob) -> str:
        assert job.options.group is not None
        return job.options.group


GROUP_WAITING = -1 << 62
"""Generation of a job that waits in its group's list."""
