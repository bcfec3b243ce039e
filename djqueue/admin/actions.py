"""Actions on rows: through the storage, told to the user, and kept in the admin's log."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from djqueue.client import get_storage
from djqueue.core.errors import DjqueueError
from djqueue.core.states import State
from djqueue.dashboard.jobactions import REFUSALS, JobAction

LISTED = 10_000
"""Rows of a list, and of one action: as many as a request can take its time for."""
CHUNK = 1_000
"""Jobs of one call of the storage."""
EXAMPLES = 20
"""Rows that the question before a deletion names."""


def run(request: HttpRequest, verb: JobAction, rows: QuerySet[Any]) -> list[Any]:
    """Do it to the jobs of at most `LISTED` rows; returns the rows for which it is done.

    A row without a state is a dead letter, and its job failed.
    """
    newest = list(rows.only(*_wanted(rows)).order_by("-pk")[: LISTED + 1])
    chosen = newest[:LISTED][::-1]
    tally: Counter[str] = Counter()
    done: list[Any] = []
    try:
        for row, word in _answers(verb, chosen):
            tally[word] += 1
            if word in verb.done:
                done.append(row)
    except DjqueueError as error:
        messages.error(request, _("The storage did not do it: %(error)s") % {"error": error})
    _tell(request, verb, tally)
    if not chosen:
        messages.warning(request, _("Nothing was done: what was selected is gone."))
    if len(newest) > LISTED:
        said = _("Only the newest 10,000 were looked at; the others are as they were.")
        messages.warning(request, said)
    record(request, done, verb.flag, verb.log)
    return done


def record(request: HttpRequest, rows: Sequence[Any], flag: int, text: str) -> None:
    """Entries of the admin's log, in one statement."""
    if rows and request.user.pk is not None:
        LogEntry.objects.log_actions(request.user.pk, rows, flag, text)


def ask_before_deletion(model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse:
    """The page that asks whether the chosen rows are to be deleted; its answer comes as the same action."""
    examples = list(rows.only(*_wanted(rows))[: EXAMPLES + 1])
    count = min(LISTED, rows.order_by()[: LISTED + 1].count())
    opts = model_admin.opts
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Delete multiple objects"),
        "subtitle": None,
        "objects_name": opts.verbose_name if count == 1 else opts.verbose_name_plural,
        "count": count,
        "examples": examples[:EXAMPLES],
        "others": max(0, count - EXAMPLES),
        "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
        "select_across": request.POST.get("select_across", "0"),
        "action_checkbox_name": ACTION_CHECKBOX_NAME,
        "list_url": model_admin.url("changelist"),
        "opts": opts,
        "media": model_admin.media,
    }
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "djqueue/admin/confirm_delete.html", context)


def _wanted(rows: QuerySet[Any]) -> list[str]:
    columns = {field.attname for field in rows.model._meta.concrete_fields}
    return [name for name in ("queue", "job_id", "name", "state", "reason") if name in columns]


def _answers(verb: JobAction, rows: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each row with the storage's word about it, or its state if that forbids to ask."""
    asked = []
    for row in rows:
        state = State(getattr(row, "state", State.FAILED))
        if verb.legal(state):
            asked.append(row)
        else:
            yield row, state.value
    for queue, some in _chunks(asked):
        words = verb.call(get_storage(), queue, [row.job_id for row in some])
        yield from zip(some, words, strict=True)


def _chunks(rows: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Rows of one queue together, at most `CHUNK`."""
    by_queue = attrgetter("queue")
    for queue, group in groupby(sorted(rows, key=by_queue), by_queue):
        mine = list(group)
        for start in range(0, len(mine), CHUNK):
            yield queue, mine[start : start + CHUNK]


def _tell(request: HttpRequest, verb: JobAction, tally: Counter[str]) -> None:
    for word, sentence in verb.done.items():
        if tally[word]:
            messages.success(request, sentence % tally[word])
    refused = {word: count for word, count in tally.items() if word not in verb.done}
    if refused:
        total = sum(refused.values())
        said = ngettext(
            "%(count)d job was left as it is: %(why)s.",
            "%(count)d jobs were left as they are: %(why)s.",
            total,
        )
        why = ", ".join(str(REFUSALS.get(word, f"%d {word}")) % count for word, count in refused.items())
        messages.warning(request, said % {"count": total, "why": why})
