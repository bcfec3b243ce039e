"""The dashboard of one admin site: its pages, access checks and rendering."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.contrib.admin import utils as admin_utils
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBadRequest,
    HttpResponseBase,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import get_script_prefix, get_urlconf, register_converter, reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import get_language, gettext_lazy
from django.utils.translation import gettext as _

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import waiting_within
from djqueue.core.errors import DjqueueError, OptionError, StorageError
from djqueue.core.units import to_datetime
from djqueue.dashboard import audit, forms, problems, reading, rendering, rights
from djqueue.dashboard.outages import NOTICE, UNAVAILABLE, is_partial, watchdog
from djqueue.dashboard.reading import CachedRead, Parts, read_cache
from djqueue.dashboard.tables import KeysetPage

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

DOTS = re.compile(r"\A\.+\Z")
View = Callable[..., HttpResponseBase]
DEADLINE = 1.5
"""Seconds that all reads of a page may take together. Data not read by then is shown from the cache."""
PAGE_TAG = "HX-PTag"
"""Header: the tag of a live part, so that an unchanged part is not sent again."""
AS_OF = "Djq-As-Of"
"""Header: the time of the data in a live part, in UTC milliseconds."""
INTERVALS = (2, 5, 15, 60)
"""Refresh intervals that users can choose, in seconds."""
FOLLOWED = frozenset({"status", "queues", "jobs"})
"""Pages that show only what `streams` watches."""
SECTIONS = {
    "status": "s",
    "jobs": "j",
    "job_types": "t",
    "errors": "e",
    "queues": "q",
    "workflows": "f",
    "schedules": "c",
    "workers": "w",
    "history": "h",
    "system": "y",
}
"""Pages with a tab, in order, each with the key that opens it after `g`."""
ASIDE = frozenset({"history", "system"})
"""Sections about the past and the installation, whose tabs stand apart."""
BOTTOM = ("status", "jobs", "errors", "queues")
"""Sections in the bar at the bottom of a phone's screen."""
PARTS = {
    "history": {
        "history": gettext_lazy("Activity"),
        "operations": gettext_lazy("Bulk operations"),
        "bulk_writes": gettext_lazy("Bulk writes"),
    }
}
"""Pages of a section that has several, with their labels."""


class QuotedConverter:
    """A text quoted like in the admin's URLs: `/` is `_2F`."""

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        """Return the text of a path segment."""
        found: str = admin_utils.unquote(value)
        return found

    def to_url(self, value: str) -> str:
        """Return the path segment of a text. Dots are quoted if the text has nothing else."""
        text: str = admin_utils.quote(str(value))
        return text.replace(".", "_2E") if DOTS.match(text) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardPage:
    """A URL of the dashboard.

    Attributes:
        name: Name of the URL, without the prefix `djqueue_dashboard_`.
        route: Route below the dashboard's URL.
        view: Called with the request, the dashboard site and the captured values.
        right: Required permission. Without it the page responds with status 403 and is not linked.
        method: GET for pages that only show data; POST for actions, which redirect to a page.
        label: Label of the page's tab and breadcrumb, if it has one.
        parts: What the live part shows beyond what `Reads.change_version` covers. None if unknown: the part
        is then always rendered and compared.
    """

    name: str
    route: str
    view: View
    right: str
    method: str = "GET"
    label: Any = ""
    parts: Parts | None = None


class Pages:
    """The pages of one module of views, in the order of their definition."""

    def __init__(self) -> None:
        self.all: list[DashboardPage] = []

    def show(
        self, name: str, route: str, right: str, label: Any = "", parts: Parts | None = None
    ) -> Callable[[View], View]:
        """Register a view that shows data."""
        return self._register(name, route, right, "GET", label, parts)

    def act(self, name: str, route: str, right: str) -> Callable[[View], View]:
        """Register a view that performs an action."""
        return self._register(name, route, right, "POST", "", None)

    def _register(
        self, name: str, route: str, right: str, method: str, label: Any, parts: Parts | None
    ) -> Callable[[View], View]:
        def register(view: View) -> View:
            page = DashboardPage(
                name=name, route=route, view=view, right=right, method=method, label=label, parts=parts
            )
            self.all.append(page)
            return view

        return register


class SectionTab(NamedTuple):
    """A link to a section of the dashboard."""

    name: str
    label: str
    url: str
    key: str
    """Key that opens it after `g`."""
    is_current: bool

    @property
    def is_aside(self) -> bool:
        """Whether the tab stands apart from the others."""
        return self.name in ASIDE

    @property
    def is_bottom(self) -> bool:
        """Whether the bar at the bottom of a phone's screen has it."""
        return self.name in BOTTOM


class Crumb(NamedTuple):
    """A breadcrumb."""

    label: str
    url: str = ""


class DashboardSite:
    """The dashboard of one admin site."""

    def __init__(self, model_admin: ModelAdmin, pages: Sequence[DashboardPage]) -> None:
        self.site: AdminSite = model_admin.admin_site
        self.opts = model_admin.opts
        self.pages = {page.name: page for page in pages}

    def url(self, page: str, *args: Any, **query: Any) -> str:
        """Return the URL of a page. Empty values are left out of the query string."""
        given = {name: value for name, value in query.items() if value not in (None, "")}
        name = f"{self.site.name}:djqueue_dashboard_{self.pages[page].name}"
        urlconf = get_urlconf() or settings.ROOT_URLCONF
        address = _address(name, args, urlconf, get_script_prefix(), get_language())
        return f"{address}?{urlencode(given, doseq=True)}" if given else address

    def crumb(self, page: str) -> Crumb:
        """Return the breadcrumb of a page that has a label."""
        return Crumb(str(self.pages[page].label), self.url(page))

    def queue_crumbs(self, queue: str) -> list[Crumb]:
        """Return the breadcrumbs above the page of a queue's job."""
        return [self.crumb("queues"), Crumb(queue, self.url("queue", queue))]

    def page_links(self, page: str, rows: KeysetPage, **query: Any) -> dict[str, str]:
        """Return the URLs of the newest and the adjacent pages of a list."""
        return {
            "newest": self.url(page, **query) if rows.newer else "",
            "newer": rows.newer and self.url(page, **query, at=rows.newer),
            "older": rows.older and self.url(page, **query, at=rows.older),
        }

    def may_open(self, request: HttpRequest, page: str) -> bool:
        """Return whether the user has the permission that a page requires."""
        return rights.may(request, self.pages[page].right)

    def serve(self, page: DashboardPage, request: HttpRequest, **captured: Any) -> HttpResponseBase:
        """Respond to a request for a page: check the method, then the permission, then call the view."""
        changes = page.method == "POST"
        if request.method not in (("POST",) if changes else ("GET", "HEAD")):
            return HttpResponseNotAllowed([page.method])
        queue, job_id = captured.get("queue", ""), captured.get("job_id", "")
        if not rights.may(request, page.right) or (queue and not rights.sees(request, queue)):
            if changes:
                # A name without a queue may be that of a limiter which not every user may know.
                keys = ("worker", "name") if queue else ("worker",)
                detail = {key: captured[key] for key in keys if key in captured}
                audit.note(
                    request, page.name, queue=queue, job_id=job_id, refused=True, detail=detail or None
                )
            raise PermissionDenied
        if changes:
            # An action may take longer than a page. If it were cut off, users could not tell what was done.
            watchdog.release_current()
        request.current_app = self.site.name
        try:
            with nullcontext() if changes else waiting_within(DEADLINE):
                forms.check_request(request, captured)
                if page.parts is not None and (same := self._unchanged(request, page.parts)) is not None:
                    return same
                return page.view(request, self, **captured)
        except forms.BadInputError as error:
            return HttpResponseBadRequest(str(error), content_type="text/plain; charset=utf-8")
        except DjqueueError as error:
            if watchdog.has_cut:
                raise
            if changes:
                messages.error(request, _("The action failed: %(error)s") % {"error": error})
                return self.back(request, "status")
            if isinstance(error, StorageError):
                return self._unavailable(request, page, error)
            if isinstance(error, OptionError):
                # The URL was edited by hand.
                return HttpResponseBadRequest(str(error), content_type="text/plain; charset=utf-8")
            raise
        finally:
            read_cache.unwatch()
            if changes:
                read_cache.forget()

    def render(
        self,
        request: HttpRequest,
        template: str,
        title: str,
        context: Mapping[str, Any],
        *,
        crumbs: Sequence[Crumb] = (),
        tab: str = "",
        read: CachedRead[Any] | None = None,
        error: str = "",
        status: int = 200,
    ) -> HttpResponse:
        """Render a page, or only its live part if an open page requests that.

        Args:
            template: Name of the live part's template in `dashboard/live/`, and of the page's in
                `dashboard/`. A page without a template of its own uses `base.html`.
            crumbs: Breadcrumbs between the dashboard and the page.
            tab: Name of the section, or of its part, whose tab is highlighted.
            read: The read that the page shows; None if the page shows current data.
            error: Why the storage can't be read.
        """
        part = f"djqueue/dashboard/live/{template}"
        as_of = None if read is None else read.at
        error = error or ("" if read is None else read.error)
        shown = SYSTEM_CLOCK.now() if as_of is None else as_of
        notice = _notice(error, as_of)
        live_context = {**context, "dashboard": self, "may": rights.Rights(request), "as_of": shown}
        html = render_to_string(part, live_context, request)
        tag = reading.tag_of(request, html)
        response: HttpResponse
        if is_partial(request):
            same = reading.parse_tag(request.headers.get(PAGE_TAG, "")).html == tag.html
            response = HttpResponse(status=304) if same else HttpResponse(html, status=status)
            response[PAGE_TAG] = str(tag)
        else:
            page_context = {
                **self.site.each_context(request),
                "title": title,
                "subtitle": None,
                "opts": self.opts,
                "crumbs": [*crumbs, Crumb(title)],
                "tab": tab,
                "tabs": self._tabs(request, tab),
                "section_parts": self._parts(request, tab),
                "live": html,
                "tag": str(tag),
                "intervals": INTERVALS,
                "poll": get_settings().dashboard.poll // 1_000,
                "here": "" if request.method == "POST" else request.get_full_path(),
                "stream": self._stream(request),
                "notice": notice,
            }
            names = [f"djqueue/dashboard/{name}" for name in (template, "base.html")]
            response = TemplateResponse(request, names, {**page_context, **live_context}, status=status)
        response[AS_OF] = str(shown)
        if error:
            response[UNAVAILABLE] = "1"
        if notice:
            response[NOTICE] = quote(notice)
        return response

    def not_found(
        self,
        request: HttpRequest,
        title: str,
        text: str,
        *,
        tab: str,
        crumbs: Sequence[Crumb],
        link: tuple[str, str] | None = None,
    ) -> HttpResponse:
        """Respond with status 404 for an object that doesn't exist, or that the user can't see.

        Args:
            link: Label and URL of a link below the text.
        """
        label, url = link or ("", "")
        context = {"text": text, "link_label": label, "link_url": url}
        return self.render(request, "not_found.html", title, context, tab=tab, crumbs=crumbs, status=404)

    def job_not_found(
        self, request: HttpRequest, queue: str, job_id: str, tab: str, crumbs: Sequence[Crumb]
    ) -> HttpResponse:
        """Respond for a job that does not exist, with a link to its queue."""
        text = _(
            "Job %(job_id)s was not found in queue %(queue)s. "
            "Finished jobs are removed when their retention ends."
        ) % {"job_id": job_id, "queue": queue}
        link = _("View queue %(queue)s") % {"queue": queue}, self.url("queue", queue)
        return self.not_found(request, _("Job not found"), text, tab=tab, crumbs=crumbs, link=link)

    def back(self, request: HttpRequest, page: str, *args: Any, **query: Any) -> HttpResponse:
        """Redirect after an action to the page named in the form, otherwise to the given page."""
        target = request.POST.get("djq_back", "")
        if target.startswith(self.url("status")) and url_has_allowed_host_and_scheme(target, None):
            return HttpResponseRedirect(target)
        return HttpResponseRedirect(self.url(page, *args, **query))

    def _unchanged(self, request: HttpRequest, parts: reading.Parts) -> HttpResponse | None:
        """Return the response to an open page that is still current; None if it must be rendered."""
        fresh = reading.watch_page(request, parts)
        shown = request.headers.get(PAGE_TAG, "")
        if fresh is None or not is_partial(request) or not reading.is_current(fresh, shown):
            return None
        response = HttpResponse(status=304)
        response[PAGE_TAG] = shown
        response[AS_OF] = str(fresh.at)
        if notice := _notice("", None):
            response[NOTICE] = quote(notice)
        return response

    def _unavailable(self, request: HttpRequest, page: DashboardPage, error: StorageError) -> HttpResponse:
        """Return an empty page if the storage is unreachable."""
        if is_partial(request):
            response = HttpResponse(status=204)
            response[UNAVAILABLE] = "1"
            response[NOTICE] = quote(_notice(str(error), None))
            return response
        title = str(page.label) or _("Dashboard")
        context = {"findings": problems.of_outage(request)}
        return self.render(request, "unavailable.html", title, context, error=str(error))

    def _stream(self, request: HttpRequest) -> str:
        """Return the URL of the event stream for the current page; empty if there is none."""
        match = request.resolver_match
        if match is None or not get_settings().dashboard.sse or not isinstance(request, ASGIRequest):
            return ""
        name = str(match.url_name).removeprefix("djqueue_dashboard_")
        if name == "queue":
            return self.url("queue_stream", match.kwargs["queue"])
        return self.url("stream") if name in FOLLOWED else ""

    def _tabs(self, request: HttpRequest, current: str) -> list[SectionTab]:
        section = _section_of(current)
        return [
            SectionTab(name, str(self.pages[name].label), self.url(name), key, name == section)
            for name, key in SECTIONS.items()
            if self.may_open(request, name)
        ]

    def _parts(self, request: HttpRequest, current: str) -> list[SectionTab]:
        return [
            SectionTab(name, str(label), self.url(name), "", name == current)
            for name, label in PARTS.get(_section_of(current), {}).items()
            if name in self.pages and self.may_open(request, name)
        ]


CONVERTER = QuotedConverter()
register_converter(QuotedConverter, "djq")


@lru_cache(maxsize=5_000)
def _address(name: str, args: tuple[Any, ...], urlconf: str, _prefix: str, _language: str | None) -> str:
    """Return the URL of a page, which takes Django long, and a list has hundreds."""
    return reverse(name, urlconf=urlconf, args=args)


def _section_of(page: str) -> str:
    return next((section for section, parts in PARTS.items() if page in parts), page)


def _notice(error: str, as_of: int | None) -> str:
    """Return the text of a page's banner; empty if all data is current."""
    if error and as_of is not None:
        return _("The storage is unreachable: %(away)s Showing data from %(time)s.") % {
            "away": error if error.endswith(".") else f"{error}.",
            "time": rendering.local(to_datetime(as_of)),
        }
    if error:
        return _("The storage is unreachable: %(away)s") % {"away": error}
    outage = get_storage().outage
    if outage is None:
        return ""
    return _(
        "No response since %(time)s: %(reason)s. Data on this page may be stale, and changes may fail."
    ) % {
        "time": rendering.local(to_datetime(outage.since)),
        "reason": outage.reason.rstrip("."),
    }
