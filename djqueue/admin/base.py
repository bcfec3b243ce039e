"""The base of all lists in the admin: read-only, behind the dashboard's rights, fast on millions of rows."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import F, Model, Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, reverse
from django.utils.functional import cached_property
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.conf import get_settings
from djqueue.dashboard import redaction, rendering, rights
from djqueue.dashboard.outages import answers_without_databases
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.dashboard.urls import PAGES
from djqueue.models import Dashboard, Job

from . import gate

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    ModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

LISTED = 10_000
"""Rows that a list shows: the newest."""
SEARCHED = 100_000
"""Rows, the newest, in which a beginning of an id or a name is looked for: no index helps there."""


class CappedPaginator(AnyPaginator):
    """Counts no further than it lists: to count millions of rows takes seconds."""

    @cached_property
    def count(self) -> int:
        """Rows that are listed."""
        return min(self._counted, LISTED)

    @cached_property
    def _counted(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by()[: LISTED + 1].count())

    @property
    def is_capped(self) -> bool:
        """Whether there are more rows than are listed."""
        return self._counted > LISTED


def time_column(model: type[Model], field: str) -> Callable[..., str]:
    """A column with a time of a row."""
    of: Any = model._meta.get_field(field)

    @admin.display(description=of.verbose_name, ordering=field)
    def column(_admin: Any, row: Any) -> str:
        return rendering.moment(getattr(row, field))

    return column


class StoredChangeList(ChangeList):
    """A list that does not read the large columns."""

    def get_queryset(self, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        """See `ChangeList.get_queryset`."""
        rows: QuerySet[Any] = super().get_queryset(*args, **kwargs)
        return rows.defer(*getattr(self.model_admin, "unlisted", ()))


class StoredAdmin(ModelAdmin):
    """Rows that the storage writes: a list that nobody changes here.

    To see it takes the right to see the dashboard and the model's own view permission. A subclass sets
    `seen`, without which it has no rows. Changes are made on the dashboard, to which each page links.
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
    seen: Callable[[HttpRequest, QuerySet[Any]], QuerySet[Any]] | None = None
    """The function of `gate` that leaves the rows that a user may see."""
    is_raw = True
    """Whether the site's index has the list only with `DASHBOARD["RAW_LISTS"]`."""
    dashboard_page = ""
    """The dashboard's page on which the rows of the list are changed."""
    unlisted: tuple[str, ...] = ()
    """Columns that may be large, which the list does not show."""

    class Media:
        css = {"all": ["djqueue/djqueue.css"]}

    def get_urls(self) -> list[URLPattern]:
        """Return the pages of the list, which respond in time while a database does not answer."""
        patterns = super().get_urls()
        for pattern in patterns:
            pattern.callback = answers_without_databases(self.admin_site, pattern.callback)
        return patterns

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may see lists of the section at all."""
        return rights.may(request, rights.VIEW) and super().has_module_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may see the dashboard, and this list."""
        return rights.may(request, rights.VIEW) and self._may_view(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: rows come from the storage."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return False: the dashboard changes things, through the storage."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return False: the dashboard deletes things, through the storage."""
        return False

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Return no permissions for the index of a raw list, which hides it there but leaves its address."""
        if self.is_raw and not get_settings().dashboard.raw_lists:
            return {}
        return super().get_model_perms(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see, of the storage's database."""
        rows = super().get_queryset(request).using(alias_of(self.model))
        return rows.none() if self.seen is None else self.seen(request, rows)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether an address may filter by a column: only by those of `list_filter`.

        Any other condition, such as `payload__contains`, would answer questions about hidden values.
        """
        given = () if request is None else self.get_list_filter(request)
        return lookup in _parameters(given)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """See `ModelAdmin.get_changelist`."""
        return StoredChangeList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, with a link to the dashboard."""
        links = [(_now("Open in the dashboard"), self._page_url(request))]
        context = {"djq_links": [one for one in links if one[1]], **(extra_context or {})}
        return super().changelist_view(request, context)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show a row, with links to the dashboard."""
        row = context.get("original")
        if row is not None:
            context["djq_links"] = [one for one in self.links_of(request, row) if one[1]]
        return super().render_change_form(request, context, *args, **kwargs)

    def links_of(self, request: HttpRequest, row: Any) -> Iterable[tuple[str, str]]:
        """Return labels and addresses of the dashboard's pages about a row."""
        return [(_now("Open in the dashboard"), self._page_url(request))]

    def url(self, page: str, *args: Any, model: type[Model] | None = None) -> str:
        """The address of a page of this site."""
        opts = (model or self.model)._meta
        name = f"{self.admin_site.name}:{opts.app_label}_{opts.model_name}_{page}"
        return reverse(name, args=args)

    def dashboard_url(self, request: HttpRequest, page: str, *args: Any, **query: Any) -> str:
        """Return the address of a page of this site's dashboard; empty if the user may not open it."""
        model_admin = self.admin_site._registry.get(Dashboard)
        if model_admin is None:
            return ""
        site = DashboardSite(model_admin, PAGES)
        return site.url(page, *args, **query) if site.may_open(request, page) else ""

    def _page_url(self, request: HttpRequest) -> str:
        return self.dashboard_url(request, self.dashboard_page) if self.dashboard_page else ""

    def _may_view(self, request: HttpRequest) -> bool:
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.view_{self.opts.model_name}"))


class JobRowsAdmin(StoredAdmin):
    """Rows about jobs, each of which is named by a queue and an id."""

    seen = staticmethod(gate.by_queue)
    dashboard_page = "jobs"
    search_help_text = _("A job id; or the beginning of one, among the newest 100,000 rows.")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """The job of an id, found by the index; else beginnings, among the newest rows."""
        term = search_term.strip()
        if not term:
            return queryset, False
        exact = queryset.filter(queue__in=gate.used_queues(request, self.model), job_id=term)
        if exact.exists():
            return exact, False
        begins = Q()
        for field in self.get_search_fields(request):
            begins |= Q(**{f"{field}__startswith": term})
        oldest = rows_of(self.model).order_by("-pk").values(oldest=F("pk") - SEARCHED)[:1]
        return queryset.filter(begins, pk__gt=Subquery(oldest)), False

    def links_of(self, request: HttpRequest, row: Any) -> Iterable[tuple[str, str]]:
        """Return the address of the job's page, where it is retried, cancelled and deleted."""
        return [(_now("Open in the dashboard"), self.dashboard_url(request, "job", row.queue, row.job_id))]

    def value_shown(self, name: str, part: str, data: Any, content_type: str) -> str:
        """Return a payload or a result without its hidden values; the dashboard can reveal these."""
        if data is None:
            return rendering.NOTHING
        return rendering.shown(lambda: redaction.stored(name, part, bytes(data), content_type))

    @admin.display(description=_("job"))
    def job_link(self, row: Any) -> str:
        """The row's job, found by a search, which costs the list no query."""
        if not self.admin_site.is_registered(Job):
            return str(row.job_id)
        return rendering.link(self.url("changelist", model=Job), row.job_id, queue=row.queue, q=row.job_id)


def _parameters(filters: Iterable[Any]) -> set[str]:
    """Return the parameters that the filters of a list have in its address."""
    found: set[str] = set()
    for one in filters:
        if isinstance(one, str):
            found |= {one, f"{one}__exact"}
        else:
            found.add(str(one.parameter_name))
    return found
