"""Deletions that somebody has asked for: done by the workers after a time, until which they can be undone."""

import re
from collections.abc import Hashable
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest
from django.utils.translation import gettext as _

from djqueue.client import get_storage
from djqueue.core.durations import to_milliseconds
from djqueue.models import BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk

from . import tables
from .tables import alias_of, rows_of

TAG = re.compile(r"djq-(undo|undo_clean)-(\d+)\Z")
"""Of a message's tags: the page that undoes what it tells of, and the operation's number."""
OPEN = 100
"""Deletions that have not been done that are looked at: the newest."""
STATES = """\
SELECT id, kind, state FROM djqueue_bulk_operation WHERE state IN (%s, %s) ORDER BY id DESC LIMIT %s"""
"""Operations that are open, deletions and others."""


class Deletion(NamedTuple):
    """That something is to be deleted."""

    operation: int
    kind: str
    at: int
    """When it begins, in UTC milliseconds."""
    has_begun: bool

    @property
    def page(self) -> str:
        """The one that undoes it."""
        return undoing(self.kind)


class Deletions:
    """All that is to be deleted."""

    def __init__(self, *, is_known_empty: bool = False) -> None:
        self._jobs: dict[tuple[str, str], Deletion] = {}
        self._queues: dict[str, list[Deletion]] = {}
        if is_known_empty:
            return
        kinds = rows_of(BulkOperation).filter(kind__in=bulk.DELETIONS)
        found = kinds.filter(state__in=(BulkState.PLANNED, BulkState.RUNNING)).order_by("-pk")[:OPEN]
        for row in found:
            has_begun = row.state == BulkState.RUNNING
            one = Deletion(row.pk, row.kind, to_milliseconds(row.start_at), has_begun)
            selection = bulk.Selection.from_json(row.filter)
            for queue in selection.queues:
                if selection.ids:
                    self._jobs.update(((queue, job_id), one) for job_id in selection.ids)
                elif row.kind in bulk.WHOLE:
                    self._queues.setdefault(queue, []).append(one)

    def job(self, queue: str, job_id: str) -> Deletion | None:
        """Whether a job is, by its id."""
        return self._jobs.get((queue, job_id))

    def queue(self, name: str) -> list[Deletion]:
        """What is to be forgotten of a queue, newest first."""
        return self._queues.get(name, [])


def leavings(request: HttpRequest) -> Deletions:
    """What is to be deleted, read once for a request."""
    known: Deletions | None = getattr(request, "_djqueue_leavings", None)
    if known is None:
        known = Deletions()
        request._djqueue_leavings = known  # type: ignore[attr-defined]
    return known


def parts(request: HttpRequest) -> Hashable:
    """What a page of jobs shows of deletions: see `freshness.Parts`."""
    found = tables.select(BulkOperation, STATES, (BulkState.PLANNED.value, BulkState.RUNNING.value, OPEN))
    if not found:
        request._djqueue_leavings = Deletions(is_known_empty=True)  # type: ignore[attr-defined]
    return found


def begin(
    request: HttpRequest, kind: BulkKind, queue: str, expected: int, said: str, **which: Any
) -> BulkOperation:
    """Have something of a queue deleted, and say so beside a button that undoes it.

    said: what will be deleted, as a sentence.
    which: `ids`, `state`, `states` of the selection.
    """
    selection = bulk.Selection((queue,), **which)
    user: Any = request.user
    row = bulk.begin(alias_of(BulkOperation), kind, selection, user=user.get_username(), expected=expected)
    if not get_storage().workers.all():
        said = f"{said} {_('No worker runs now: it is done when one does.')}"
    messages.success(request, said, extra_tags=f"djq-{undoing(kind)}-{row.pk}")
    return row


def undoing(kind: str) -> str:
    """The page that undoes a deletion."""
    return "undo_clean" if kind in bulk.WHOLE else "undo"


class UndoButton(NamedTuple):
    """What a button beside a message does."""

    page: str
    operation: int


def undone_by(message: Any) -> UndoButton | None:
    """What undoes that of which a message tells."""
    for tag in (message.extra_tags or "").split():
        if found := TAG.match(tag):
            return UndoButton(found[1], int(found[2]))
    return None
