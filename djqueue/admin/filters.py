"""List filters whose choices are found without reading millions of rows."""

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from djqueue.dashboard.rendering import REASONS

from . import gate

MAX_CHOICES = 200
"""Queues that a filter offers."""


class ChoiceFilter(admin.SimpleListFilter):
    """A filter by a text column. A subclass says where its choices come from."""

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """Return value and label of each choice."""
        raise NotImplementedError

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
        return [(queue, queue) for queue in gate.used_queues(request, model)[:MAX_CHOICES]]


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
