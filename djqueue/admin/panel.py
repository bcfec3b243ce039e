"""`DjqueueJobsMixin`: the newest jobs about an object, on the object's page in the admin."""

from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.template import Template
from django.template.response import TemplateResponse

from djqueue.core.errors import StorageError
from djqueue.core.options import name_of
from djqueue.dashboard import rights

from .dashboard import dashboard_of

if TYPE_CHECKING:
    from djqueue.core.pages import JobSummary

    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = object

PANEL = "djqueue/admin/jobs_panel.html"


class Panel(NamedTuple):
    """The values that the panel shows."""

    jobs: "list[tuple[JobSummary, str]]"
    """The newest jobs, each with the URL of its page; the URL is empty if the site has no dashboard."""
    all_url: str
    """URL of the list of all jobs about the object; empty if the site has no dashboard."""
    error: str = ""
    """Why the jobs could not be read."""


class DjqueueJobsMixin(ModelAdmin):
    """A panel with the newest jobs about an object: `class OrderAdmin(DjqueueJobsMixin, ModelAdmin)`.

    Users who may view the dashboard see the panel, with jobs from the queues that they may see.
    """

    djq_jobs_shown = 10
    """Maximum number of jobs in the panel."""

    def djq_subject(self, obj: Any) -> str | None:
        """Return the subject of the object's jobs; None if the page has no panel."""
        return name_of(obj)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Render the page with the panel appended to its block `after_related_objects`.

        The panel's template extends the page's own, so that a `change_form_template` still applies.
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
        from djqueue.dashboard import subjects

        subject = self.djq_subject(row) if rights.may(request, rights.VIEW) else None
        if subject is None:
            return None
        dashboard = dashboard_of(self.admin_site)
        all_url = "" if dashboard is None else dashboard.url("jobs", subject=subject)
        try:
            page = subjects.jobs_of(request, subject, self.djq_jobs_shown)
        except StorageError as error:
            return Panel([], all_url, str(error))
        urls = ["" if dashboard is None else dashboard.url("job", job.queue, job.id) for job in page.jobs]
        return Panel(list(zip(page.jobs, urls, strict=True)), all_url)
