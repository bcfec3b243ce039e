"""The URL of the health checks: include it in the project's URLs.

    path("health/", include("djqueue.health"))

It answers 200 while every check passes, and 503 otherwise.
"""

from django.conf import settings as django_settings
from django.db import Error, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .conf import get_settings
from .operations.healthchecks import HealthReport, finding_document, monitor

__all__ = ["health", "urlpatterns"]


@transaction.non_atomic_requests
@require_safe
@never_cache
def health(request: HttpRequest) -> HttpResponse:
    """Return the names of the checks and whether they passed, with status 200 or 503.

    Staff with the permissions to view the dashboard and its page *Storage* see the findings, too.
    """
    report = monitor.report(get_settings().health)
    body = report.document()
    if not report.is_healthy and _may_see_findings(request, report):
        body["findings"] = [finding_document(finding) for finding in report.findings]
    return JsonResponse(body, status=200 if report.is_healthy else 503)


def _may_see_findings(request: HttpRequest, report: HealthReport) -> bool:
    from .dashboard import rights
    from .dashboard.outages import watchdog

    # Probes have no session; without one, no database is asked, which may be what does not answer.
    if django_settings.SESSION_COOKIE_NAME not in request.COOKIES or not hasattr(request, "user"):
        return False
    try:
        with watchdog.within(get_settings().health.timeout / 1_000):
            # Findings name queues, hosts and addresses.
            if not request.user.is_staff or not rights.may(request, rights.STORAGE):
                return False
            queues = report.facts.overview.queues if report.facts is not None else ()
            return rights.sees_each(request, (queue.name for queue in queues))
    except Error:
        return False  # the session or the user can't be read; the status is the same without them


app_name = "djqueue_health"
urlpatterns = [path("", health, name="health")]
