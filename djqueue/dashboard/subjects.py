"""Objects that jobs are about: their pages in the admin, and their jobs."""

from typing import Any, NamedTuple

from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.urls import reverse

from djqueue.client import get_storage
from djqueue.core.options import check_text, parts_of
from djqueue.core.pages import JobSummaryPage
from djqueue.dashboard import rights


class Subject(NamedTuple):
    """The object of a job."""

    text: str
    url: str | None
    """URL of the object's admin page; None if the user can't view such a page."""


def jobs_of(request: HttpRequest, subject: str, limit: int, cursor: str | None = None) -> JobSummaryPage:
    """Return up to `limit` jobs about an object, newest first, in the queues that the user can see.

    Only those queues are read, because a cursor names a job of its page, which must not be hidden.

    Raises:
        OptionError: The cursor or the subject is not valid.
    """
    check_text("subject", subject)
    storage = get_storage()
    if not rights.hides_queues():
        return storage.reads.jobs_about(subject, limit, cursor)
    queues = [name for name in storage.queues.names() if rights.sees(request, name)]
    return storage.reads.jobs_about(subject, limit, cursor, queues)


def shown(request: HttpRequest, site: AdminSite, subject: str) -> Subject:
    """Return the object of a job, with a link if the user may view its page on this site."""
    parts = parts_of(subject)
    model_admin = None if parts is None else _admin_of(site, *parts[:2])
    if parts is None or model_admin is None or not model_admin.has_view_or_change_permission(request):
        return Subject(subject, None)
    subject_object = model_admin.get_object(request, parts[2])
    if subject_object is None or not model_admin.has_view_or_change_permission(request, subject_object):
        return Subject(subject, None)
    opts = model_admin.opts
    name = f"{site.name}:{opts.app_label}_{opts.model_name}_change"
    return Subject(subject, reverse(name, args=[quote(parts[2])]))


def _admin_of(site: AdminSite, app: str, name: str) -> Any:
    """Return the site's admin of a model, or of a proxy of it."""
    try:
        model = apps.get_model(app, name)
    except LookupError:
        return None
    registered: dict[Any, Any] = site._registry
    if model in registered:
        return registered[model]
    return next((one for proxy, one in registered.items() if proxy._meta.concrete_model is model), None)
