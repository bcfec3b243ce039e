"""The table of transitions, held against what the suite shows and what storages tell.

A case says which transitions it shows:

    @shows("claim", State.WAITING, State.ACTIVE)
    def test_a_claim_makes_a_waiting_job_active(self, storage): ...

While it runs, the events of the suite's default queue are followed; afterwards the transition must be
among them, and nothing outside the table. `TransitionsContract` fails for a row that no case shows.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from djqueue.core.job import Event
from djqueue.core.states import REUSABLE, TRANSITIONS, State, Transition

Mark = tuple[str, State, State]
"""(the transition's name, from, to)."""

F = TypeVar("F", bound=Callable[..., Any])

NOTICES = frozenset({"progress", "item", "cancel_requested", "removed"})
"""Events that report no change of state."""


def shows(name: str, sources: State | Sequence[State], targets: State | Sequence[State]) -> Callable[[F], F]:
    """Declare that a case shows a transition; for a parametrized case, with all its parameters."""
    marks = {(name, source, target) for source in _list(sources) for target in _list(targets)}

    def mark(function: F) -> F:
        function.__dict__["shows"] = marks_of(function) | marks
        return function

    return mark


def marks_of(function: Any) -> frozenset[Mark]:
    """Return the transitions that a case says it shows."""
    return frozenset(getattr(function, "shows", ()))


def marks_of_class(case: type) -> frozenset[Mark]:
    """Return the declared transitions of all cases of a class and its bases."""
    names = (name for name in dir(case) if name.startswith("test_"))
    return frozenset().union(*(marks_of(getattr(case, name)) for name in names))


def table() -> frozenset[Mark]:
    """Every single transition of the table."""
    return frozenset((row.name, row.source, target) for row in TRANSITIONS for target in row.targets)


class TransitionLog:
    """The transitions that a series of events reports."""

    def __init__(self) -> None:
        self.seen: set[Mark] = set()
        self.outside: list[tuple[Event, State | None]] = []
        """Events that no row of the table allows, with the state before."""

    def follow(self, events: Iterable[Event]) -> None:
        """Take in all events of a queue, from its first job on."""
        self.seen, self.outside = set(), []
        states: dict[str, State] = {}
        last: dict[str, str] = {}
        removed: set[str] = set()
        for event in events:
            before = states.get(event.id)
            if event.event == "removed":
                removed.add(event.id)
            elif event.event in NOTICES:
                self._expect(before == event.state == State.ACTIVE, event, before)
            elif event.event == "enqueued":
                self._queued(event, before, event.id in removed)
                removed.discard(event.id)
                states[event.id] = event.state
            elif (last.get(event.id), event.event) == ("stalled", "failed"):
                # One step with two words: it was the last stall that the job may have.
                self._expect(before == event.state == State.FAILED, event, before)
            else:
                rows = [row for row in TRANSITIONS if _fits(row, event, before)]
                self._expect(bool(rows), event, before)
                self.seen |= {(row.name, row.source, event.state) for row in rows}
                states[event.id] = event.state
            last[event.id] = event.event

    def _queued(self, event: Event, before: State | None, removed: bool) -> None:
        if before is None:
            self._expect(event.state in (State.WAITING, State.DELAYED, State.BLOCKED), event, before)
        else:
            self._expect(removed or before in REUSABLE, event, before)
            rows = [row for row in TRANSITIONS if _fits(row, event, before)]
            self.seen |= {(row.name, row.source, event.state) for row in rows}

    def _expect(self, legal: bool, event: Event, before: State | None) -> None:
        if not legal:
            self.outside.append((event, before))


def _fits(row: Transition, event: Event, before: State | None) -> bool:
    return row.event == event.event and row.source is before and event.state in row.targets


def _list(states: State | Sequence[State]) -> Sequence[State]:
    return [states] if isinstance(states, State) else states
