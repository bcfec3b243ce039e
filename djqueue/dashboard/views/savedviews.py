"""Saved views of the list of jobs: filters under a name, of one user or shared.

A view is kept by the row of the activity about saving it, until a later one replaces or deletes it.
"""

from typing import Any, NamedTuple

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue.core.logs import Log
from djqueue.dashboard import audit, boards, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.models import AuditEvent

logger = Log("djqueue.dashboard")
pages = Pages()
SAVE, SHARE, DELETE = ACTIONS = ("view_save", "view_share", "view_delete")
"""Actions in the activity."""
FIELDS = (
    *("state", "queue", "name", "argument", "error"),
    *("id", "tag", "worker", "priority", "since", "until"),
)
"""Parameters of the list that a view keeps."""
MAX_NAME = 60
"""Maximum characters of a view's name."""
MAX_ROWS = 1_000
"""Newest rows of the activity from which views are known."""
FRESH = 5_000
"""Milliseconds before the views are read again."""


class SavedView(NamedTuple):
    """A view."""

    pk: int
    """Key of the row about saving it."""
    name: str
    query: dict[str, str]
    user: str
    user_pk: str
    is_shared: bool

    @property
    def queue(self) -> str:
        return self.query.get("queue", "")


class ViewLink(NamedTuple):
    """A view on the page."""

    view: SavedView
    url: str
    may_delete: bool


def links(request: HttpRequest, site: DashboardSite) -> list[ViewLink]:
    """Return the views of the user, and the shared ones that the user may see, by name."""
    known = read_cache.read("views", _read, fresh=FRESH).value
    return [
        ViewLink(one, site.url("jobs", **one.query), _may_delete(request, one))
        for one in sorted(known, key=lambda one: one.name.casefold())
        if (one.is_shared or is_own(request, one.user_pk)) and sees(request, one.queue, one.user_pk)
    ]


def is_own(request: HttpRequest, user_pk: str) -> bool:
    """Return whether a view belongs to the user."""
    return str(request.user.pk) == user_pk


def sees(request: HttpRequest, queue: str, user_pk: str) -> bool:
    """Return whether the user may know of a view, which may name its queue, or any if it has none."""
    if queue:
        return rights.sees(request, queue)
    return is_own(request, user_pk) or boards.sees_all(request)


@pages.act(SAVE, "views/save/", rights.SAVE_VIEW)
def save(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Save the filter of the list for the user."""
    return _save(request, site, SAVE)


@pages.act(SHARE, "views/share/", rights.SHARE_VIEW)
def share(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Save the filter of the list for everyone who may see it."""
    return _save(request, site, SHARE)


@pages.act(DELETE, "views/<int:pk>/delete/", rights.SAVE_VIEW)
def delete(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Delete a view."""
    found = next((one for one in links(request, site) if one.view.pk == pk), None)
    if found is None:
        messages.warning(request, _("This view no longer exists."))
        return site.back(request, "jobs")
    view = found.view
    detail = {"view": view.name, "owner": view.user_pk}
    audit.note(request, DELETE, queue=view.queue, detail=detail, refused=not found.may_delete)
    if not found.may_delete:
        raise PermissionDenied
    messages.success(request, _("Deleted %(name)s.") % {"name": view.name})
    return site.back(request, "jobs")


def _save(request: HttpRequest, site: DashboardSite, page: str) -> HttpResponse:
    name = request.POST.get("view", "").strip()
    query = {field: value for field in FIELDS if (value := request.POST.get(field))}
    queue = query.get("queue", "")
    if not 0 < len(name) <= MAX_NAME:
        messages.error(request, _("Enter a name of at most %(count)d characters.") % {"count": MAX_NAME})
    elif queue and not rights.sees(request, queue):
        audit.note(request, page, queue=queue, refused=True)
        raise PermissionDenied
    else:
        audit.note(request, page, queue=queue, detail={"view": name, "query": query})
        messages.success(request, _("Saved %(name)s.") % {"name": name})
    return site.back(request, "jobs", **query)


def _may_delete(request: HttpRequest, view: SavedView) -> bool:
    own = is_own(request, view.user_pk)
    return rights.may(request, rights.SAVE_VIEW) and (own or rights.may(request, rights.SHARE_VIEW))


def _read() -> list[SavedView]:
    rows = rows_of(AuditEvent).filter(action__in=ACTIONS, refused=False).order_by("-pk")
    try:
        newest: list[Any] = list(rows.values_list("pk", "action", "user", "user_pk", "detail")[:MAX_ROWS])
    except Error as error:
        logger.debug("Could not read the saved views; the page shows none: %s", error)
        return []
    views: dict[tuple[str, str], SavedView | None] = {}
    for pk, action, user, user_pk, detail in newest:
        key = (detail.get("owner", user_pk), detail["view"])
        view = SavedView(pk, detail["view"], detail.get("query", {}), user, user_pk, action == SHARE)
        views.setdefault(key, None if action == DELETE else view)
    return [view for view in views.values() if view is not None]
