"""The admin's lists: read-only, with the dashboard's permissions, and fast on millions of rows.

A user sees the rows of the queues that the dashboard shows to the user.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import F, Model, Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, reverse
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from djqueue.conf import get_settings
from djqueue.dashboard import rendering, rights
from djqueue.dashboard.rendering import REASONS
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import Job

from .dashboard import ModelAdmin, dashboard_of

MAX_LISTED = 10_000
"""Rows that a list shows: the newest."""
MAX_TERM = 1_000
"""Maximum of characters of a search; databases limit patterns."""
MAX_SEARCHED = 100_000
"""Rows, the newest, that are searched for the beginning of an id or a name, as no index supports that."""
MAX_QUEUES = 5_000
"""Queues of a table that `QUEUE_FILTER` is called for; the rows of any further queue are hidden."""
MAX_CHOICES = 200
"""Queues that a filter offers."""


def used_queues(request: HttpRequest, model: type[Model]) -> list[str]:
    """Return the queues in a table that the user may see, in order; read once per request."""
    from djqueue.storage.tables import inspector

    known: dict[type[Model], list[str]] = request.__dict__.setdefault("_djqueue_used", {})
    if model not in known:
        queues = inspector.used_queues(alias_of(model), model, MAX_QUEUES)
        known[model] = [name for name in queues if rights.sees(request, name)]
    return known[model]


def in_visible_queues(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows whose column `queue` names a queue that the user may see."""
    if not rights.hides_queues():
        return rows
    return rows.filter(queue__in=used_queues(request, rows.model))


def visible_schedules(request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the schedules that enqueue to queues that the user may see."""
    from djqueue.dashboard.rights import sees

    if not rights.hides_queues():
        return rows
    schedules = rows.order_by("name")
    return rows.filter(pk__in=[row.pk for row in schedules if sees(request, row)])


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no more rows than a list shows: counting millions of rows takes seconds."""

    @cached_property
    def count(self) -> int:
        """Number of listed rows."""
        return min(self._counted, MAX_LISTED)

    @cached_property
    def _counted(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by()[: MAX_LISTED + 1].count())

    @property
    def is_capped(self) -> bool:
        """Whether there are more rows than are listed."""
        return self._counted > MAX_LISTED


def time_column(model: type[Model], field: str) -> Callable[..., str]:
    """Return a column that shows a time of a row."""
    of: Any = model._meta.get_field(field)

    @admin.display(description=of.verbose_name, ordering=field)
    def column(_admin: Any, row: Any) -> str:
        return rendering.moment(getattr(row, field))

    return column


class DeferringChangeList(ChangeList):
    """A list that does not read the columns in its admin's `unlisted`."""

    def get_queryset(self, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """Return the rows without their large columns."""
        rows: QuerySet[Any] = super().get_queryset(*args, **kwargs)
        return rows.defer(*getattr(self.model_admin, "unlisted", ()))


class ReadOnlyAdmin(ModelAdmin):
    """A read-only list of rows that the storage writes, with links to the dashboard.

    Requires permission to view the dashboard, and the model's own view permission. A subclass sets
    `visible_rows`; without it, the list is empty.
    """

    actions = None
    change_form_template = "djqueue/admin/change_form.html"
    change_list_template = "djqueue/admin/change_list.html"
    list_max_show_all = 0
    list_per_page = 50
    ordering = ("-id",)
    paginator = CappedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()
    visible_rows: Callable[[HttpRequest, QuerySet[Any]], QuerySet[Any]] | None = None
    """The function that selects the rows that a user may see."""
    dashboard_page: str
    """Name of the dashboard's page that corresponds to the list."""
    unlisted: tuple[str, ...] = ()
    """Columns that may be large, which the list does not read."""

    class Media:
        css = {"all": ["djqueue/djqueue.css"]}

    def get_urls(self) -> list[URLPattern]:
        """Return the pages of the list, which respond in time while a database does not answer."""
        from djqueue.dashboard.outages import answers_without_databases

        patterns = super().get_urls()
        for pattern in patterns:
            pattern.callback = answers_without_databases(self.admin_site, pattern.callback)
        return patterns

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the admin's index and sidebar link to the list."""
        is_listed = get_settings().dashboard.admin_lists
        return is_listed and rights.may(request, rights.VIEW) and super().has_module_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may see the dashboard, and this list."""
        return rights.may(request, rights.VIEW) and super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: rows come from the storage."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return False: changes are made in the dashboard, through the storage."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return False: rows are deleted in the dashboard, through the storage."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see, from the storage's database."""
        rows = super().get_queryset(request).using(alias_of(self.model))
        return rows.none() if self.visible_rows is None else self.visible_rows(request, rows)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether a URL may filter by a column: only if `list_filter` has it.

        Any other condition, such as `payload__contains`, would answer questions about hidden values.
        """
        filters = () if request is None else self.get_list_filter(request)
        return lookup in _parameters(filters)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the class of the list."""
        return DeferringChangeList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, with a link to the dashboard."""
        context = {"djq_url": self.dashboard_url(request, self.dashboard_page), **(extra_context or {})}
        return super().changelist_view(request, context)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show a row, with a link to its page on the dashboard."""
        row = context.get("original")
        if row is not None:
            context["djq_url"] = self.row_url(request, row)
        return super().render_change_form(request, context, *args, **kwargs)

    def row_url(self, request: HttpRequest, row: Any) -> str:
        """Return the URL of a row's page on the dashboard; empty if it has none that the user may open."""
        return ""

    def url(self, page: str, *args: Any, model: type[Model] | None = None) -> str:
        """Return the URL of a list or a row on this admin site."""
        opts = (model or self.model)._meta
        name = f"{self.admin_site.name}:{opts.app_label}_{opts.model_name}_{page}"
        return reverse(name, args=args)

    def dashboard_url(self, request: HttpRequest, page: str, *args: Any) -> str:
        """Return the URL of a page of this site's dashboard; empty if the user may not open it."""
        dashboard = dashboard_of(self.admin_site)
        if dashboard is None or not dashboard.may_open(request, page):
            return ""
        return dashboard.url(page, *args)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the matching rows: none for a term that is too long."""
        if len(search_term) > MAX_TERM:
            return queryset.none(), False
        return super().get_search_results(request, queryset, search_term)


class JobRowAdmin(ReadOnlyAdmin):
    """A list of rows that name their job by queue and id."""

    visible_rows = staticmethod(in_visible_queues)
    dashboard_page = "jobs"
    search_help_text = _("Search by job ID or, among the newest 100,000 rows, by the beginning of a job ID.")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the job with the id, found by index; otherwise matching beginnings among the newest rows."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if len(term) > MAX_TERM:
            return queryset.none(), False
        exact = queryset.filter(queue__in=used_queues(request, self.model), job_id=term)
        if exact.exists():
            return exact, False
        begins = Q()
        for field in self.get_search_fields(request):
            begins |= Q(**{f"{field}__startswith": term})
        oldest = rows_of(self.model).order_by("-pk").values(oldest=F("pk") - MAX_SEARCHED)[:1]
        return queryset.filter(begins, pk__gt=Subquery(oldest)), False

    def row_url(self, request: HttpRequest, row: Any) -> str:
        """Return the URL of the job's page on the dashboard."""
        return self.dashboard_url(request, "job", row.queue, row.job_id)

    def value_shown(self, name: str, part: str, data: Any, content_type: str) -> str:
        """Return a payload or a result without its hidden values; the dashboard can reveal these."""
        from djqueue.dashboard import redaction

        if data is None:
            return rendering.NOTHING
        return rendering.shown(lambda: redaction.stored(name, part, bytes(data), content_type))

    @admin.display(description=_("job"))
    def job_link(self, row: Any) -> str:
        """Link to the row's job through a search, which costs the list no query."""
        if not self.admin_site.is_registered(Job):
            return str(row.job_id)
        return rendering.link(self.url("changelist", model=Job), row.job_id, queue=row.queue, q=row.job_id)


def _parameters(filters: Iterable[Any]) -> set[str]:
    """Return the URL parameters of a list's filters."""
    parameters: set[str] = set()
    for one in filters:
        if isinstance(one, str):
            parameters |= {one, f"{one}__exact"}
        else:
            parameters.add(str(one.parameter_name))
    return parameters


class ChoiceFilter(admin.SimpleListFilter, ABC):
    """A filter by a text column. A subclass says where its choices come from."""

    @abstractmethod
    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """Return value and label of each choice."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the choices, and the current value if it is not one of them."""
        choices = list(self.choices_of(request, model_admin.model))
        present = self.value()
        if present and present not in dict(choices):
            choices.append((present, present))
        return choices

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows that have the chosen value."""
        value = self.value()
        return queryset.filter(**{str(self.parameter_name): value}) if value else queryset


class QueueFilter(ChoiceFilter):
    """Filters by queue, among the queues in the table that the user may see."""

    title = _("queue")
    parameter_name = "queue"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """Return the first queues in the table."""
        return [(queue, queue) for queue in used_queues(request, model)[:MAX_CHOICES]]


class NameFilter(ChoiceFilter):
    """Filters by job name, among the jobs registered in this process."""

    title = _("job name")
    parameter_name = "name"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """Return the registered names."""
        from djqueue.client import registry

        return [(name, name) for name in registry.names()]


class ReasonFilter(ChoiceFilter):
    """Filters dead letters by reason."""

    title = _("reason")
    parameter_name = "reason"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """Return all reasons."""
        return REASONS.items()
