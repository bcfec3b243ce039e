"""List filters that read no column of millions of rows."""

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from djqueue.client import registry
from djqueue.dashboard.rendering import OUTCOMES, REASONS

from . import gate

MOST_QUEUES = 200
"""Queues that a filter offers."""


class ChoiceFilter(admin.SimpleListFilter):
    """A filter by a text column, whose choices come from elsewhere."""

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """(value, label) of each choice."""
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """The choices, and the present one if it is not among them."""
        choices = list(self.choices_of(request, model_admin.model))
        present = self.value()
        if present and present not in dict(choices):
            choices.append((present, present))
        return choices

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Rows of the chosen value."""
        value = self.value()
        return queryset.filter(**{str(self.parameter_name): value}) if value else queryset


class QueueFilter(ChoiceFilter):
    """By queue, of those that the table names and the user may see."""

    title = _("queue")
    parameter_name = "queue"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """See `ChoiceFilter.choices_of`."""
        return [(queue, queue) for queue in gate.used_queues(request, model)[:MOST_QUEUES]]


class NameFilter(ChoiceFilter):
    """By job name, of those that are registered in this process."""

    title = _("job name")
    parameter_name = "name"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """See `ChoiceFilter.choices_of`."""
        return [(name, name) for name in registry.names()]


class ReasonFilter(ChoiceFilter):
    """By the reason of a dead letter."""

    title = _("reason")
    parameter_name = "reason"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """See `ChoiceFilter.choices_of`."""
        return REASONS.items()


class OutcomeFilter(ChoiceFilter):
    """By how a run ended."""

    title = _("outcome")
    parameter_name = "outcome"

    def choices_of(self, request: HttpRequest, model: type[Model]) -> Iterable[tuple[str, Any]]:
        """See `ChoiceFilter.choices_of`."""
        return OUTCOMES.items()
