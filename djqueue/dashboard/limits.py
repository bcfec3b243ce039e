"""Limits that pages show and change: of queues, groups and shared limiters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.conf import RATE_UNITS, get_settings
from djqueue.core.overview import GroupOverview, GroupsOverview, LimiterState, QueueOverview
from djqueue.core.policies import GLOBAL, KEYED, Rate

from . import queries, rights
from .snapshot import snapshots

SHOWN_GROUPS = 50
"""Groups per page."""


class LimitsForm(forms.Form):
    """Limits of a queue. They apply to all workers immediately."""

    rate = forms.CharField(
        label=gettext_lazy("Rate"),
        required=False,
        show_hidden_initial=True,
        help_text=gettext_lazy("For example 100/s, 20/m or 5/h; empty: no limit."),
    )
    concurrency = forms.IntegerField(
        label=gettext_lazy("Concurrency"),
        required=False,
        min_value=1,
        show_hidden_initial=True,
        help_text=gettext_lazy("Active jobs across all workers; empty: no limit."),
    )

    def given(self) -> dict[str, Any]:
        """Return the changed limits.

        Limits that another user changed in the meantime are left alone, if the form has its initial values.
        """
        values = {"rate": self.cleaned_data["rate"] or None, "concurrency": self.cleaned_data["concurrency"]}
        changed = self.changed_data
        return {
            name: value
            for name, value in values.items()
            if name in changed or self.add_initial_prefix(name) not in self.data
        }


class LimiterForm(LimitsForm):
    """Limits of a shared limiter."""

    prefix = "limiter"


class GroupForm(forms.Form):
    """Default limits of a queue's groups."""

    prefix = "group"

    name = forms.CharField(required=False, strip=False, widget=forms.HiddenInput)
    concurrency = forms.IntegerField(
        label=gettext_lazy("Concurrency"),
        required=False,
        min_value=1,
        help_text=gettext_lazy("Active jobs per group; empty: the value from the settings."),
    )
    rate = forms.CharField(
        label=gettext_lazy("Rate"),
        required=False,
        help_text=gettext_lazy("For example 100/s, 20/m or 5/h; empty: the value from the settings."),
    )

    def given(self) -> dict[str, Any]:
        """Return all limits."""
        return {name: value or None for name, value in self.cleaned_data.items() if name != "name"}


class OneGroupForm(GroupForm):
    """Limits of one group."""

    weight = forms.IntegerField(
        label=gettext_lazy("Weight"),
        required=False,
        min_value=1,
        help_text=gettext_lazy(
            "Jobs started for each job of a group with weight 1; empty: the value from the settings."
        ),
    )

    field_order = ("name", "concurrency", "rate", "weight")


class Shared(NamedTuple):
    """A shared limiter as a user sees it."""

    name: str
    state: LimiterState
    takers: tuple[queries.QueueRow, ...]
    """Queues that hold slots, those with most first."""
    waiting: tuple[str, ...]
    """Queues that wait for slots, in their order."""
    hidden: bool
    """Whether some of its queues are hidden from the user."""


def of_queue(name: str) -> dict[str, Any]:
    """Return the current limits of a queue as form values."""
    return of_row(get_storage().reads.overview([name]).queues[0])


def of_row(row: QueueOverview) -> dict[str, Any]:
    """Return the limits of a queue that was read before as form values."""
    return {"rate": written(row.rate), "concurrency": row.concurrency}


def of_limiter(state: LimiterState) -> dict[str, Any]:
    """Return the limits of a shared limiter as form values."""
    return {"rate": written(state.rate), "concurrency": state.concurrency}


def of_group(group: GroupOverview) -> dict[str, Any]:
    """Return the overrides of a group as form values."""
    said = group.overrides
    return {"concurrency": said.concurrency, "rate": written(said.rate), "weight": said.weight}


def of_groups(found: GroupsOverview) -> dict[str, Any]:
    """Return the default limits of groups as form values."""
    return {"concurrency": found.overrides.concurrency, "rate": written(found.overrides.rate)}


def groups(queue: str, name: str = "") -> GroupsOverview:
    """Return the busiest groups of a queue, and the named one if given."""
    names = [name] if name else []
    key = ("groups", queue, *names)
    return snapshots.read(
        key, lambda: get_storage().reads.groups(queue, SHOWN_GROUPS, names), versioned=True
    ).value


def are_used(found: GroupsOverview, queue: str) -> bool:
    """Return whether the queue has group limits, or waiting jobs with a group."""
    policy = get_settings().policy(queue)
    configured = policy.group_rate or policy.group_weights or policy.group_concurrency != 1
    told = any(value is not None and value is not False for value in found.overrides)
    return found.mode != GLOBAL and bool(found.busiest or told or configured or found.mode == KEYED)


def shared(request: HttpRequest, queue: str, lines: Sequence[queries.QueueRow]) -> Shared | None:
    """Return the shared limiter of a queue; None if it has none.

    Args:
        lines: The queues that the user can see.
    """
    name = get_settings().policy(queue).limiter
    if name is None:
        return None
    state = snapshots.read(("limiter", name), lambda: get_storage().limiters.state(name)).value
    sharing = queues_of(name)
    takers = [line for line in lines if line.name in sharing and line.row.used]
    return Shared(
        name,
        state,
        tuple(sorted(takers, key=lambda line: (-line.row.used, line.name))),
        tuple(one for one in state.waiting if rights.sees(request, one)),
        not may_set(request, name),
    )


def queues_of(limiter: str) -> Mapping[str, Any]:
    """Return the policies of the queues that share a limiter."""
    return {name: policy for name, policy in get_settings().queues.items() if policy.limiter == limiter}


def may_set(request: HttpRequest, limiter: str) -> bool:
    """Return whether the user can see all queues that share a limiter."""
    return all(rights.sees(request, name) for name in queues_of(limiter))


def written(rate: Rate | None) -> str | None:
    """Return a rate as settings write it; one with another period as a phrase."""
    if rate is None:
        return None
    for unit, per in RATE_UNITS.items():
        if rate.per == per:
            return f"{rate.capacity}/{unit}"
    return _("%(count)d in %(seconds)g s") % {"count": rate.capacity, "seconds": rate.per / 1_000}
