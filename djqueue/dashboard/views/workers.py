"""Workers, and commands for them."""

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.workers import ASKED, DUMP, NOT_FOUND, QUIET, RESUME, STOP, STOPPING
from djqueue.dashboard import audit, rights, workerrows
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.workerrows import WorkerRow

pages = Pages()

MESSAGES = {
    QUIET: gettext_lazy("Asked worker %(worker)s to stop claiming jobs."),
    RESUME: gettext_lazy("Asked worker %(worker)s to resume claiming jobs."),
    STOP: gettext_lazy("Asked worker %(worker)s to stop."),
    DUMP: gettext_lazy("Requested a stack dump of worker %(worker)s. The dump appears on the worker's page."),
}
"""Messages after a command."""


@pages.show("workers", "workers/", rights.VIEW, gettext_lazy("Workers"))
def workers(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List the workers with their latest heartbeats."""
    cached = workerrows.worker_rows(request)
    context = {"workers": cached.value}
    return site.render(request, "workers.html", _("Workers"), context, tab="workers", read=cached)


@pages.show("worker", "workers/<djq:worker>/", rights.VIEW)
def worker(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """Show a worker, its jobs, and its stack dump if one was requested."""
    cached = workerrows.worker_rows(request)
    seen = cached.value.find(worker)
    if seen is None:
        text = _("Worker %(worker)s was not found. The worker stopped or sent no heartbeat for a minute.") % {
            "worker": worker
        }
        link, crumbs = (_("Back to workers"), site.url("workers")), [site.crumb("workers")]
        title = _("Worker not found")
        return site.not_found(request, title, text, tab="workers", crumbs=crumbs, link=link)
    may_read = seen.is_open and rights.may(request, rights.WORKERS)
    context = {"worker": seen, "dump": get_storage().workers.dump(worker) if may_read else None}
    crumbs = [site.crumb("workers")]
    return site.render(request, "worker.html", worker, context, tab="workers", crumbs=crumbs, read=cached)


@pages.act("worker_stop", "workers/<djq:worker>/stop/", rights.WORKERS)
def stop(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """Stop the worker like a signal does, after a confirmation."""
    seen = _found(request, worker, STOP)
    if seen is None or request.POST.get("confirm") == "1":
        return _command(request, site, worker, STOP)
    context = {"worker": seen, "back": request.POST.get("djq_back", "")}
    crumbs = [site.crumb("workers"), Crumb(worker, site.url("worker", worker))]
    title = _("Stop worker")
    return site.render(request, "worker_stop.html", title, context, tab="workers", crumbs=crumbs)


def _register(command: str) -> None:
    @pages.act(f"worker_{command}", f"workers/<djq:worker>/{command}/", rights.WORKERS)
    def act(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
        return _command(request, site, worker, command)


for _name in (QUIET, RESUME, DUMP):
    _register(_name)


def _command(request: HttpRequest, site: DashboardSite, worker: str, command: str) -> HttpResponse:
    if _found(request, worker, command) is None:
        answer = NOT_FOUND
    else:
        answer = get_storage().workers.control(worker, command)
    if answer == ASKED:
        audit.note(request, f"worker_{command}", detail={"worker": worker})
        messages.success(request, str(MESSAGES[command]) % {"worker": worker})
    elif answer == STOPPING:
        messages.warning(request, _("Worker %(worker)s is already stopping.") % {"worker": worker})
    else:
        messages.warning(request, _("Worker %(worker)s no longer exists.") % {"worker": worker})
        return site.back(request, "workers")
    return site.back(request, "worker", worker)


def _found(request: HttpRequest, worker: str, command: str) -> WorkerRow | None:
    """Raises PermissionDenied if it also serves queues that the user is not to know of."""
    seen = workerrows.worker_rows(request).value.find(worker)
    if seen is not None and not seen.is_open:
        audit.note(request, f"worker_{command}", refused=True, detail={"worker": worker})
        raise PermissionDenied
    return seen
