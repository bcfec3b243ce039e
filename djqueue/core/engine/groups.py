"""Keyed concurrency: the limit and the rate of each group; jobs above them wait in lists of their own.

A group is the jobs of one queue that share a concurrency key.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Generic, TypeVar

from ..enginejob import EngineJob
from ..overview import KeyOverview
from ..policies import NO_LIMIT, KeyLimit, Rate

K = TypeVar("K", str, tuple[str, Rate])
STALE = 64
"""Number of stale entries, beyond twice the live ones, at which they are removed."""


class Times(Generic[K]):
    """Times by name, earliest first, then by name: a heap with lazy removal."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, K]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, name: K) -> bool:
        return name in self._at

    def set(self, name: K, at: int) -> None:
        """Set the time of a name."""
        if self._at.get(name) == at:
            return
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))
        self._compact()

    def drop(self, name: K) -> None:
        """Remove a name."""
        if self._at.pop(name, None) is not None:
            self._compact()

    def of(self, name: K) -> int | None:
        """Return the time of a name."""
        return self._at.get(name)

    def next(self) -> int | None:
        """Return the earliest time."""
        while self._heap:
            at, name = self._heap[0]
            if self._at.get(name) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, tick: int) -> list[K]:
        """Remove and return the names whose time has come, in their order."""
        names = []
        while (at := self.next()) is not None and at <= tick:
            name = heapq.heappop(self._heap)[1]
            del self._at[name]
            names.append(name)
        return names

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._at) + STALE:
            self._heap = [entry for entry in self._heap if self._at.get(entry[1]) == entry[0]]
            heapq.heapify(self._heap)


class GroupBuckets:
    """Token buckets of groups.

    Only the time at which a bucket will be full is kept, from which everything else follows; full buckets are
    not kept. A bucket belongs to one rate: under another rate, the group has another bucket. Times are
    monotonic milliseconds, divided into as many parts as the rate's capacity, so that a token is a whole
    number of parts.
    """

    __slots__ = ("_full_at", "_times")

    def __init__(self) -> None:
        self._full_at: dict[tuple[str, Rate], int] = {}
        self._times: Times[tuple[str, Rate]] = Times()
        """Times at which buckets may be full."""

    def __len__(self) -> int:
        return len(self._full_at)

    def available(self, group: str, rate: Rate, tick: int) -> int:
        """Return the number of whole tokens."""
        return (rate.capacity * rate.per - self._missing(group, rate, tick)) // rate.per

    def available_at(self, group: str, rate: Rate, tokens: int, tick: int) -> int:
        """Return when this many tokens will be available, up to the rate's capacity."""
        late = self._missing(group, rate, tick) - (rate.capacity - tokens) * rate.per
        return tick + max(0, -(-late // rate.capacity))

    def consume(self, group: str, rate: Rate, tick: int) -> None:
        """Take a token that `available` has returned."""
        key = (group, rate)
        full_at = tick * rate.capacity + self._missing(group, rate, tick) + rate.per
        self._full_at[key] = full_at
        if key not in self._times:
            self._times.set(key, -(-full_at // rate.capacity))

    def forget_full(self, tick: int) -> None:
        """Drop buckets that are full again."""
        for key in self._times.due(tick):
            at = -(-self._full_at[key] // key[1].capacity)
            if at > tick:
                self._times.set(key, at)
            else:
                del self._full_at[key]

    def _missing(self, group: str, rate: Rate, tick: int) -> int:
        full_at = self._full_at.get((group, rate))
        return 0 if full_at is None else max(0, full_at - tick * rate.capacity)


class Group:
    """The jobs of one group."""

    __slots__ = ("active", "group_waiting", "ready")

    def __init__(self) -> None:
        self.active = 0
        self.ready: OrderedDict[EngineJob, None] = OrderedDict()
        """Jobs that may be claimed: as many as the weight, and active jobs that came back."""
        self.group_waiting: OrderedDict[EngineJob, None] = OrderedDict()

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
    group that waits for its rate alone rests until a known time. Groups continue in the order of these times,
    and by name if they are equal, also after a restart.

    Args:
        tick: returns the monotonic time in milliseconds.
    """

    __slots__ = ("_buckets", "_groups", "_own", "_tick", "group_waiting", "limit", "rate", "rests", "weights")

    def __init__(self, tick: Callable[[], int], limit: int = 1) -> None:
        self._tick = tick
        self._groups: dict[str, Group] = {}
        self._own: dict[str, KeyLimit] = {}
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
            _add(group.ready, job, front=front)
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
            _add(group.ready, job, front=True)
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
        del group.ready[job]
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
            del group.ready[job]
        else:
            group.active -= 1
        return self.advance(self._name(job))

    def remove(self, job: EngineJob) -> list[EngineJob]:
        """Remove a waiting job of a group; return the jobs that became ready if the group's rest is over."""
        name = self._name(job)
        group = self._groups[name]
        del group.group_waiting[job]
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
                job = group.group_waiting.popitem(last=False)[0]
                job.generation = 0
                self.group_waiting -= 1
                group.ready[job] = None
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
        return [group.ready.popitem()[0] for _ in range(len(group.ready) - room)]

    def park(self, job: EngineJob) -> None:
        """Put a job that is in no list before the waiting jobs of its group."""
        self._park(self._groups[self._name(job)], job, front=True)

    def own(self, name: str) -> KeyLimit:
        """Return the overrides of a group."""
        return self._own.get(name, NO_LIMIT)

    def set_own(self, name: str, limit: KeyLimit) -> None:
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
        return len(group.ready) + next(at for at, other in enumerate(group.group_waiting) if other is job)

    def held_back(self) -> Iterator[EngineJob]:
        """Yield the jobs that are held back, those of each group in their order."""
        return chain.from_iterable(group.group_waiting for group in self._groups.values())

    def overview(self, name: str) -> KeyOverview:
        """Return a group as it is now."""
        group, own = self._groups.get(name), self.own(name)
        return KeyOverview(
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
        waiting = ((-group.waiting, name) for name, group in groups if group.waiting)
        return [name for _, name in heapq.nsmallest(limit, waiting)]

    def overrides(self) -> dict[str, KeyLimit]:
        """Return the overrides of all groups."""
        return dict(self._own)

    def names(self) -> list[str]:
        """Return the names of the groups that have jobs, sorted: a restart changes nothing in their order."""
        return sorted(self._groups)

    def forget_full(self) -> None:
        """Drop buckets that are full again."""
        if self._buckets:
            self._buckets.forget_full(self._tick())

    def __len__(self) -> int:
        return len(self._groups)

    def _park(self, group: Group, job: EngineJob, *, front: bool) -> None:
        _add(group.group_waiting, job, front=front)
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
            return
        at, before = self._buckets.available_at(name, rate, ready + 1, tick), self.rests.of(name)
        if before is None or before > tick or at > tick:
            self.rests.set(name, at)
        # Otherwise its rest is over already: the group keeps its turn until it continues.

    def _rate_of(self, name: str) -> Rate | None:
        return self.own(name).rate or self.rate

    def _weight_of(self, name: str) -> int:
        return self.own(name).weight or self.weights.get(name, 1)

    def _forget_if_empty(self, name: str) -> None:
        if not self._groups[name]:
            del self._groups[name]

    @staticmethod
    def _name(job: EngineJob) -> str:
        assert job.options.concurrency_key is not None
        return job.options.concurrency_key


def _add(jobs: OrderedDict[EngineJob, None], job: EngineJob, *, front: bool) -> None:
    jobs[job] = None
    if front:
        jobs.move_to_end(job, last=False)


GROUP_WAITING = -1 << 62
"""Generation of a job that waits in its group's list."""
