"""Deletions requested on the dashboard: workers perform them after a delay in which they can be undone."""

import re
from collections.abc import Hashable
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest
from django.utils.translation import gettext as _

from djqueue.client import get_storage
from djqueue.core.units import to_milliseconds
from djqueue.models import BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk

from . import requestcache, tables
from .tables import alias_of, rows_of

TAG = re.compile(r"djq-(undo|undo_clean)-(\d+)\Z")
"""A tag of a message: the page that undoes the deletion, and the key of the operation."""
OPEN = 100
"""Maximum pending deletions examined, newest first."""
STATES = """\
SELECT id, kind, state FROM djqueue_bulk_operation WHERE state IN (%s, %s) ORDER BY id DESC LIMIT %s"""
"""Selects open operations, deletions and others."""


class Deletion(NamedTuple):
    """A pending deletion."""

    operation: int
    kind: str
    at: int
    """Start time, in UTC milliseconds."""
    has_begun: bool

    @property
    def page(self) -> str:
        """The page that undoes the deletion."""
        return undoing(self.kind)


class PendingDeletions:
    """All pending deletions."""

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
        """Return the pending deletion of a job, if the job was selected by its ID."""
        return self._jobs.get((queue, job_id))

    def queue(self, name: str) -> list[Deletion]:
        """Return the pending deletions that cover a whole queue, newest first."""
        return self._queues.get(name, [])


def pending_deletions(request: HttpRequest) -> PendingDeletions:
    """Return the pending deletions, read once per request."""
    return requestcache.cached(request, "deletions", PendingDeletions)


def parts(request: HttpRequest) -> Hashable:
    """Return what a page of jobs shows of deletions: see `freshness.Parts`."""
    found = tables.select(BulkOperation, STATES, (BulkState.PLANNED.value, BulkState.RUNNING.value, OPEN))
    if not found:
        requestcache.store(request, "deletions", PendingDeletions(is_known_empty=True))
    return found


def begin(
    request: HttpRequest, kind: BulkKind, queue: str, expected: int, message: str, **which: Any
) -> BulkOperation:
    """Schedule a deletion, and show a message with an undo button.

    Args:
        message: What will be deleted, as a sentence.
        which: `ids`, `state` and `states` of the selection.
    """
    selection = bulk.Selection((queue,), **which)
    user: Any = request.user
    row = bulk.begin(alias_of(BulkOperation), kind, selection, user=user.get_username(), expected=expected)
    if not get_storage().workers.all():
        waits = _("No worker is running. The deletion starts once a worker does.")
        message = f"{message} {waits}"
    messages.success(request, message, extra_tags=f"djq-{undoing(kind)}-{row.pk}")
    return row


def undoing(kind: str) -> str:
    """Return the page that undoes a kind of deletion."""
    return "undo_clean" if kind in bulk.WHOLE else "undo"


class UndoButton(NamedTuple):
    """The undo button of a message."""

    page: str
    operation: int


def undo_button(message: Any) -> UndoButton | None:
    """Return the undo button of a message, if the message has one."""
    for tag in (message.extra_tags or "").split():
        if found := TAG.match(tag):
            return UndoButton(found[1], int(found[2]))
    return None
