"""The actions on jobs: one table for bulk operations, the dashboard and the command line.

An outcome that is not in `Action.done` says why a job was left as it is: its state, or a word such as
`not_found`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from djqueue.core import states
from djqueue.core.states import State
from djqueue.storage.base import Storage

Call = Callable[[Storage, str, Sequence[str]], list[str]]
"""Acts on jobs of one queue, and returns the outcome of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action on jobs of one queue."""

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

    def is_legal(self, state: State) -> bool:
        """Return whether the action may succeed for jobs in a state."""
        return state in self.states


def _sources(transition: str) -> frozenset[State]:
    return frozenset(state for state in State if transition in states.actions(state))


CANCEL = Action(
    call=lambda storage, queue, ids: [result.status for result in storage.jobs.cancel(queue, ids)],
    states=_sources("cancel"),
    done=frozenset({"cancelled", "requested"}),
)
PROMOTE = Action(
    call=lambda storage, queue, ids: [
        "promoted" if is_promoted else "not_delayed" for is_promoted in storage.jobs.promote(queue, ids)
    ],
    states=_sources("promote"),
    done=frozenset({"promoted"}),
)
RETRY = Action(
    call=lambda storage, queue, ids: storage.jobs.retry(queue, ids),
    dry_run=lambda storage, queue, ids: storage.jobs.retry(queue, ids, dry_run=True),
    states=_sources("retry_dead"),
    done=frozenset({"retried", "blocked_again"}),
)
REMOVE = Action(
    call=lambda storage, queue, ids: [
        "removed" if is_removed else "not_removed" for is_removed in storage.jobs.remove(queue, ids)
    ],
    states=frozenset(State) - {State.ACTIVE},
    done=frozenset({"removed"}),
)
DONE = CANCEL.done | PROMOTE.done | RETRY.done | REMOVE.done
"""Outcomes of all actions that count as done."""
