"""The actions on jobs: one table for bulk operations, the dashboard, the command line and Spark.

An outcome that is not in `Action.done` says why a job was left as it is: its state, or a word such as
`not_found`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from djqueue.core import states
from djqueue.core.states import State

from .base import Storage

Call = Callable[[Storage, str, Sequence[str]], list[str]]
"""Acts on jobs of one queue, and returns the outcome of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action on jobs of one queue."""

    name: str
    permission: str
    """Permission that it requires in the dashboard."""
    call: Call
    """Performs the action."""
    states: frozenset[State]
    """States of the jobs for which it may succeed."""
    done: frozenset[str]
    """Outcomes that count as done."""
    dry_run: Call | None = None
    """Returns the outcomes without performing the action, if the storage can tell them."""

    def apply(self, storage: Storage, queue: str, ids: Sequence[str]) -> dict[str, str]:
        """Perform the action, and return the outcomes by job."""
        return dict(zip(ids, self.call(storage, queue, ids), strict=True))


def _sources(transition: str) -> frozenset[State]:
    return frozenset(state for state in State if transition in states.actions(state))


RETRY = Action(
    name="retry",
    permission="retry_job",
    call=lambda storage, queue, ids: storage.jobs.retry(queue, ids),
    dry_run=lambda storage, queue, ids: storage.jobs.retry(queue, ids, dry_run=True),
    states=_sources("retry_dead"),
    done=frozenset({"retried", "blocked_again"}),
)
PROMOTE = Action(
    name="promote",
    permission="edit_job",
    call=lambda storage, queue, ids: [
        "promoted" if is_promoted else "not_delayed" for is_promoted in storage.jobs.promote(queue, ids)
    ],
    states=_sources("promote"),
    done=frozenset({"promoted"}),
)
CANCEL = Action(
    name="cancel",
    permission="cancel_job",
    call=lambda storage, queue, ids: [result.status for result in storage.jobs.cancel(queue, ids)],
    states=_sources("cancel"),
    done=frozenset({"cancelled", "requested"}),
)
REMOVE = Action(
    name="remove",
    permission="delete_job",
    call=lambda storage, queue, ids: [
        "removed" if is_removed else "not_removed" for is_removed in storage.jobs.remove(queue, ids)
    ],
    states=frozenset(State) - {State.ACTIVE},
    done=frozenset({"removed"}),
)
ACTIONS = (RETRY, PROMOTE, CANCEL, REMOVE)
"""All of them, in the order in which the dashboard offers them."""
DONE = frozenset[str]().union(*(action.done for action in ACTIONS))
"""Outcomes of all actions that count as done."""
