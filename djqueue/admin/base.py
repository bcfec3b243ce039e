"""What the pages of all tables have in common: read-only, and quick over millions of rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import F, Model, Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from djqueue.dashboard import rendering
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import Job

from .actions import LISTED
from .filters import used_queues

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    ModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

SEARCHED = 100_000
"""Rows, the newest, in which a beginning of an id or a name is looked for: no index helps there."""
SEARCHED_QUEUES = 5_000
"""Queues in which a whole id is looked for."""


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
    """Rows that the storage writes."""

    actions: Sequence[Any] = ()
    change_form_template = "djqueue/admin/change_form.html"
    change_list_template = "djqueue/admin/change_list.html"
    list_max_show_all = 0
    list_per_page = 50
    ordering = ("-id",)
    paginator = CappedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()
    unlisted: tuple[str, ...] = ()
    """Columns that may be large, which the list does not show."""
    buttons: Mapping[str, Any] = {}
    """Actions that the page of one row offers, too, with their labels there."""

    class Media:
        css = {"all": ["djqueue/djqueue.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """No: rows come from the storage."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """No: a row that was edited here would no longer be what the storage knows."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """No: a row goes with its job."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Of the storage's database."""
        return super().get_queryset(request).using(alias_of(self.model))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """See `ModelAdmin.get_changelist`."""
        return StoredChangeList

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """With the buttons that the user may press and the row's state allows."""
        row = context.get("original")
        if row is not None:
            context["djq_buttons"] = self._offered(request, row)
            context["djq_list_url"] = self.url("changelist")
        return super().render_change_form(request, context, *args, **kwargs)

    def url(self, page: str, *args: Any, model: type[Model] | None = None) -> str:
        """The address of a page of this site."""
        opts = (model or self.model)._meta
        name = f"{self.admin_site.name}:{opts.app_label}_{opts.model_name}_{page}"
        return reverse(name, args=args)

    def may(self, action: str, request: HttpRequest) -> bool:
        """Whether the user has the permission of an action."""
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.{action}_{self.opts.model_name}"))

    def is_legal(self, action: str, row: Any) -> bool:
        """Whether the row's state allows an action of `buttons`."""
        raise NotImplementedError

    def _offered(self, request: HttpRequest, row: Any) -> list[tuple[str, str]]:
        permitted = self.get_actions(request)
        return [
            (name, str(label))
            for name, label in self.buttons.items()
            if name in permitted and self.is_legal(name, row)
        ]


class JobRowsAdmin(StoredAdmin):
    """Rows about jobs, each of which is named by a queue and an id."""

    search_help_text = _("A job id; or the beginning of one, among the newest 100,000 rows.")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """The job of an id, found by the index; else beginnings, among the newest rows."""
        term = search_term.strip()
        if not term:
            return queryset, False
        exact = queryset.filter(queue__in=used_queues(self.model, SEARCHED_QUEUES), job_id=term)
        if exact.exists():
            return exact, False
        begins = Q()
        for field in self.get_search_fields(request):
            begins |= Q(**{f"{field}__startswith": term})
        oldest = rows_of(self.model).order_by("-pk").values(oldest=F("pk") - SEARCHED)[:1]
        return queryset.filter(begins, pk__gt=Subquery(oldest)), False

    @admin.display(description=_("job"))
    def job_link(self, row: Any) -> str:
        """The row's job, found by a search, which costs the list no query."""
        if not self.admin_site.is_registered(Job):
            return str(row.job_id)
        return rendering.link(self.url("changelist", model=Job), row.job_id, queue=row.queue, q=row.job_id)
