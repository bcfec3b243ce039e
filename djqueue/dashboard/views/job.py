"""The page of a job, and actions on the job."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.client.info import JobInfo
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import SerializationError
from djqueue.core.job import JobRecord
from djqueue.core.states import PENDING, TERMINAL
from djqueue.core.units import to_milliseconds
from djqueue.dashboard import (
    audit,
    deletions,
    diagram,
    editing,
    explanations,
    flows,
    freshness,
    jobactions,
    progress,
    redaction,
    rendering,
    requestcache,
    rights,
    spans,
    subjects,
    versions,
)
from djqueue.dashboard.jobactions import JobAction
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.snapshot import FRESH
from djqueue.dashboard.views import timing
from djqueue.models import BulkKind, PayloadVersion

from .responses import job_changed, job_not_found, queue_crumbs

pages = Pages()

LINES = 200
"""Maximum log lines shown, newest first."""
STEPS = {
    "enqueued": gettext_lazy("enqueued"),
    "started": gettext_lazy("started"),
    "released": gettext_lazy("released"),
    "retried": gettext_lazy("failed, will be retried"),
    "stalled": gettext_lazy("stalled (lease expired)"),
    "completed": gettext_lazy("completed"),
    "failed": gettext_lazy("failed"),
    "cancelled": gettext_lazy("cancelled"),
    "requeued": gettext_lazy("retried"),
}
BAD = frozenset({"retried", "stalled", "failed"})
LENGTHS = ("timeout", "ttl", "unique_ttl", "result_ttl", "retention", "delay")
"""Options that are durations in milliseconds."""
ELSEWHERE = frozenset({"headers", "subject", "rejected"})
"""Options that the page shows elsewhere; the last one as the error of a dead letter."""


class TimelineStep(NamedTuple):
    """An event of the timeline."""

    label: str
    at: int
    """UTC milliseconds."""
    after: int | None
    """Milliseconds since the previous event."""
    level: str
    note: str


class ShownValue(NamedTuple):
    """The visible part of a job's payload or result."""

    text: str
    size: int
    """Stored size, in bytes."""
    hides: bool
    """Whether part of the value is hidden."""


class PayloadRow(NamedTuple):
    """A previous payload of the job, or of the job that it was copied from."""

    row: PayloadVersion
    payload: ShownValue | None


class Offer(NamedTuple):
    """An action that the user may perform, at least in another state of the job."""

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
        requestcache.store(request, "versions", [])
    return (deletions.parts(request), found)


@pages.show("job", "jobs/<djq:queue>/<djq:job_id>/", rights.VIEW, parts=_parts)
def job(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the job, with secrets hidden."""
    return _render(request, site, queue, job_id, revealed=False)


@pages.act("reveal", "jobs/<djq:queue>/<djq:job_id>/reveal/", rights.VIEW_PAYLOAD)
def reveal(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the job with its secrets, and record this first."""
    return _render(request, site, queue, job_id, revealed=True)


def _register(page: str, action: JobAction, right: str) -> None:
    @pages.act(page, f"jobs/<djq:queue>/<djq:job_id>/{page}/", right)
    def act(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
        answer = action.call(get_storage(), queue, [job_id])[0]
        if answer not in action.done:
            return job_changed(request, site, answer, queue, job_id)
        audit.note(request, page, queue=queue, job_id=job_id, count=1)
        messages.success(request, action.done[answer] % 1)
        return site.back(request, "job", queue, job_id)


for _page, _action, _right in jobactions.IMMEDIATE:
    _register(_page, _action, _right)


@pages.act("remove", "jobs/<djq:queue>/<djq:job_id>/delete/", rights.DELETE)
def remove(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Delete the job after the undo period."""
    record = get_storage().reads.jobs(queue, [job_id])[0]
    if record is None or not jobactions.REMOVE.legal(record.state):
        word = "not_found" if record is None else str(record.state)
        return job_changed(request, site, word, queue, job_id)
    if deletions.pending_deletions(request).job(queue, job_id) is not None:
        messages.warning(request, _("The job is already marked for deletion."))
        return site.back(request, "job", queue, job_id)
    message = _("The job will be deleted in 30 seconds.")
    which = {"ids": (job_id,), "state": str(record.state)}
    row = deletions.begin(request, BulkKind.DELETE, queue, 1, message, **which)
    audit.note(request, "remove", queue=queue, job_id=job_id, count=1, detail={"operation": row.pk})
    return site.back(request, "job", queue, job_id)


def _render(
    request: HttpRequest, site: DashboardSite, queue: str, job_id: str, *, revealed: bool
) -> HttpResponse:
    record = get_storage().reads.jobs(queue, [job_id])[0]
    crumbs = queue_crumbs(site, queue)
    if record is None:
        return job_not_found(request, site, queue, job_id, "queues", crumbs)
    if revealed:
        audit.note(request, "reveal", queue=queue, job_id=job_id, count=1)
    _limit(request, record)
    info = JobInfo(record)
    payload = _shown(record, record.payload, revealed=revealed, of=redaction.payload)
    subject = record.options.subject
    result = _shown(record, record.result, revealed=revealed, of=redaction.result)
    headers = redaction.headers(record.options.headers, revealed=revealed)
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
        "headers": {name: rendering.text(value) for name, value in headers.items()},
        "may_reveal": not revealed
        and (
            redaction.has_secrets(headers)
            or any(
                one is not None and one.hides for one in (payload, result, *(old.payload for old in old_ones))
            )
        ),
        "progress": progress.shown(record.progress),
        "options": _options(record),
        "subject": subject and subjects.shown(request, site.site, subject),
        "flow": flows.around(request, queue, job_id),
        "offers": _offers(request, site, record),
        "reason": rendering.reason(record.reason) if record.reason else "",
        "is_over": record.state in TERMINAL,
    }
    return site.render(request, "job.html", record.name, context, tab="queues", crumbs=crumbs)


def _limit(request: HttpRequest, record: JobRecord) -> None:
    """Limit how long the page is current without a new version of the storage."""
    now, ttl = SYSTEM_CLOCK.now(), record.options.result_ttl
    if record.options.subject is not None:
        freshness.limit(request, now)  # the project may change the object
    if record.state in PENDING:
        freshness.limit(request, now + FRESH)  # rates and groups let the job start as time passes
    elif record.finished_at and ttl is not None:
        freshness.limit(request, max(now, record.finished_at + ttl))


def _why(request: HttpRequest, record: JobRecord) -> explanations.Reason | None:
    """Return why the job is not running, without naming jobs that the user can't see."""
    if record.state in TERMINAL:
        return None
    found = get_storage().reads.explain(record.queue, record.id)
    return explanations.reason(found, lambda name: rights.sees(request, name))


def _options(record: JobRecord) -> dict[str, Any]:
    """Return the options that the page shows, lengths of time with their units."""
    found = {name: value for name, value in record.options.as_dict().items() if name not in ELSEWHERE}
    found.update({name: spans.exact(found[name]) for name in LENGTHS if found.get(name) is not None})
    if rule := found.get("backoff"):
        lengths = {name: spans.exact(rule[name]) for name in ("base", "cap") if name in rule}
        found["backoff"] = ", ".join(f"{name} {value}" for name, value in {**rule, **lengths}.items())
    return found


def _life(info: JobInfo) -> str:
    """Return the diagram of the job's lifecycle; the timeline has the same content as text."""
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


def _versions(request: HttpRequest, record: JobRecord, *, revealed: bool) -> list[PayloadRow]:
    """Return the previous payloads of the job, and of the job that it was copied from."""
    found = []
    rows = requestcache.cached(request, "versions", lambda: versions.of_job(record.queue, record.id))
    for row in rows:
        was = record._replace(payload=bytes(row.payload))
        found.append(PayloadRow(row, _shown(was, was.payload, revealed=revealed, of=redaction.payload)))
    return found


def _offers(request: HttpRequest, site: DashboardSite, record: JobRecord) -> list[Offer]:
    return [
        Offer(page, label, action.legal(record.state), kind)
        for page, action, label, kind in OFFERS
        if site.may_open(request, page)
    ]
