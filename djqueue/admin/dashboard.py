"""The dashboard's place in an admin site: the list of a model that has no table."""

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from djqueue.dashboard import rights
from djqueue.dashboard.outages import answers_without_databases
from djqueue.dashboard.pages import DashboardPage
from djqueue.dashboard.site import DashboardSite, is_partial
from djqueue.dashboard.urls import PAGES
from djqueue.models import Dashboard

from .base import ModelAdmin


@admin.register(Dashboard)
class DashboardAdmin(ModelAdmin):
    """Every page below `djqueue/dashboard/`."""

    def get_urls(self) -> list[URLPattern]:
        """The pages of `djqueue.dashboard.urls`, each behind the site's login."""
        site = DashboardSite(self, PAGES)
        return [
            path(page.route, self._view(site, page), name=f"djqueue_dashboard_{page.name}") for page in PAGES
        ]

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Whether the site's index is to list it."""
        return rights.may(request, rights.VIEW)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether the user may open it."""
        return rights.may(request, rights.VIEW)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """No: there is no table."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No: there is no table."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No: there is no table."""
        return False

    def _view(self, site: DashboardSite, page: DashboardPage) -> Callable[..., HttpResponseBase]:
        def view(request: HttpRequest, **captured: Any) -> HttpResponseBase:
            return site.serve(page, request, **captured)

        behind_login = self.admin_site.admin_view(view)

        def entered(request: HttpRequest, **captured: Any) -> HttpResponseBase:
            if is_partial(request) and not self.admin_site.has_permission(request):
                # A login page has no place inside of another page.
                return HttpResponse(_("Your session has expired. Reload the page to log in."), status=401)
            return behind_login(request, **captured)

        return answers_without_databases(self.admin_site, entered)
