"""Actions on the jobs that are selected in a list."""

from collections import Counter
from typing import Any

from django.contrib import messages
from django.http import HttpRequest
from django.utils.translation import gettext as _

from djqueue.client import get_storage
from djqueue.models import BulkKind

from . import audit, deletions, rights
from .converters import CONVERTER
from .jobactions import JobAction, refusals

LIMIT = 200
"""Maximum jobs of one request, more than a page lists."""


def selected(request: HttpRequest) -> dict[str, list[str]]:
    """Return the IDs of the selected jobs, by queue, without queues that the user can't see."""
    found: dict[str, list[str]] = {}
    for value in request.POST.getlist("job")[:LIMIT]:
        queue, _slash, job_id = value.partition("/")
        name = CONVERTER.to_python(queue)
        if job_id and rights.sees(request, name):
            found.setdefault(name, []).append(CONVERTER.to_python(job_id))
    return found


def act(request: HttpRequest, page: str, action: JobAction) -> None:
    """Apply an action to each selected job, show the outcome, and record it, one row per queue."""
    answers: Counter[str] = Counter()
    for queue, ids in selected(request).items():
        of_queue = action.call(get_storage(), queue, ids)
        done = [job_id for job_id, answer in zip(ids, of_queue, strict=True) if answer in action.done]
        if done:
            detail = {"jobs": [[queue, job_id] for job_id in done]}
            audit.note(request, page, queue=queue, count=len(done), detail=detail)
        answers.update(of_queue)
    for answer, count in answers.items():
        if answer in action.done:
            messages.success(request, action.done[answer] % count)
        else:
            why = refusals({answer: count})[0]
            messages.warning(request, _("Skipped: %(why)s.") % {"why": why})
    if not answers:
        messages.warning(request, _("No jobs were selected."))


def delete(request: HttpRequest, page: str, message: Any, nothing: str, **which: Any) -> None:
    """Schedule the deletion of the selected jobs.

    Args:
        message: What will be deleted: a plural string with `count` and `queue`.
        nothing: Message if no job is selected.
        which: `state` of the selection.
    """
    chosen = selected(request)
    for queue, ids in chosen.items():
        text = message % {"count": len(ids), "queue": queue}
        row = deletions.begin(request, BulkKind.DELETE, queue, len(ids), text, ids=tuple(ids), **which)
        detail = {"operation": row.pk, "jobs": [[queue, job_id] for job_id in ids]}
        audit.note(request, page, queue=queue, count=len(ids), detail=detail)
    if not chosen:
        messages.warning(request, nothing)
