"""Saved views of the list of jobs: filters under a name, of one user or shared.

A view is kept by the row of the activity about saving it, until a later one replaces or deletes it.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.validators import MaxValueValidator
from django.db import Error
from django.db.models.fields.json import KT
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog
from djqueue.core.units import to_datetime
from djqueue.dashboard import audit, boards, rights
from djqueue.dashboard.actions import ANY, FilterForm
from djqueue.dashboard.forms import check_hidden, read_state
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.dashboard.views.workers import sees_worker
from djqueue.models import AuditEvent

logger = Log("djqueue.dashboard")
throttled = ThrottledLog(logger, 60.0)
pages = Pages()
SAVE, SHARE, DELETE = ACTIONS = ("view_save", "view_share", "view_delete")
"""Actions in the activity."""
FIELDS = ("state", *FilterForm.base_fields)
"""Parameters of the list that a view keeps."""
TIMES = ("since", "until")
"""Parameters that are kept in UTC milliseconds."""
MAX_NAME = 60
"""Maximum characters of a view's name."""
MAX_VIEWS = 100
"""Maximum views of a user."""
PART = 1_000
"""Rows of the activity read at a time."""
MAX_ROWS = 20_000
"""Newest rows of the activity from which views are known."""
FRESH = 5_000
"""Milliseconds before the views are read again."""


class SavedView(NamedTuple):
    """A view."""

    pk: int
    """Key of the row about saving it."""
    name: str
    query: dict[str, Any]
    user: str
    user_pk: str
    is_shared: bool

    @property
    def queue(self) -> str:
        return str(self.query.get("queue", ""))

    @property
    def worker(self) -> str:
        return str(self.query.get("worker", ""))


class ViewLink(NamedTuple):
    """A view on the page."""

    view: SavedView
    url: str
    may_delete: bool


def links(request: HttpRequest, site: DashboardSite) -> list[ViewLink]:
    """Return the views of the user, and the shared ones that the user may see, by name."""
    try:
        return _links(request, site)
    except StorageError as error:
        logger.debug("Could not read the saved views; the page shows none: %s", error)
        return []


def url_of(site: DashboardSite, query: Mapping[str, Any]) -> str:
    """Return the URL of a view's list, with times in the user's time zone."""
    return site.url("jobs", **_parameters(query))


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
    found = next((one for one in _links(request, site) if one.view.pk == pk), None)
    if found is None:
        messages.warning(request, _("This view no longer exists."))
        return site.back(request, "jobs")
    view = found.view
    detail = {"view": view.name, "owner": view.user_pk, "worker": view.worker}
    audit.note(request, DELETE, queue=view.queue, detail=detail, refused=not found.may_delete)
    if not found.may_delete:
        raise PermissionDenied
    messages.success(request, _("Deleted %(name)s.") % {"name": view.name})
    return site.back(request, "jobs")


def _save(request: HttpRequest, site: DashboardSite, page: str) -> HttpResponse:
    form = FilterForm(request.POST, queues=(), has_rows=True)
    if not form.is_valid():
        check_hidden(form)
        field, problems = next(iter(form.errors.items()))
        messages.error(request, f"{form.fields[field].label}: {problems[0]}")
        return site.back(request, "jobs")
    name = request.POST.get("view", "").strip()
    query = _query(form)
    queue = query.get("queue", "")
    if problem := _problem(request, name):
        messages.error(request, problem)
    elif queue and not rights.sees(request, queue):
        audit.note(request, page, queue=queue, refused=True)
        raise PermissionDenied
    else:
        audit.note(request, page, queue=queue, detail={"view": name, "query": query})
        messages.success(request, _("Saved %(name)s.") % {"name": name})
    return site.back(request, "jobs", **_parameters(query))


def _query(form: FilterForm) -> dict[str, Any]:
    """Return the valid filters as a view keeps them."""
    state = form.data.get("state", "")
    texts = {
        **form.cleaned_data,
        "state": state if state == ANY or read_state(state) is not None else "",
        "argument": form.data.get("argument", "").strip(),
    }
    return {name: texts[name] for name in FIELDS if texts.get(name)} | form.given()


def _problem(request: HttpRequest, name: str) -> str:
    """Return why the user can't save a view with this name; empty if the user can."""
    if not 0 < len(name) <= MAX_NAME:
        return _("Enter a name of at most %(count)d characters.") % {"count": MAX_NAME}
    own = {one.name for one in _known() if is_own(request, one.user_pk)}
    try:
        MaxValueValidator(MAX_VIEWS)(len(own | {name}))
    except ValidationError as error:
        return f"{_('Saved views')}: {error.messages[0]}"
    return ""


def _links(request: HttpRequest, site: DashboardSite) -> list[ViewLink]:
    return [
        ViewLink(one, url_of(site, one.query), _may_delete(request, one))
        for one in sorted(_known(), key=lambda one: one.name.casefold())
        if (one.is_shared or is_own(request, one.user_pk))
        and sees(request, one.queue, one.user_pk)
        and (not one.worker or sees_worker(request, one.worker))
    ]


def _parameters(query: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the list."""
    times = {
        name: f"{timezone.localtime(to_datetime(query[name])):%Y-%m-%dT%H:%M:%S}"
        for name in TIMES
        if isinstance(query.get(name), int)
    }
    # PostgreSQL does not keep the order of keys.
    values = {**query, **times}
    return {name: values[name] for name in FIELDS if name in values}


def _may_delete(request: HttpRequest, view: SavedView) -> bool:
    own = is_own(request, view.user_pk)
    return rights.may(request, rights.SAVE_VIEW) and (own or rights.may(request, rights.SHARE_VIEW))


def _known() -> list[SavedView]:
    return read_cache.read("views", _read, fresh=FRESH).value


def _read() -> list[SavedView]:
    try:
        return _views()
    except Error as error:
        raise StorageUnavailableError(str(error)) from error


def _views() -> list[SavedView]:
    rows = rows_of(AuditEvent).filter(action__in=ACTIONS, refused=False).order_by("-pk")
    columns = ("pk", "action", "user_pk", KT("detail__owner"), KT("detail__view"))
    newest: dict[tuple[str, str], int | None] = {}
    count, older = 0, rows
    while True:
        part: list[Any] = list(older.values_list(*columns)[:PART])
        for pk, action, user_pk, owner, name in part:
            newest.setdefault((owner or user_pk, name), None if action == DELETE else pk)
        count += len(part)
        if len(part) < PART:
            break
        if count >= MAX_ROWS:
            text = "Views saved before the last %d changes of views are not shown."
            throttled.log(logging.WARNING, "rows", text, count)
            break
        older = rows.filter(pk__lt=part[-1][0])
    # Only the details of these are decoded.
    keys = [pk for pk in newest.values() if pk is not None]
    return [
        SavedView(pk, detail["view"], detail["query"], user, user_pk, action == SHARE)
        for index in range(0, len(keys), PART)
        for pk, action, user, user_pk, detail in rows.filter(pk__in=keys[index : index + PART]).values_list(
            "pk", "action", "user", "user_pk", "detail"
        )
    ]
