"""One job: where it is in its life, why, and what can be done about it."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.client.info import JobInfo
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import SerializationError
from djqueue.core.job import JobRecord
from djqueue.core.states import PENDING, TERMINAL
from djqueue.dashboard import (
    audit,
    deletions,
    diagram,
    editing,
    flows,
    freshness,
    jobactions,
    lastactions,
    progress,
    redaction,
    rendering,
    rights,
    spans,
    subjects,
    verdicts,
    versions,
)
from djqueue.dashboard.jobactions import JobAction
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.snapshot import FRESH
from djqueue.dashboard.views import timing
from djqueue.models import BulkKind, PayloadVersion

pages = Pages()

LINES = 200
"""Log lines that are shown: the last, newest first."""
STEPS = {
    "enqueued": gettext_lazy("enqueued"),
    "started": gettext_lazy("started"),
    "released": gettext_lazy("released"),
    "retried": gettext_lazy("failed, will be retried"),
    "stalled": gettext_lazy("stalled (lease expired)"),
    "completed": gettext_lazy("completed"),
    "failed": gettext_lazy("failed"),
    "cancelled": gettext_lazy("cancelled"),
}
BAD = frozenset({"retried", "stalled", "failed"})
LENGTHS = ("timeout", "ttl", "unique_ttl", "result_ttl", "retention", "delay")
"""Options that are lengths of time, in milliseconds."""
TOLD = frozenset({"subject", "rejected"})
"""Options that the page tells elsewhere: the second is the error of a dead letter."""


class TimelineStep(NamedTuple):
    """One thing that has happened to the job."""

    label: str
    at: int
    """UTC milliseconds."""
    after: int | None
    """Milliseconds since the step before."""
    level: str
    note: str


class ShownValue(NamedTuple):
    """A value of the job, as far as it may be seen."""

    text: str
    size: int
    """Bytes that are stored."""
    hides: bool
    """Whether something of it is hidden."""


class PayloadRow(NamedTuple):
    """A payload that the job, or the one that it was made from, had before."""

    row: PayloadVersion
    payload: ShownValue | None


class Offer(NamedTuple):
    """Something that the user may do to the job, in this state or in another one."""

    page: str
    label: Any
    legal: bool
    kind: str


OFFERS: tuple[tuple[str, JobAction, Any, str], ...] = (
    ("retry", jobactions.RETRY, gettext_lazy("Retry"), "main"),
    ("promote", jobactions.PROMOTE, gettext_lazy("Run now"), "main"),
    ("cancel", jobactions.CANCEL, gettext_lazy("Cancel"), ""),
    ("remove", jobactions.REMOVE, gettext_lazy("Delete"), "danger"),
)


def _parts(request: HttpRequest) -> Hashable:
    where = request.resolver_match
    assert where is not None
    found = versions.parts(where.kwargs["queue"], where.kwargs["job_id"])
    if not found:
        request._djqueue_versions = []  # type: ignore[attr-defined]
    return (deletions.parts(request), found)


@pages.show("job", "jobs/<djq:queue>/<djq:job_id>/", rights.VIEW, parts=_parts)
def job(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Everything that is known of it, its secrets hidden."""
    return _page(request, site, queue, job_id, revealed=False)


@pages.act("reveal", "jobs/<djq:queue>/<djq:job_id>/reveal/", rights.VIEW_PAYLOAD)
def reveal(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """The same with its secrets; that they are shown is kept first."""
    return _page(request, site, queue, job_id, revealed=True)


@pages.act("retry", "jobs/<djq:queue>/<djq:job_id>/retry/", rights.RETRY)
def retry(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """A failed job runs again."""
    return _act(request, site, "retry", jobactions.RETRY, queue, job_id)


@pages.act("promote", "jobs/<djq:queue>/<djq:job_id>/promote/", rights.EDIT)
def promote(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """A delayed job runs now."""
    return _act(request, site, "promote", jobactions.PROMOTE, queue, job_id)


@pages.act("cancel", "jobs/<djq:queue>/<djq:job_id>/cancel/", rights.CANCEL)
def cancel(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """A pending job never starts, a running one is asked to stop."""
    return _act(request, site, "cancel", jobactions.CANCEL, queue, job_id)


@pages.act("remove", "jobs/<djq:queue>/<djq:job_id>/delete/", rights.DELETE)
def remove(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """The job is forgotten, with everything that is its, when the time to undo that is over."""
    record = get_storage().reads.jobs(queue, [job_id])[0]
    if record is None or not jobactions.REMOVE.legal(record.state):
        word = "not_found" if record is None else str(record.state)
        return _refused(request, site, word, queue, job_id)
    if deletions.leavings(request).job(queue, job_id) is not None:
        messages.warning(request, _("The job is already marked for deletion."))
        return site.back(request, "job", queue, job_id)
    said = _("The job will be deleted in 30 seconds.")
    which = {"ids": (job_id,), "state": str(record.state)}
    row = deletions.begin(request, BulkKind.DELETE, queue, 1, said, **which)
    audit.note(request, "remove", queue=queue, job_id=job_id, count=1, detail={"operation": row.pk})
    return site.back(request, "job", queue, job_id)


def _page(
    request: HttpRequest, site: DashboardSite, queue: str, job_id: str, *, revealed: bool
) -> HttpResponse:
    record = get_storage().reads.jobs(queue, [job_id])[0]
    crumbs = [Crumb(str(_("Queues")), site.url("queues")), Crumb(queue, site.url("queue", queue))]
    if record is None:
        gone = {"queue": queue, "job_id": job_id}
        return site.render(
            request, "gone.html", _("Job not found"), gone, tab="queues", crumbs=crumbs, status=404
        )
    if revealed:
        audit.note(request, "reveal", queue=queue, job_id=job_id, count=1)
    _limit(request, record)
    info = JobInfo(record)
    payload = _shown(record, record.payload, revealed=revealed, of=redaction.payload)
    result = _shown(record, record.result, revealed=revealed, of=redaction.result)
    old_ones = _versions(request, record, revealed=revealed)
    context = {
        "job": record,
        "versions": old_ones,
        **timing.forms_for(record),
        "edit_refusal": editing.refusal(request, record.state),
        "why": _why(request, record),
        "steps": _steps(info),
        "life": _life(info),
        "runs": list(reversed(record.all_attempts())),
        "lines": record.logs[: -LINES - 1 : -1],
        "lines_cut": max(0, len(record.logs) - LINES),
        "payload": payload,
        "result": result,
        "revealed": revealed,
        "may_reveal": not revealed
        and any(
            one is not None and one.hides for one in (payload, result, *(old.payload for old in old_ones))
        ),
        "progress": progress.shown(record.progress),
        "options": _options(record),
        "subject": _subject(request, site, record.options.subject),
        "flow": flows.around(request, queue, job_id),
        "offers": _offers(request, site, record),
        "reason": rendering.reason(record.reason) if record.reason else "",
        "is_over": record.state in TERMINAL,
    }
    return site.render(request, "job.html", record.name, context, tab="queues", crumbs=crumbs)


def _limit(request: HttpRequest, record: JobRecord) -> None:
    """Tell what of the page changes without a change of the storage's version."""
    now, ttl = SYSTEM_CLOCK.now(), record.options.result_ttl
    if record.options.subject is not None:
        freshness.limit(request, now)  # the object is one of the project's
    if record.state in PENDING:
        freshness.limit(request, now + FRESH)  # rates and groups let it start when their time has come
    elif record.finished_at and ttl is not None:
        freshness.limit(request, max(now, record.finished_at + ttl))


def _why(request: HttpRequest, record: JobRecord) -> verdicts.Reason | None:
    """Why it is not running, if that can be asked; without jobs that the user is not to know of."""
    if record.state in TERMINAL:
        return None
    found = get_storage().reads.explain(record.queue, record.id)
    return verdicts.reason(found, lambda name: rights.sees(request, name))


def _options(record: JobRecord) -> dict[str, Any]:
    """Return the options that the page shows, lengths of time with their units."""
    found = {name: value for name, value in record.options.as_dict().items() if name not in TOLD}
    found.update({name: spans.exact(found[name]) for name in LENGTHS if found.get(name) is not None})
    if rule := found.get("backoff"):
        lengths = {name: spans.exact(rule[name]) for name in ("base", "cap") if name in rule}
        found["backoff"] = ", ".join(f"{name} {value}" for name, value in {**rule, **lengths}.items())
    return found


def _subject(request: HttpRequest, site: DashboardSite, subject: str | None) -> subjects.Subject | None:
    return None if subject is None else subjects.shown(request, site.site, subject)


def _act(
    request: HttpRequest, site: DashboardSite, page: str, verb: JobAction, queue: str, job_id: str
) -> HttpResponse:
    word = verb.call(get_storage(), queue, [job_id])[0]
    if word in verb.done:
        audit.note(request, page, queue=queue, job_id=job_id, count=1)
        messages.success(request, verb.done[word] % 1)
        return site.back(request, "job", queue, job_id)
    return _refused(request, site, word, queue, job_id)


def _refused(request: HttpRequest, site: DashboardSite, word: str, queue: str, job_id: str) -> HttpResponse:
    """Back to the page, with why nothing was done, and who came before."""
    why = jobactions.REFUSALS.get(word, word)
    said = _("Not done, the job has changed: %(why)s.")
    sentence = said % {"why": str(why).replace("%d ", "")}
    messages.warning(request, f"{sentence} {lastactions.by(queue, job_id)}".rstrip())
    return site.back(request, "job", queue, job_id)


def _life(info: JobInfo) -> str:
    """Its life as a drawing, whose twin is the list of its steps."""
    events = [(moment.event, to_milliseconds(moment.at)) for moment in info.timeline]
    return diagram.draw(diagram.life(info.record.state, events, info.record.run_at))


def _steps(info: JobInfo) -> list[TimelineStep]:
    steps: list[TimelineStep] = []
    for moment in info.timeline:
        at = to_milliseconds(moment.at)
        note = moment.worker if moment.event == "started" else ""
        if moment.error is not None:
            note = f"{moment.error.type.rpartition('.')[2]}: {rendering.first_line(moment.error.message)}"
        level = "bad" if moment.event in BAD else "ok"
        after = at - steps[-1].at if steps else None
        steps.append(TimelineStep(str(STEPS.get(moment.event, moment.event)), at, after, level, note))
    return steps


def _shown(record: JobRecord, data: bytes | None, *, revealed: bool, of: Any) -> ShownValue | None:
    if data is None:
        return None
    try:
        value = of(record, revealed=revealed)
    except SerializationError as error:
        return ShownValue(_("Unreadable: %(error)s") % {"error": error}, len(data), hides=False)
    return ShownValue(rendering.text(value), len(data), redaction.hides(record, data, value))


def _rows(request: HttpRequest, queue: str, job_id: str) -> list[PayloadVersion]:
    """Its payload versions, read once for a request."""
    known: list[PayloadVersion] | None = getattr(request, "_djqueue_versions", None)
    if known is None:
        known = versions.of_job(queue, job_id)
        request._djqueue_versions = known  # type: ignore[attr-defined]
    return known


def _versions(request: HttpRequest, record: JobRecord, *, revealed: bool) -> list[PayloadRow]:
    """The payloads that it had, and that of the job that it was made from."""
    found = []
    for row in _rows(request, record.queue, record.id):
        was = versions.as_it_was(record, row)
        found.append(PayloadRow(row, _shown(was, was.payload, revealed=revealed, of=redaction.payload)))
    return found


def _offers(request: HttpRequest, site: DashboardSite, record: JobRecord) -> list[Offer]:
    return [
        Offer(page, label, verb.legal(record.state), kind)
        for page, verb, label, kind in OFFERS
        if site.may_open(request, page)
    ]
