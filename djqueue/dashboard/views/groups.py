"""Actions on a queue's groups and on its shared limiter."""

from functools import partial
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue import Limiter, Queue
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.dashboard import audit, limits, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite

from .queue import change_limits

pages = Pages()


@pages.act("pause_group", "queues/<djq:queue>/groups/pause/", rights.PAUSE)
def pause_group(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Pause the group. Active jobs go on."""
    return _set_paused(request, site, queue, paused=True)


@pages.act("resume_group", "queues/<djq:queue>/groups/resume/", rights.PAUSE)
def resume_group(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Resume the group."""
    return _set_paused(request, site, queue, paused=False)


@pages.act("group_limits", "queues/<djq:queue>/groups/limits/", rights.CONFIGURE)
def group_limits(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Change the limits of a group, or the default group limits."""
    group = request.POST.get("group-name", "")

    def read() -> dict[str, Any]:
        found = get_storage().reads.groups(queue, 0, [group] if group else [])
        return limits.of_group(found.named[0]) if group else limits.of_groups(found)

    message = _("Changed the limits of group %(group)s.") if group else _("Changed the default group limits.")
    return change_limits(
        request,
        site,
        queue,
        "group_limits",
        "group_form",
        (limits.OneGroupForm if group else limits.GroupForm)(request.POST),
        read,
        partial(Queue(queue).set_group_limit, group or None),
        message % {"group": group},
        {"group": group},
        group=group,
    )


@pages.act("limiter", "queues/<djq:queue>/limiter/", rights.CONFIGURE)
def limiter(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Change the limits of the shared limiter."""
    name = get_settings().policy(queue).limiter
    if name is None:
        raise Http404
    if not limits.may_set(request, name):
        audit.note(request, "limiter", queue=queue, refused=True, detail={"limiter": name})
        raise PermissionDenied
    handle = Limiter(name)
    return change_limits(
        request,
        site,
        queue,
        "limiter",
        "limiter_form",
        limits.LimiterForm(request.POST),
        lambda: limits.of_limiter(handle.state()),
        handle.set,
        _("Changed the limits of %(limiter)s.") % {"limiter": name},
        {"limiter": name},
    )


def _set_paused(request: HttpRequest, site: DashboardSite, queue: str, *, paused: bool) -> HttpResponse:
    group = request.POST.get("group", "")
    handle = Queue(queue)
    [before] = get_storage().reads.groups(queue, 0, [group]).named
    if paused:
        handle.pause_group(group)
        message = _("Paused group %(group)s.")
    else:
        handle.resume_group(group)
        message = _("Resumed group %(group)s.")
    detail = {"group": group, "old": {"paused": before.paused}, "new": {"paused": paused}}
    audit.note(request, "pause_group" if paused else "resume_group", queue=queue, detail=detail)
    messages.success(request, message % {"group": group})
    return site.back(request, "queue", queue, group=group)
