"""What the groups of a queue, and what it shares with others, are told."""

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue import Limiter, Queue
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError
from djqueue.dashboard import audit, limits, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite

from .queue import page

pages = Pages()


@pages.act("pause_group", "queues/<djq:queue>/groups/pause/", rights.PAUSE)
def pause_group(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """No job of the group starts any more; what runs goes on."""
    return _steer(request, site, queue, paused=True)


@pages.act("resume_group", "queues/<djq:queue>/groups/resume/", rights.PAUSE)
def resume_group(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """The end of a group's pause."""
    return _steer(request, site, queue, paused=False)


@pages.act("group_limits", "queues/<djq:queue>/groups/limits/", rights.CONFIGURE)
def group_limits(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Other limits of a group, or of each to which nothing else was said, from now on."""
    group = request.POST.get("group-name", "")
    form = (limits.OneGroupForm if group else limits.GroupForm)(request.POST)
    if not form.is_valid():
        return page(request, site, queue, group_form=form, group=group)
    given = {name: form.cleaned_data[name] or None for name in form.cleaned_data if name != "name"}
    found = get_storage().reads.groups(queue, 0, [group] if group else [])
    before = limits.of_group(found.named[0]) if group else limits.of_groups(found)
    try:
        Queue(queue).set_group_limit(group or None, **given)
    except DjqueueError as error:
        form.add_error(None, str(error))
        return page(request, site, queue, group_form=form, group=group)
    audit.note(request, "group_limits", queue=queue, detail={"group": group, "old": before, "new": given})
    said = _("Changed the limits of group %(group)s.") if group else _("Changed the default group limits.")
    messages.success(request, said % {"group": group})
    return site.back(request, "queue", queue, group=group)


@pages.act("limiter", "queues/<djq:queue>/limiter/", rights.CONFIGURE)
def limiter(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Other limits of what the queue shares with others, from now on."""
    name = get_settings().policy(queue).limiter
    if name is None:
        raise Http404
    if not limits.may_set(request, name):
        audit.note(request, "limiter", queue=queue, refused=True, detail={"limiter": name})
        raise PermissionDenied
    form = limits.LimiterForm(request.POST)
    if not form.is_valid():
        return page(request, site, queue, limiter_form=form)
    given = form.given()
    if not given:
        return site.back(request, "queue", queue)
    handle = Limiter(name)
    before = limits.of_limiter(handle.state())
    try:
        handle.set(**given)
    except DjqueueError as error:
        form.add_error(None, str(error))
        return page(request, site, queue, limiter_form=form)
    audit.note(request, "limiter", queue=queue, detail={"limiter": name, "old": before, "new": given})
    messages.success(request, _("Changed the limits of %(limiter)s.") % {"limiter": name})
    return site.back(request, "queue", queue)


def _steer(request: HttpRequest, site: DashboardSite, queue: str, *, paused: bool) -> HttpResponse:
    group = request.POST.get("group", "")
    handle = Queue(queue)
    [before] = get_storage().reads.groups(queue, 0, [group]).named
    if paused:
        handle.pause_group(group)
        said = _("Paused group %(group)s.")
    else:
        handle.resume_group(group)
        said = _("Resumed group %(group)s.")
    detail = {"group": group, "old": {"paused": before.paused}, "new": {"paused": paused}}
    audit.note(request, "pause_group" if paused else "resume_group", queue=queue, detail=detail)
    messages.success(request, said % {"group": group})
    return site.back(request, "queue", queue, group=group)
