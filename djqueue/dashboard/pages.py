"""What a page is: its address, its view, and the right that it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponseBase

from .freshness import Parts

View = Callable[..., HttpResponseBase]


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardPage:
    """One address of the dashboard.

    name: of its address, behind `djqueue_dashboard_`.
    route: below the dashboard's own address.
    view: called with the request, the desk, and what the route captures.
    right: without which it answers 403, and is linked from nowhere.
    method: GET shows and changes nothing; POST changes something, and leads back to a page.
    label: in the navigation, if it is there.
    parts: what its live part shows beside what `Storage.change_version` covers; None: that is not known, so
        that an unchanged part is rendered to be compared.
    """

    name: str
    route: str
    view: View
    right: str
    method: str = "GET"
    label: Any = ""
    parts: Parts | None = None


class Pages:
    """The pages of one module of views, in the order in which they are defined."""

    def __init__(self) -> None:
        self.all: list[DashboardPage] = []

    def show(
        self, name: str, route: str, right: str, label: Any = "", parts: Parts | None = None
    ) -> Callable[[View], View]:
        """Decorates a view that shows something."""
        return self._listed(name, route, right, "GET", label, parts)

    def act(self, name: str, route: str, right: str) -> Callable[[View], View]:
        """Decorates a view that does something."""
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
