"""The events between two looks at the row of a job."""

import pytest

from djqueue.core.states import State
from djqueue.storage.database.events import Seen, changes_between, seen_after

WAITING = Seen(State.WAITING, 0, 1, 0, 0, 0)
ACTIVE = Seen(State.ACTIVE, 0, 1, 11, 0, 0)
COMPLETED = ACTIVE._replace(state=State.COMPLETED)
DELAYED = WAITING._replace(state=State.DELAYED, run_at=1_000)


def words(old, new):
    return [change[0] for change in changes_between(old, new)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (None, None, []),
        (WAITING, WAITING, []),
        (None, WAITING, ["enqueued"]),
        (None, WAITING._replace(state=State.DELAYED), ["enqueued"]),
        (None, ACTIVE, ["enqueued", "started"]),
        (None, COMPLETED, ["enqueued", "started", "completed"]),
        (WAITING, ACTIVE, ["started"]),
        (WAITING, COMPLETED, ["started", "completed"]),
        (WAITING, WAITING._replace(state=State.CANCELLED), ["cancelled"]),
        (WAITING._replace(state=State.DELAYED), WAITING, ["promoted"]),
        (WAITING._replace(state=State.BLOCKED), WAITING, ["unblocked"]),
        (WAITING, WAITING._replace(state=State.DELAYED), ["rescheduled"]),
        (DELAYED, DELAYED, []),
        (DELAYED, DELAYED._replace(run_at=2_000), ["rescheduled"]),
        (ACTIVE, COMPLETED, ["completed"]),
        (ACTIVE, COMPLETED._replace(state=State.FAILED), ["failed"]),
        (ACTIVE, WAITING._replace(token=11, failures=1), ["retried"]),
        (ACTIVE, WAITING._replace(token=11, stalls=1), ["stalled"]),
        (ACTIVE, WAITING._replace(token=11), ["released"]),
        (ACTIVE, ACTIVE._replace(token=12, failures=1), ["retried", "started"]),
        (ACTIVE, ACTIVE._replace(items=3), ["item"]),
        (ACTIVE, COMPLETED._replace(items=3), ["item", "completed"]),
        (ACTIVE, ACTIVE._replace(progress=b"1"), ["progress"]),
        (COMPLETED._replace(state=State.FAILED), WAITING._replace(token=11), ["requeued"]),
        (COMPLETED._replace(state=State.FAILED), ACTIVE._replace(token=12), ["requeued", "started"]),
        (COMPLETED, None, ["removed"]),
        (COMPLETED, WAITING._replace(pk=2), ["removed", "enqueued"]),
    ],
)
def test_changes_between_two_looks(old, new, expected):
    assert words(old, new) == expected


@pytest.mark.parametrize(
    ("event", "state", "row"),
    [
        ("enqueued", State.WAITING, WAITING),
        ("started", State.ACTIVE, ACTIVE),
        ("started", State.ACTIVE, ACTIVE._replace(token=12, failures=1)),
        ("retried", State.DELAYED, WAITING._replace(state=State.DELAYED, token=11, failures=1)),
        ("completed", State.COMPLETED, COMPLETED),
        ("progress", State.ACTIVE, ACTIVE._replace(progress=b"1")),
    ],
)
def test_what_an_event_has_told_is_not_news_in_the_row(event, state, row):
    seen = None if event == "enqueued" else WAITING

    assert words(seen_after(seen, event, state, 0), row) == []


def test_items_that_an_event_has_counted_are_not_news():
    seen = seen_after(ACTIVE, "item", State.ACTIVE, 3)

    assert words(seen, ACTIVE._replace(items=3)) == []
    assert changes_between(seen, ACTIVE._replace(items=5)) == [("item", State.ACTIVE, 5)]
    assert words(seen_after(seen, "completed", State.COMPLETED, 0), COMPLETED._replace(items=3)) == []


def test_next_attempt_counts_its_items_from_the_first():
    seen = seen_after(seen_after(ACTIVE, "item", State.ACTIVE, 3), "started", State.ACTIVE, 0)

    assert changes_between(seen, ACTIVE._replace(items=2)) == [("item", State.ACTIVE, 2)]


def test_removed_job_is_gone():
    assert seen_after(COMPLETED, "removed", State.COMPLETED, 0) is None
