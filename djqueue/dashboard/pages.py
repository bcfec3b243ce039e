"""Pages: each has a URL, a view and a required permission."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponseBase

from .freshness import Parts

View = Callable[..., HttpResponseBase]


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardPage:
    """A URL of the dashboard.

    Attributes:
        name: Name of the URL, without the prefix `djqueue_dashboard_`.
        route: Route below the dashboard's URL.
        view: Called with the request, the dashboard site and the captured values.
        right: Required permission. Without it the page responds with status 403 and is not linked.
        method: GET for pages that only show data; POST for actions, which redirect to a page.
        label: Label of the page's tab, if it has one.
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
        return self._listed(name, route, right, "GET", label, parts)

    def act(self, name: str, route: str, right: str) -> Callable[[View], View]:
        """Register a view that performs an action."""
        return self._listed(name, route, right, "POST", "", None)

    def _listed(
        self, name: str, route: str, right: str, method: str, label: Any, parts: Parts | None
    ) -> Callable[[View], View]:
        def listed(view: View) -> View:
            page = DashboardPage(
                name=name, route=route, view=view, right=right, method=method, label=label, parts=parts
            )
            self.all.append(page)
            return view

        return listed
