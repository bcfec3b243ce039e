"""Enqueueing a registered job by hand."""

import json
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import registry
from djqueue.core.errors import DjqueueError
from djqueue.dashboard import audit, rights
from djqueue.dashboard.forms import ArgumentsField, check_arguments
from djqueue.dashboard.jsontext import MAX_LENGTH
from djqueue.dashboard.site import DashboardSite, Pages

pages = Pages()


class EnqueueForm(forms.Form):
    """A registered job and its arguments. Dotted paths can't be entered, only registered jobs chosen."""

    name = forms.ChoiceField(label=gettext_lazy("Job"))
    args = ArgumentsField(
        kind=list,
        label=gettext_lazy("Positional arguments"),
        initial="[]",
        help_text=gettext_lazy("A JSON list."),
        widget=forms.Textarea(attrs={"rows": 3, "maxlength": MAX_LENGTH}),
    )
    kwargs = ArgumentsField(
        kind=dict,
        label=gettext_lazy("Keyword arguments"),
        initial="{}",
        help_text=gettext_lazy("A JSON object."),
        widget=forms.Textarea(attrs={"rows": 3, "maxlength": MAX_LENGTH}),
    )
    queue = forms.CharField(
        label=gettext_lazy("Queue"), required=False, help_text=gettext_lazy("Empty: the job's default.")
    )
    delay = forms.FloatField(label=gettext_lazy("Delay (s)"), required=False, min_value=0)
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"), required=False, help_text=gettext_lazy("Higher values run first.")
    )
    unique_key = forms.CharField(label=gettext_lazy("Unique key"), required=False, max_length=255)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["name"].choices = [(name, name) for name in registry.names()]  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        """Check that the function accepts the arguments."""
        cleaned = self.cleaned_data
        if {"name", "args", "kwargs"} <= cleaned.keys():
            check_arguments(cleaned["name"], cleaned["args"], cleaned["kwargs"])
        return cleaned

    def options(self) -> dict[str, Any]:
        names = ("queue", "delay", "priority", "unique_key")
        return {name: self.cleaned_data[name] for name in names if self.cleaned_data[name] not in (None, "")}


@pages.show("enqueue", "job-types/all/enqueue/", rights.ENQUEUE)
def form(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show the form, with initial values from the query string."""
    return _page(request, site, EnqueueForm(initial=request.GET.dict()))


@pages.act("enqueue_now", "job-types/all/enqueue/now/", rights.ENQUEUE)
def enqueue(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Enqueue the job."""
    form = EnqueueForm(request.POST)
    if not form.is_valid():
        return _page(request, site, form)
    cleaned = form.cleaned_data
    queue = cleaned["queue"] or registry.get(cleaned["name"]).options.queue or ""
    if not rights.sees(request, queue):
        form.add_error("queue", _("The queue doesn't exist or you don't have access."))
        return _page(request, site, form)
    try:
        result = (
            registry.get(cleaned["name"])
            .using(**form.options())
            .enqueue(*cleaned["args"], **cleaned["kwargs"])
        )
    except DjqueueError as error:
        form.add_error(None, rights.reason(error))
        return _page(request, site, form)
    if result.status == "queued":
        audit.note(
            request,
            "enqueue_now",
            queue=result.queue,
            job_id=result.id,
            count=1,
            detail={"name": cleaned["name"], "options": json.loads(json.dumps(form.options(), default=str))},
        )
        messages.success(request, _("Enqueued as %(id)s.") % {"id": result.id})
    else:
        messages.warning(request, _("The job already exists: %(id)s.") % {"id": result.id})
    return site.back(request, "job", result.queue, result.id)


def _page(request: HttpRequest, site: DashboardSite, form: EnqueueForm) -> HttpResponse:
    status = 400 if form.is_bound and form.errors else 200
    return site.render(
        request, "enqueue.html", _("Enqueue job"), {"form": form}, tab="job_types", status=status
    )
