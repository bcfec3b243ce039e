"""The URL of the health checks: include it in the project's URLs.

    path("health/", include("djqueue.health"))

It answers 200 while every check passes, and 503 otherwise.
"""

from collections.abc import Sequence

from django.conf import settings as django_settings
from django.db import Error, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .conf import get_settings
from .core.overview import Finding
from .operations.healthchecks import HealthReport, finding_document, monitor

__all__ = ["health", "urlpatterns"]


@transaction.non_atomic_requests
@require_safe
@never_cache
def health(request: HttpRequest) -> HttpResponse:
    """Return the names of the checks and whether they passed, with status 200 or 503.

    Staff with the permissions to view the dashboard and its page *System* see the findings, too.
    """
    report = monitor.report(get_settings().health)
    body = report.document()
    if found := _visible_findings(request, report):
        body["findings"] = [finding_document(finding) for finding in found]
    return JsonResponse(body, status=200 if report.is_healthy else 503)


def _visible_findings(request: HttpRequest, report: HealthReport) -> Sequence[Finding]:
    from .dashboard import problems
    from .dashboard.outages import watchdog

    # Probes have no session; without one, no database is asked, which may be what does not answer.
    if django_settings.SESSION_COOKIE_NAME not in request.COOKIES or not hasattr(request, "user"):
        return ()
    try:
        with watchdog.within(get_settings().health.timeout / 1_000):
            return problems.visible(request, report) if request.user.is_staff else ()
    except Error:
        return ()  # the session or the user can't be read; the status is the same without them


app_name = "djqueue_health"
urlpatterns = [path("", health, name="health")]
