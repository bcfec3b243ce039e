"""Responses that several pages of jobs share."""

from collections.abc import Sequence

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue.dashboard import auditlog, jobactions
from djqueue.dashboard.site import Crumb, DashboardSite


def queue_crumbs(site: DashboardSite, queue: str) -> list[Crumb]:
    """Return the breadcrumbs above the page of a queue's job."""
    return [site.crumb("queues"), Crumb(queue, site.url("queue", queue))]


def job_not_found(
    request: HttpRequest, site: DashboardSite, queue: str, job_id: str, tab: str, crumbs: Sequence[Crumb]
) -> HttpResponse:
    """Respond for a job that does not exist, with a link to its queue."""
    text = _(
        "Job %(job_id)s was not found in queue %(queue)s. "
        "Finished jobs are removed when their retention ends."
    ) % {"job_id": job_id, "queue": queue}
    link = _("View queue %(queue)s") % {"queue": queue}, site.url("queue", queue)
    return site.not_found(request, _("Job not found"), text, tab=tab, crumbs=crumbs, link=link)


def job_changed(
    request: HttpRequest, site: DashboardSite, answer: str, queue: str, job_id: str
) -> HttpResponse:
    """Redirect to a job that was not changed, with the reason and the last recorded action on it."""
    text = _("Action not applied, because the job has changed: %(why)s.") % {
        "why": jobactions.refusal(answer)
    }
    messages.warning(request, f"{text} {auditlog.last_action(queue, job_id)}".rstrip())
    return site.back(request, "job", queue, job_id)
