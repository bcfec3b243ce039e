"""Schedules: the list, one schedule, and actions on schedules."""

import logging

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.client.sending import enqueue
from djqueue.core.errors import DjqueueError
from djqueue.core.job import JobRecord
from djqueue.dashboard import audit, rights, schedules
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.schedules import ScheduleRow
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.tables import alias_of
from djqueue.models import CronJob
from djqueue.operations.cronjobs import batch_of

pages = Pages()

logger = logging.getLogger("djqueue.cron")


@pages.show("cron", "cron/", rights.VIEW, gettext_lazy("Cron"), schedules.parts)
def cron(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List all schedules, by next run."""
    cached = schedules.rows_for(schedules.visible(request))
    found = sorted(
        cached.value, key=lambda one: (not one.row.enabled, one.runs[:1] or [1 << 62], one.row.name)
    )
    schedules.changes_at(request, found)
    context = {"schedules": found, "limit": schedules.LIMIT}
    return site.render(request, "cron.html", _("Cron"), context, tab="cron", read=cached)


@pages.show("schedule", "cron/<int:pk>/", rights.VIEW, parts=schedules.parts)
def schedule(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Show a schedule with the outcomes of its last runs."""
    crumbs = [site.crumb("cron")]
    row = schedules.one(request, pk)
    if row is None:
        title, text = _("Schedule not found"), _("Schedule not found.")
        return site.not_found(request, title, text, tab="cron", crumbs=crumbs)
    cached = schedules.rows_for([row])
    [one] = cached.value
    schedules.changes_at(request, [one])
    context = {"one": one, "history": list(reversed(_history(one)))}
    return site.render(request, "schedule.html", row.name, context, tab="cron", crumbs=crumbs, read=cached)


@pages.act("cron_run", "cron/<int:pk>/run/", rights.CRON)
def run(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Enqueue a job of the schedule now."""
    row = schedules.one(request, pk)
    if row is None:
        return _gone(request, site)
    try:
        results = enqueue(get_storage(), batch_of(row, None))
    except DjqueueError:
        raise
    except Exception as error:
        # Raised by the project's middleware.
        logger.exception("Schedule %s: its job was not enqueued.", row.name)
        messages.error(request, _("The action failed: %(error)s") % {"error": error})
        return site.back(request, "cron")
    for result in results:
        audit.note(
            request, "cron_run", queue=result.queue, job_id=result.id, count=1, detail={"name": row.name}
        )
    messages.success(request, _("Enqueued a job for %(name)s.") % {"name": row.name})
    return site.back(request, "cron")


@pages.act("cron_switch", "cron/<int:pk>/switch/", rights.CRON)
def switch(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Enable or disable the schedule. Runs missed while disabled are not made up for."""
    row = schedules.one(request, pk)
    if row is None:
        return _gone(request, site)
    on = request.POST.get("on") == "1"
    [one] = schedules.rows_for([row]).value
    if on and not one.can_be_switched:
        messages.warning(request, _("A schedule no longer declared in code can't be enabled."))
        return site.back(request, "cron")
    if row.enabled != on:
        row.enabled = on
        row.save(using=alias_of(CronJob), update_fields=["enabled"])
        audit.note(
            request,
            "cron_switch",
            queue=one.queue,
            detail={"name": row.name, "old": {"enabled": not on}, "new": {"enabled": on}},
        )
    message = _("Enabled %(name)s.") if on else _("Disabled %(name)s.")
    messages.success(request, message % {"name": row.name})
    return site.back(request, "cron")


@pages.act("cron_delete", "cron/<int:pk>/delete/", rights.CRON)
def delete(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Delete the schedule; its jobs are kept. Entering its name confirms the deletion."""
    row = schedules.one(request, pk)
    if row is None:
        return _gone(request, site)
    [one] = schedules.rows_for([row]).value
    if not one.can_be_deleted:
        messages.warning(
            request, _("A schedule declared in code can't be deleted. Disable the schedule instead.")
        )
        return site.back(request, "schedule", pk)
    if request.POST.get("confirm") != row.name:
        messages.warning(request, _("Enter the schedule's name to confirm."))
        return site.back(request, "schedule", pk)
    row.delete(using=alias_of(CronJob))
    audit.note(request, "cron_delete", queue=one.queue, detail={"name": row.name, "job": row.job_name})
    messages.success(request, _("Deleted %(name)s.") % {"name": row.name})
    return site.back(request, "cron")


def _history(one: ScheduleRow) -> list[tuple[schedules.PastRun, JobRecord | None]]:
    """Return the last runs with their jobs, if still kept; oldest first."""
    ids = [run.id for run in one.past]
    records = get_storage().reads.jobs(one.queue, ids) if ids and one.queue else [None] * len(ids)
    return list(zip(one.past, records, strict=True))


def _gone(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    messages.warning(request, _("This schedule no longer exists."))
    return site.back(request, "cron")
