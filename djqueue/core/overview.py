"""How the queues are, at one moment."""

from typing import NamedTuple

from .groups import GroupLimit, GroupOverview
from .limiter import Rate
from .states import State


class Totals(NamedTuple):
    """What has happened in a queue since it began, or, in an engine, since its process did.

    Each number only rises, and is that of the transitions whose event subscribers are told: see
    `core.states.TRANSITIONS`. An obliterated queue begins anew.
    """

    enqueued: int = 0
    """Jobs that came into the queue, by an enqueue or from another queue (`queued`)."""
    started: int = 0
    """Runs (`active`)."""
    completed: int = 0
    """Jobs that ended well."""
    retried: int = 0
    """Runs that failed and are followed by another (`failing`)."""
    failed: int = 0
    """Jobs that became dead letters."""
    cancelled: int = 0
    """Jobs that were taken back."""
    stalled: int = 0
    """Runs that were lost with their worker."""


NO_TOTALS = Totals()


class QueueOverview(NamedTuple):
    """One queue."""

    name: str
    counts: dict[State, int]
    """Jobs in each state."""
    paused: bool
    oldest_at: int | None
    """Since when the claimable job has waited that has waited longest, in UTC milliseconds: of each
    priority, those are looked at that are next; None: there is none. Not of jobs that their groups hold back.
    """
    due_at: int | None
    """When the next delayed job is due, in UTC milliseconds."""
    rate: Rate | None
    """Starts per time that the queue is limited to, as now."""
    tokens: int | None
    """Of those, starts that the rate has left now."""
    concurrency: int | None
    """Slots that its active jobs may take together."""
    used: int
    """Slots that they take: their weights."""
    group_mode: str
    """See `core.queue.GROUP_MODES`."""
    parked: int
    """Waiting jobs that their groups hold back."""
    names: dict[str, int]
    """Claimable jobs by job name."""
    totals: Totals


class GroupsOverview(NamedTuple):
    """Groups of one queue."""

    mode: str
    """See `core.queue.GROUP_MODES`."""
    limit: int
    """Active at once, of each group to which nothing else was said."""
    rate: Rate | None
    """Starts per time, of each of those."""
    said: GroupLimit
    """What was said to all groups while the queue ran."""
    busiest: list[GroupOverview]
    """Those with most waiting jobs, which come first."""
    named: list[GroupOverview]
    """Those that were asked for, in that order."""
    whole: bool
    """True if there were not too many groups to look at all of them."""


class Overview(NamedTuple):
    """Some queues, or all of them by name."""

    at: int
    """The storage's time, in UTC milliseconds."""
    queues: list[QueueOverview]
    capped: bool = False
    """True if these are numbers of the tables, which count 10,000 jobs of a kind at most."""
