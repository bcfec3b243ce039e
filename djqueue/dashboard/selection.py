"""What is done to the jobs that are ticked in a list."""

from collections import Counter

from django.contrib import messages
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.client import get_storage
from djqueue.models import BulkKind

from . import audit, deletions, rights
from .addresses import CONVERTER
from .jobactions import REFUSALS, JobAction

MOST = 200
"""Jobs of one request: more than a page lists."""


def ticked(request: HttpRequest) -> dict[str, list[str]]:
    """Ids by queue, of queues that the user sees."""
    found: dict[str, list[str]] = {}
    for value in request.POST.getlist("job")[:MOST]:
        queue, _slash, job_id = value.partition("/")
        name = CONVERTER.to_python(queue)
        if job_id and rights.sees(request, name):
            found.setdefault(name, []).append(CONVERTER.to_python(job_id))
    return found


def act(request: HttpRequest, page: str, verb: JobAction) -> int:
    """Do it to each that is ticked, say what came of it, and keep it, a row for each queue.

    Returns the number of jobs that it was done to.
    """
    words: Counter[str] = Counter()
    for queue, ids in ticked(request).items():
        answers = verb.call(get_storage(), queue, ids)
        done = [job_id for job_id, word in zip(ids, answers, strict=True) if word in verb.done]
        if done:
            audit.note(
                request,
                page,
                queue=queue,
                count=len(done),
                detail={"jobs": [[queue, job_id] for job_id in done]},
            )
        words.update(answers)
    for word, count in words.items():
        if word in verb.done:
            messages.success(request, verb.done[word] % count)
        else:
            said = _("Not done: %(why)s.") % {"why": str(REFUSALS.get(word, f"%d {word}")) % count}
            messages.warning(request, said)
    if not words:
        messages.warning(request, _("No jobs were selected."))
    return sum(count for word, count in words.items() if word in verb.done)


def delete(request: HttpRequest, page: str) -> None:
    """Have them deleted when the time to undo that is over."""
    chosen = ticked(request)
    for queue, ids in chosen.items():
        said = ngettext(
            "%(count)d job of %(queue)s will be deleted in 30 seconds.",
            "%(count)d jobs of %(queue)s will be deleted in 30 seconds.",
            len(ids),
        )
        about = {"count": len(ids), "queue": queue}
        row = deletions.begin(request, BulkKind.DELETE, queue, len(ids), said % about, ids=tuple(ids))
        detail = {"operation": row.pk, "jobs": [[queue, job_id] for job_id in ids]}
        audit.note(request, page, queue=queue, count=len(ids), detail=detail)
    if not chosen:
        messages.warning(request, _("No jobs were selected."))
