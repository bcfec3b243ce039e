"""The dashboard in an admin site: the pages of a model without a table."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from django.contrib import admin
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponsePermanentRedirect
from django.urls import URLPattern, path
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from djqueue.dashboard import rights
from djqueue.models import Dashboard

if TYPE_CHECKING:
    from djqueue.dashboard.site import DashboardPage, DashboardSite

    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin


@admin.register(Dashboard)
class DashboardAdmin(ModelAdmin):
    """Every page below `djqueue/dashboard/`."""

    @cached_property
    def dashboard(self) -> "DashboardSite":
        """The dashboard of this admin site."""
        from djqueue.dashboard.site import DashboardSite
        from djqueue.dashboard.urls import PAGES

        return DashboardSite(self, PAGES)

    def get_urls(self) -> list[URLPattern]:
        """Return the pages of the dashboard and their former addresses, each behind the site's login."""
        from djqueue.dashboard.urls import MOVED

        pages = self.dashboard.pages.values()
        return [
            *(path(page.route, self._view(page), name=f"djqueue_dashboard_{page.name}") for page in pages),
            # The admin's index and its sidebar link to this name.
            path("", self._view(self.dashboard.pages["status"]), name="djqueue_dashboard_changelist"),
            *(
                path(f"{old}{rest}", self._moved(new), name="djqueue_dashboard_moved")
                for old, new in MOVED.items()
                for rest in ("", "<path:rest>")
            ),
        ]

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the site's index links to the dashboard."""
        return rights.may(request, rights.VIEW)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may open the dashboard."""
        return rights.may(request, rights.VIEW)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: there is no table."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is no table."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is no table."""
        return False

    def _moved(self, to: str) -> Callable[..., HttpResponseBase]:
        def view(request: HttpRequest, rest: str = "") -> HttpResponseBase:
            query = request.META.get("QUERY_STRING", "")
            url = f"{self.dashboard.url('status')}{to}{quote(rest)}"
            return HttpResponsePermanentRedirect(f"{url}?{query}" if query else url)

        return self.admin_site.admin_view(view)

    def _view(self, page: "DashboardPage") -> Callable[..., HttpResponseBase]:
        from djqueue.dashboard.outages import answers_without_databases, is_partial

        def view(request: HttpRequest, **captured: Any) -> HttpResponseBase:
            return self.dashboard.serve(page, request, **captured)

        behind_login = self.admin_site.admin_view(view)

        def entered(request: HttpRequest, **captured: Any) -> HttpResponseBase:
            if is_partial(request) and not self.admin_site.has_permission(request):
                # A login page must not replace a part of an open page.
                return HttpResponse(_("Your session has expired. Reload the page to log in."), status=401)
            return behind_login(request, **captured)

        answered = answers_without_databases(self.admin_site, entered)
        if page.method == "GET":
            # In a transaction of the page (ATOMIC_REQUESTS), the health checks would find its locks.
            for alias in connections:
                answered = transaction.non_atomic_requests(using=alias)(answered)
        return answered


def dashboard_of(site: admin.AdminSite) -> "DashboardSite | None":
    """Return the dashboard of an admin site; None if the site has none."""
    model_admin = site._registry.get(Dashboard)
    return model_admin.dashboard if isinstance(model_admin, DashboardAdmin) else None
