"""`DjqueueJobsMixin`: an object's page in the admin, with the jobs about the object."""

from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.template import Template
from django.template.response import TemplateResponse

from djqueue.core.errors import StorageError
from djqueue.core.subjects import name_of
from djqueue.core.summaries import JobSummary
from djqueue.dashboard import rights, subjects
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.urls import PAGES
from djqueue.models import Dashboard

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = object

PANEL = "djqueue/admin/jobs_panel.html"


class Panel(NamedTuple):
    """What is shown of an object's jobs."""

    jobs: list[tuple[JobSummary, str]]
    """The newest, each with the address of its page; that is empty where the site has no dashboard."""
    everything: str
    """The address of the list of them all; empty where the site has no dashboard."""
    away: str = ""
    """Why they could not be read."""


class DjqueueJobsMixin(ModelAdmin):
    """The newest jobs about an object, below its form: `class OrderAdmin(DjqueueJobsMixin, ModelAdmin)`.

    For those who may view the dashboard, of the queues that they see.
    """

    djq_jobs_shown = 10
    """How many."""

    def djq_subject(self, obj: Any) -> str | None:
        """What the object's jobs are about; None: it has no jobs."""
        return name_of(obj)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """The page as it is without this, with the panel in its block `after_related_objects`.

        Whatever template the page has is extended, so that a `change_form_template` stays what it is.
        """
        response: HttpResponse = super().render_change_form(request, context, *args, **kwargs)
        row = context.get("original")
        if row is None or not isinstance(response, TemplateResponse) or context.get("is_popup"):
            return response
        panel = self._djq_panel(request, row)
        template = getattr(response.resolve_template(response.template_name), "template", None)
        if panel is not None and isinstance(template, Template) and response.context_data is not None:
            response.context_data.update(djq_jobs=panel, djq_page=template)
            response.template_name = PANEL
        return response

    def _djq_panel(self, request: HttpRequest, row: Model) -> Panel | None:
        subject = self.djq_subject(row) if rights.may(request, rights.VIEW) else None
        if subject is None:
            return None
        model_admin = self.admin_site._registry.get(Dashboard)
        site = None if model_admin is None else DashboardSite(model_admin, PAGES)
        everything = "" if site is None else site.url("jobs", subject=subject)
        try:
            page = subjects.about(request, subject, self.djq_jobs_shown)
        except StorageError as error:
            return Panel([], everything, str(error))
        addresses = ["" if site is None else site.url("job", one.queue, one.id) for one in page.jobs]
        return Panel(list(zip(page.jobs, addresses, strict=True)), everything)
