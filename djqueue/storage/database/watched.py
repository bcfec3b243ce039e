"""The events of a job, worked out from two looks at its row."""

from typing import NamedTuple

from djqueue.core.states import LIVE, PENDING, TERMINAL, State

Change = tuple[str, State, int]
"""An event, the state after it, and the number of items so far."""


class Seen(NamedTuple):
    """A job as it was seen in its row, or in an event; an event leaves some fields None."""

    state: State
    items: int = 0
    pk: int | None = None
    token: int | None = None
    failures: int | None = None
    stalls: int | None = None
    progress: bytes | None = None


def after(seen: Seen | None, event: str, state: State, items: int) -> Seen | None:
    """Return what is known of a job after an event."""
    if event == "removed":
        return None
    if event == "item":
        return Seen(state, items)
    keeps_items = seen is not None and state not in PENDING and event != "active"
    return Seen(state, seen.items if seen is not None and keeps_items else 0)


def changes(old: Seen | None, new: Seen | None) -> list[Change]:
    """Return the events between two looks at a job, as far as the later one shows them."""
    if new is None:
        return [] if old is None else [("removed", old.state, 0)]
    if old is not None and old.pk is not None and old.pk != new.pk:
        # Another job has the id of one that was removed.
        return [*changes(old, None), *changes(None, new)]
    found: list[Change] = []
    waits = new.state if new.state in PENDING else State.WAITING
    if old is None:
        found.append(("queued", waits, 0))
        old = Seen(waits, 0, new.pk, 0, 0, 0)
    state, items = old.state, old.items
    is_claimed = old.token is not None and old.token != new.token
    """Whether an attempt has begun since."""
    if state is State.ACTIVE and (is_claimed or new.state in PENDING):
        found.append((_put_back(old, new), waits, 0))
        state, items = waits, 0
    if state in TERMINAL and (is_claimed or new.state in LIVE):
        found.append(("retried", waits, 0))
        state, items = waits, 0
    if state in PENDING and (is_claimed or new.state in (State.ACTIVE, State.COMPLETED)):
        found.append(("active", State.ACTIVE, 0))
        state, items = State.ACTIVE, 0
    if new.items > items:
        found.append(("item", State.ACTIVE, new.items))
    is_known = old.pk is not None
    if new.state is State.ACTIVE and is_known and new.progress not in (None, old.progress):
        found.append(("progress", State.ACTIVE, new.items))
    if state is not new.state:
        word = _moved(state, new.state)
        if word:
            found.append((word, new.state, new.items))
    return found


def _put_back(old: Seen, new: Seen) -> str:
    if (new.failures or 0) > (old.failures or 0):
        return "failing"
    return "stalled" if (new.stalls or 0) > (old.stalls or 0) else "released"


def _moved(old: State, new: State) -> str:
    """Return the event of a change of state without an attempt."""
    if new in TERMINAL:
        return new.value
    if old is State.BLOCKED:
        return "unblocked"
    return {State.WAITING: "promoted", State.DELAYED: "delayed"}.get(new, "")
