"""Actions on rows: through the storage, told to the user, and kept in the admin's log."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext, ngettext_lazy

from djqueue.client import get_storage
from djqueue.core import states
from djqueue.core.errors import DjqueueError
from djqueue.core.states import State
from djqueue.storage.base import Storage

LISTED = 10_000
"""Rows of a list, and of one action: as many as a request can take its time for."""
CHUNK = 1_000
"""Jobs of one call of the storage."""
EXAMPLES = 20
"""Rows that the question before a deletion names."""

Answers = list[str]
"""A word for each job: one of `Verb.done`, or why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Something that the storage does to jobs of one queue.

    permission: the one that it takes, without its model.
    call: (storage, queue, ids) -> a word for each.
    legal: whether a job in this state is worth asking for.
    done: for each word of success, the sentence with the number of jobs.
    log: what the admin's log says; `flag` is its kind of entry.
    """

    permission: str
    call: Callable[[Storage, str, Sequence[str]], Answers]
    legal: Callable[[State], bool]
    done: dict[str, Any]
    log: str
    flag: int = CHANGE


def _can(transition: str) -> Callable[[State], bool]:
    return lambda state: transition in states.actions(state)


CANCEL = Verb(
    permission="cancel",
    call=lambda storage, queue, ids: [answer.status for answer in storage.cancel(queue, ids)],
    legal=_can("cancel"),
    done={
        "cancelled": ngettext_lazy("%d job was cancelled.", "%d jobs were cancelled."),
        "requested": ngettext_lazy(
            "%d running job was asked to stop.", "%d running jobs were asked to stop."
        ),
    },
    log=gettext_noop("Cancelled."),
)
PROMOTE = Verb(
    permission="promote",
    call=lambda storage, queue, ids: [
        "promoted" if promoted else "not_delayed" for promoted in storage.promote(queue, ids)
    ],
    legal=_can("promote"),
    done={"promoted": ngettext_lazy("%d job may run now.", "%d jobs may run now.")},
    log=gettext_noop("Promoted."),
)
RETRY = Verb(
    permission="retry",
    call=lambda storage, queue, ids: storage.retry(queue, ids),
    legal=_can("retry_dead"),
    done={"retried": ngettext_lazy("%d job will run again.", "%d jobs will run again.")},
    log=gettext_noop("Retried."),
)
REMOVE = Verb(
    permission="delete",
    call=lambda storage, queue, ids: [
        "removed" if removed else "not_removed" for removed in storage.remove(queue, ids)
    ],
    legal=lambda state: state is not State.ACTIVE,
    done={"removed": ngettext_lazy("%d job was deleted.", "%d jobs were deleted.")},
    log="",
    flag=DELETION,
)

REFUSALS = {
    "waiting": gettext_lazy("%d waiting"),
    "delayed": gettext_lazy("%d delayed"),
    "blocked": gettext_lazy("%d waiting for other jobs"),
    "active": gettext_lazy("%d running"),
    "completed": gettext_lazy("%d completed"),
    "failed": gettext_lazy("%d failed"),
    "cancelled": gettext_lazy("%d cancelled"),
    "not_found": gettext_lazy("%d gone"),
    "not_failed": gettext_lazy("%d no longer failed"),
    "not_delayed": gettext_lazy("%d no longer delayed"),
    "not_removed": gettext_lazy("%d running or gone"),
    "unique_key_taken": gettext_lazy("%d whose unique key another job has"),
}
"""Why it was not done, with the number of jobs."""


def run(request: HttpRequest, verb: Verb, rows: QuerySet[Any]) -> list[Any]:
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


def _answers(verb: Verb, rows: Iterable[Any]) -> Iterator[tuple[Any, str]]:
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


def _tell(request: HttpRequest, verb: Verb, tally: Counter[str]) -> None:
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
