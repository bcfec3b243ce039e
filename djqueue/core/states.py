"""The states of a job and the one table of transitions between them.

The engine's checks, the conformance suite, the admin's legal actions and the diagram in the docs are
generated from `TRANSITIONS`.
"""

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    """Ready to be claimed."""
    DELAYED = "delayed"
    """Waits for its `run_at`."""
    BLOCKED = "blocked"
    """Waits for its dependencies."""
    ACTIVE = "active"
    """Run by a worker, under a lease."""
    COMPLETED = "completed"
    """Ended successfully."""
    FAILED = "failed"
    """Ended with an error; its dead letter can be retried."""
    CANCELLED = "cancelled"
    """Cancelled before it ended."""


PENDING = frozenset({State.WAITING, State.DELAYED, State.BLOCKED})
LIVE = PENDING | {State.ACTIVE}
TERMINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
REUSABLE = frozenset({State.FAILED, State.CANCELLED})
"""States of a job whose id may be enqueued again."""


class Transition(NamedTuple):
    """One legal change of state; `event` is the event that subscribers receive."""

    name: str
    source: State
    targets: frozenset[State]
    event: str


def _row(name: str, source: State, targets: str, event: str) -> Transition:
    return Transition(name, source, frozenset(State(target) for target in targets.split()), event)


TRANSITIONS: tuple[Transition, ...] = (
    _row("claim", State.WAITING, "active", "started"),
    _row("complete", State.ACTIVE, "completed", "completed"),
    _row("retry", State.ACTIVE, "waiting delayed", "retried"),
    _row("release", State.ACTIVE, "waiting delayed", "released"),
    _row("stall", State.ACTIVE, "waiting failed", "stalled"),
    _row("fail", State.ACTIVE, "failed", "failed"),
    _row("cancel", State.WAITING, "cancelled", "cancelled"),
    _row("cancel", State.DELAYED, "cancelled", "cancelled"),
    _row("cancel", State.BLOCKED, "cancelled", "cancelled"),
    _row("cancel", State.ACTIVE, "cancelled", "cancelled"),
    _row("expire", State.WAITING, "failed", "failed"),
    _row("expire", State.DELAYED, "failed", "failed"),
    _row("expire", State.BLOCKED, "failed", "failed"),
    _row("promote", State.DELAYED, "waiting", "promoted"),
    _row("reschedule", State.WAITING, "waiting delayed", "rescheduled"),
    _row("reschedule", State.DELAYED, "waiting delayed", "rescheduled"),
    _row("unblock", State.BLOCKED, "waiting delayed", "unblocked"),
    _row("dependency_failed", State.BLOCKED, "failed", "failed"),
    _row("dependency_failed", State.BLOCKED, "cancelled", "cancelled"),
    _row("retry_dead", State.FAILED, "waiting blocked", "requeued"),
    _row("enqueue", State.FAILED, "waiting delayed blocked", "enqueued"),
    _row("enqueue", State.CANCELLED, "waiting delayed blocked", "enqueued"),
)

_ALLOWED = {(row.name, row.source, target) for row in TRANSITIONS for target in row.targets}


def allows(name: str, source: State, target: State | None = None) -> bool:
    """Return whether the transition is legal from this state (and, if given, to that one)."""
    return any((name, source, state) in _ALLOWED for state in ([target] if target else State))


def actions(source: State) -> tuple[str, ...]:
    """Return the names of the legal transitions from a state, in the order of the table."""
    return tuple(dict.fromkeys(row.name for row in TRANSITIONS if row.source is source))
