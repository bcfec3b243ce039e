"""Overviews of queues and groups at one moment."""

from typing import NamedTuple

from .groups import GroupLimit, GroupOverview
from .limiter import Rate
from .states import State


class Totals(NamedTuple):
    """Totals of a queue since it began or, in an engine, since the process started.

    Numbers only rise. Each counts the transitions with the event in parentheses: see
    `core.states.TRANSITIONS`. An obliterated queue starts from 0.
    """

    enqueued: int = 0
    """Jobs added to the queue by an enqueue or a move (`queued`)."""
    started: int = 0
    """Attempts started (`active`)."""
    completed: int = 0
    """Jobs completed."""
    retried: int = 0
    """Failed attempts that are retried (`failing`)."""
    failed: int = 0
    """Jobs that became dead letters."""
    cancelled: int = 0
    """Jobs cancelled."""
    stalled: int = 0
    """Attempts that stalled."""


NO_TOTALS = Totals()


class QueueOverview(NamedTuple):
    """One queue."""

    name: str
    counts: dict[State, int]
    """Number of jobs by state."""
    paused: bool
    oldest_at: int | None
    """When the oldest claimable job could first be claimed, in UTC milliseconds; None: there is none.

    Of each priority, only the next job is considered; jobs that their groups hold back are not.
    """
    due_at: int | None
    """When the next delayed job is due, in UTC milliseconds."""
    rate: Rate | None
    """Current rate."""
    tokens: int | None
    """Starts that the rate allows now."""
    concurrency: int | None
    """Current limit for the weight of active jobs."""
    used: int
    """Weight of the active jobs."""
    group_mode: str
    """One of `core.queue.GROUP_MODES`."""
    group_waiting: int
    """Waiting jobs that their groups hold back."""
    names: dict[str, int]
    """Number of claimable jobs by job name."""
    totals: Totals


class GroupsOverview(NamedTuple):
    """Groups of one queue."""

    mode: str
    """One of `core.queue.GROUP_MODES`."""
    limit: int
    """Default for groups without overrides: active jobs at once."""
    rate: Rate | None
    """Default for groups without overrides: starts per time."""
    overrides: GroupLimit
    """Default set while the queue runs."""
    busiest: list[GroupOverview]
    """Groups with most waiting jobs, which come first."""
    named: list[GroupOverview]
    """Groups that were asked for by name, in that order."""
    whole: bool
    """True if all groups were considered; False if there were too many."""


class Overview(NamedTuple):
    """Some queues, or all of them by name."""

    at: int
    """The storage's time, in UTC milliseconds."""
    queues: list[QueueOverview]
