"""Jobs about a subject: what the page *Jobs* shows when it is asked for one."""

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue.dashboard import subjects
from djqueue.dashboard.site import Crumb, DashboardSite

LENGTH = 50
"""Jobs of a page."""


def jobs_about(request: HttpRequest, site: DashboardSite, subject: str) -> HttpResponse:
    """The jobs about it in the queues that the user sees, the newest first."""
    at = request.GET.get("at") or None
    page = subjects.about(request, subject, LENGTH, at)
    context = {
        "subject": subjects.shown(request, site.site, subject),
        "jobs": page.jobs,
        "newest": site.url("jobs", subject=subject) if at else "",
        "older": site.url("jobs", subject=subject, at=page.next) if page.next else "",
    }
    crumbs = [Crumb(str(_("Jobs")), site.url("jobs"))]
    return site.render(
        request, "jobs_about.html", _("Jobs for an object"), context, tab="jobs", crumbs=crumbs
    )
