"""Who runs jobs, and what each worker can be told."""

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core import workercontrol
from djqueue.dashboard import audit, rights, workerrows
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.workerrows import WorkerRow

pages = Pages()

SAID = {
    workercontrol.QUIET: gettext_lazy("Asked worker %(worker)s to stop claiming jobs."),
    workercontrol.RESUME: gettext_lazy("Asked worker %(worker)s to resume claiming jobs."),
    workercontrol.STOP: gettext_lazy("Asked worker %(worker)s to stop."),
    workercontrol.DUMP: gettext_lazy(
        "Requested a stack dump of worker %(worker)s. The dump appears on the worker's page."
    ),
}
"""After a command."""


@pages.show("workers", "workers/", rights.VIEW, gettext_lazy("Workers"))
def workers(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Each as it last reported itself."""
    cached = workerrows.worker_rows(request)
    context = {"crew": cached.value}
    return site.render(
        request, "workers.html", _("Workers"), context, tab="workers", as_of=cached.at, away=cached.away
    )


@pages.show("worker", "workers/<djq:worker>/", rights.VIEW)
def worker(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """One of them: what it runs, and its stacks if somebody has asked for them."""
    cached = workerrows.worker_rows(request)
    seen = cached.value.find(worker)
    if seen is None:
        return _render(request, site, "no_worker.html", _("Worker not found"), {"worker": worker}, status=404)
    may_read = seen.is_open and rights.may(request, rights.WORKERS)
    context = {"seen": seen, "dump": workerrows.dump_of(seen) if may_read else None}
    return _render(request, site, "worker.html", worker, context, as_of=cached.at, away=cached.away)


@pages.act("worker_quiet", "workers/<djq:worker>/quiet/", rights.WORKERS)
def quiet(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """It claims no more; what runs goes on."""
    return _steer(request, site, worker, workercontrol.QUIET)


@pages.act("worker_resume", "workers/<djq:worker>/resume/", rights.WORKERS)
def resume(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """It claims again."""
    return _steer(request, site, worker, workercontrol.RESUME)


@pages.act("worker_stop", "workers/<djq:worker>/stop/", rights.WORKERS)
def stop(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """It ends as after a signal; asked once more before."""
    seen = _found(request, worker, workercontrol.STOP)
    if seen is None or request.POST.get("confirm") == "1":
        return _steer(request, site, worker, workercontrol.STOP)
    context = {"seen": seen, "back": request.POST.get("djq_back", "")}
    return _render(request, site, "worker_stop.html", _("Stop worker"), context, worker=worker)


@pages.act("worker_dump", "workers/<djq:worker>/dump/", rights.WORKERS)
def dump(request: HttpRequest, site: DashboardSite, worker: str) -> HttpResponse:
    """It says where its threads and tasks are."""
    return _steer(request, site, worker, workercontrol.DUMP)


def _steer(request: HttpRequest, site: DashboardSite, worker: str, command: str) -> HttpResponse:
    if _found(request, worker, command) is None:
        answer = workercontrol.NOT_FOUND
    else:
        answer = get_storage().workers.control(worker, command)
    if answer == workercontrol.ASKED:
        audit.note(request, f"worker_{command}", detail={"worker": worker})
        messages.success(request, str(SAID[command]) % {"worker": worker})
    elif answer == workercontrol.STOPPING:
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


def _render(
    request: HttpRequest,
    site: DashboardSite,
    template: str,
    title: str,
    context: dict[str, Any],
    worker: str = "",
    **about: Any,
) -> HttpResponse:
    crumbs = [Crumb(str(_("Workers")), site.url("workers"))]
    if worker:
        crumbs.append(Crumb(worker, site.url("worker", worker)))
    return site.render(request, template, title, context, tab="workers", crumbs=crumbs, **about)
