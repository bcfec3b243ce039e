"""The list of queues, and the page of a queue: its jobs, concurrency keys and limits, pausing, holding job
types, clearing.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue import Limiter, Queue
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError
from djqueue.core.metrics import HOUR
from djqueue.core.overview import KeyOverview, KeysOverview, LimiterState, QueueOverview
from djqueue.core.policies import GLOBAL, KEYED
from djqueue.core.states import PENDING, State
from djqueue.core.units import to_datetime
from djqueue.dashboard import actions, audit, boards, charts, reading, rendering, rights
from djqueue.dashboard.boards import ESTIMATING, HELD, NEVER, NO_WORKER, PAUSED, STEADY, QueueRow
from djqueue.dashboard.forms import BadInputError, read_state
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.models import BulkKind, JobState

pages = Pages()
ORDERS = {
    "name": lambda line: (line.name,),
    "waiting": lambda line: (-line.waiting, line.name),
    "active": lambda line: (-line.count(State.ACTIVE), line.name),
    "age": lambda line: (-line.age, line.name),
    "dead": lambda line: (-line.count(State.FAILED), line.name),
    "in": lambda line: (-line.arriving, line.name),
    "out": lambda line: (-line.leaving, line.name),
    "wait": lambda line: (-(line.wait_p95.milliseconds if line.wait_p95 else 0), line.name),
    "workers": lambda line: (line.workers, line.name),
    "drain": lambda line: (-_drain(line), line.name),
}
"""Sort keys of the list; most orders put the worst queues first."""
LONGEST_DRAIN = 1e15
"""Milliseconds longer than any estimate."""
TABLE_MINUTES = 5
"""Minutes per column of the table that accompanies the small charts."""
MAX_UNUSED = 50
"""Maximum configured queues without jobs that are named."""
JOBS_LISTED = 50
"""Jobs per page."""
CLEANED = {
    "clear": gettext_lazy("Jobs that have not started"),
    "completed": gettext_lazy("Completed jobs"),
    "cancelled": gettext_lazy("Cancelled jobs"),
    "failed": gettext_lazy("Failed jobs and their dead letters"),
    "obliterate": gettext_lazy("The queue and all of its jobs"),
}
"""Labels of the jobs to delete."""
CLEANED_STATES = {
    "clear": tuple(sorted(PENDING)),
    "completed": (State.COMPLETED,),
    "cancelled": (State.CANCELLED,),
    "failed": (State.FAILED,),
}
"""States of the jobs to delete, by choice. Other choices delete the whole queue."""
HOLD_HOURS = (
    ("", gettext_lazy("When it is released")),
    ("1", gettext_lazy("In 1 hour")),
    ("24", gettext_lazy("In 1 day")),
    ("168", gettext_lazy("In 7 days")),
)
"""Hours for which a job type can be held, with labels."""
SHOWN_KEYS = 50
"""Concurrency keys per page."""


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


class KeyForm(forms.Form):
    """Default limits of a queue's concurrency keys."""

    prefix = "key"

    name = forms.CharField(required=False, strip=False, widget=forms.HiddenInput)
    concurrency = forms.IntegerField(
        label=gettext_lazy("Concurrency"),
        required=False,
        min_value=1,
        help_text=gettext_lazy("Active jobs per key; empty: the value from the settings."),
    )
    rate = forms.CharField(
        label=gettext_lazy("Rate"),
        required=False,
        help_text=gettext_lazy("For example 100/s, 20/m or 5/h; empty: the value from the settings."),
    )

    def given(self) -> dict[str, Any]:
        """Return all limits."""
        return {name: value or None for name, value in self.cleaned_data.items() if name != "name"}


class OneKeyForm(KeyForm):
    """Limits of one concurrency key."""

    weight = forms.IntegerField(
        label=gettext_lazy("Weight"),
        required=False,
        min_value=1,
        help_text=gettext_lazy(
            "Jobs started for each job of a key with weight 1; empty: the value from the settings."
        ),
    )

    field_order = ("name", "concurrency", "rate", "weight")


class HoldForm(forms.Form):
    """When a hold on a job type ends, and its reason."""

    hours = forms.TypedChoiceField(
        label=gettext_lazy("Ends"), choices=HOLD_HOURS, coerce=int, empty_value=None, required=False
    )
    reason = forms.CharField(label=gettext_lazy("Reason"), required=False, max_length=255)


class LimiterView(NamedTuple):
    """A shared limiter as a user sees it."""

    name: str
    state: LimiterState
    takers: tuple[boards.QueueRow, ...]
    """Queues that hold slots, those with most first."""
    waiting: tuple[str, ...]
    """Queues that wait for slots, in their order."""
    hidden: bool
    """Whether some of its queues are hidden from the user."""


class ChartNumbers(NamedTuple):
    """The small charts as a table."""

    starts: list[int]
    """Start of each column, in UTC milliseconds."""
    rows: list[tuple[str, list[int]]]


class CleanForm(forms.Form):
    """Which jobs to delete. Entering the queue's name confirms the deletion."""

    what = forms.ChoiceField(
        label=gettext_lazy("Jobs to delete"),
        choices=[*CLEANED.items()],
    )
    confirm = forms.CharField(label=gettext_lazy("Queue name, to confirm"))

    def __init__(self, queue: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queue = queue

    def clean_confirm(self) -> str:
        typed: str = self.cleaned_data["confirm"]
        if typed != self._queue:
            raise forms.ValidationError(_("The name doesn't match the queue."))
        return typed


@pages.show("queues", "queues/", rights.VIEW, gettext_lazy("Queues"), reading.no_parts)
def queues(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List all queues."""
    cached = boards.board(request)
    term = request.GET.get("q", "").strip().lower()
    chosen = request.GET.get("sort", "name")
    order = chosen if chosen in ORDERS else "name"
    lines = sorted((line for line in cached.value.lines if term in line.name.lower()), key=ORDERS[order])
    context = {
        "lines": lines,
        "term": term,
        "order": order,
        "all": len(cached.value.lines),
        "unused": _unused(request, cached.value.lines, term),
        "twin": _chart_numbers(lines),
    }
    return site.render(request, "queues.html", _("Queues"), context, tab="queues", read=cached)


@pages.act("pause", "queues/<djq:queue>/pause/", rights.PAUSE)
def pause(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Pause the queue. Active jobs go on."""
    return _set_paused(request, site, queue, paused=True)


@pages.act("resume", "queues/<djq:queue>/resume/", rights.PAUSE)
def resume(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Resume the queue."""
    return _set_paused(request, site, queue, paused=False)


@pages.act("hold", "queues/<djq:queue>/holds/<djq:name>/", rights.PAUSE)
def hold(request: HttpRequest, site: DashboardSite, queue: str, name: str) -> HttpResponse:
    """Hold a job type in the queue. Active jobs go on."""
    form = HoldForm(request.POST)
    if not form.is_valid():
        raise BadInputError(form.errors.as_text())
    hours, reason = form.cleaned_data["hours"], form.cleaned_data["reason"]
    until = None if hours is None else to_datetime(SYSTEM_CLOCK.now() + hours * HOUR)
    held = Queue(queue).hold(name, until=until, reason=reason)
    audit.note(request, "hold", queue=queue, detail=held.detail())
    messages.success(request, _("Held %(name)s in %(queue)s.") % {"name": name, "queue": queue})
    return site.back(request, "queue", queue)


@pages.act("release", "queues/<djq:queue>/holds/<djq:name>/release/", rights.PAUSE)
def release(request: HttpRequest, site: DashboardSite, queue: str, name: str) -> HttpResponse:
    """End a hold."""
    if Queue(queue).release(name):
        audit.note(request, "release", queue=queue, detail={"name": name})
        messages.success(request, _("Released %(name)s in %(queue)s.") % {"name": name, "queue": queue})
    else:
        messages.warning(request, _("The hold has already ended."))
    return site.back(request, "queue", queue)


def _parts(request: HttpRequest) -> Hashable:
    return (actions.deletion_parts(request), charts.annotation_parts(request))


@pages.show("queue", "queues/<djq:queue>/", rights.VIEW, parts=_parts)
def queue(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Show the queue, its charts and the jobs of one state."""
    return queue_page(request, site, queue, concurrency_key=request.GET.get("concurrency_key", ""))


@pages.act("limits", "queues/<djq:queue>/limits/", rights.CONFIGURE)
def set_limits(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Change the limits of the queue."""
    return change_limits(
        request,
        site,
        queue,
        "limits",
        "limits_form",
        LimitsForm(request.POST),
        lambda: queue_limits(queue),
        Queue(queue).set_limits,
        _("Changed the limits of %(queue)s.") % {"queue": queue},
    )


@pages.act("clean", "queues/<djq:queue>/clean/", rights.CLEAR)
def clean(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Delete jobs of the queue, or the queue itself, after the undo period."""
    form = CleanForm(queue, request.POST)
    if not form.is_valid():
        return queue_page(request, site, queue, clean_form=form)
    what = form.cleaned_data["what"]
    counts = get_storage().reads.counts(queue)
    if what == "obliterate" and counts.get(State.ACTIVE):
        form.add_error(None, _("The queue has active jobs. Wait until they finish."))
        return queue_page(request, site, queue, clean_form=form)
    states = CLEANED_STATES.get(what, tuple(State))
    count = sum(counts.get(state, 0) for state in states)
    message = ngettext(
        "%(count)d job will be deleted in 30 seconds.",
        "%(count)d jobs will be deleted in 30 seconds.",
        count,
    )
    if what == "obliterate":
        message = _("The queue will be deleted in 30 seconds.")
    kind = BulkKind.OBLITERATE if what == "obliterate" else BulkKind.CLEAN
    which = {} if what == "obliterate" else {"states": tuple(map(str, states))}
    row = actions.begin_deletion(request, kind, queue, count, message % {"count": count}, **which)
    audit.note(request, "clean", queue=queue, count=count, detail={"what": what, "operation": row.pk})
    return site.back(request, "queue", queue)


def change_limits(
    request: HttpRequest,
    site: DashboardSite,
    queue: str,
    action: str,
    field: str,
    form: LimitsForm | KeyForm,
    read: Callable[[], dict[str, Any]],
    change: Callable[..., object],
    message: str,
    detail: Mapping[str, Any] | None = None,
    **where: str,
) -> HttpResponse:
    """Apply a form with limits, record the change and return to the queue.

    Args:
        field: Name of the form's argument of `page`, which shows a form that is not valid.
        read: Returns the current
        change: Sets the
        where: `concurrency_key` of the page to return to.
    """
    if form.is_valid():
        limits = form.given()
        if not limits:
            return site.back(request, "queue", queue)
        before = read()
        try:
            change(**limits)
        except DjqueueError as error:
            form.add_error(None, str(error))
        else:
            audit.note(request, action, queue=queue, detail={**(detail or {}), "old": before, "new": limits})
            messages.success(request, message)
            return site.back(request, "queue", queue, **where)
    shown: dict[str, Any] = {field: form, **where}
    return queue_page(request, site, queue, **shown)


def queue_page(
    request: HttpRequest,
    site: DashboardSite,
    name: str,
    *,
    concurrency_key: str = "",
    limits_form: forms.Form | None = None,
    clean_form: forms.Form | None = None,
    key_form: forms.Form | None = None,
    limiter_form: forms.Form | None = None,
) -> HttpResponse:
    """Render the page. Submitted forms that are not valid are shown with their errors.

    Args:
        concurrency_key: The key that is looked up.
    """
    cached = boards.board(request)
    line = cached.value.line(name) or boards.empty_row(name, cached.value.at)
    state = read_state(request.GET.get("state", "")) or State.WAITING
    jobs = get_storage().reads.cursor_page(name, state, JOBS_LISTED, request.GET.get("at") or None)
    context = {
        "line": line,
        "series": line.buckets,
        "objective": line.objective,
        "annotations": charts.annotations_within(line.buckets),
        "queue": name,
        "state": state.value,
        "states": [
            (
                one.value,
                str(JobState(one.value).label),
                line.count(one),
                site.url("queue", name, state=one.value),
            )
            for one in State
        ],
        "jobs": jobs.jobs,
        "newest": jobs.previous and site.url("queue", name, state=state.value),
        "newer": jobs.previous and site.url("queue", name, state=state.value, at=jobs.previous),
        "older": jobs.next and site.url("queue", name, state=state.value, at=jobs.next),
        "names": sorted(line.row.names.items(), key=lambda item: -item[1])[:10],
        "is_configured": name in get_settings().queues,
        "limits_form": limits_form or LimitsForm(initial=row_limits(line.row)),
        "clean_form": clean_form or CleanForm(name),
        **_keys_context(name, concurrency_key, key_form),
        **_limiter_context(request, name, cached.value, limiter_form),
    }
    submitted = (limits_form, clean_form, key_form, limiter_form)
    status = 400 if any(form is not None and form.errors for form in submitted) else 200
    crumbs = [site.crumb("queues")]
    return site.render(
        request, "queue.html", name, context, tab="queues", crumbs=crumbs, read=cached, status=status
    )


@pages.act("pause_key", "queues/<djq:queue>/keys/pause/", rights.PAUSE)
def pause_key(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Pause the concurrency key. Active jobs go on."""
    return _set_key_paused(request, site, queue, paused=True)


@pages.act("resume_key", "queues/<djq:queue>/keys/resume/", rights.PAUSE)
def resume_key(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Resume the concurrency key."""
    return _set_key_paused(request, site, queue, paused=False)


@pages.act("key_limits", "queues/<djq:queue>/keys/limits/", rights.CONFIGURE)
def key_limits(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Change the limits of a concurrency key, or the default for all keys."""
    key = request.POST.get("key-name", "")

    def read() -> dict[str, Any]:
        found = get_storage().reads.concurrency_keys(queue, 0, [key] if key else [])
        return key_overrides(found.named[0]) if key else default_key_limits(found)

    message = (
        _("Changed the limits of concurrency key %(key)s.")
        if key
        else _("Changed the default limits of concurrency keys.")
    )
    return change_limits(
        request,
        site,
        queue,
        "key_limits",
        "key_form",
        (OneKeyForm if key else KeyForm)(request.POST),
        read,
        partial(Queue(queue).set_key_limit, key or None),
        message % {"key": key},
        {"concurrency_key": key},
        concurrency_key=key,
    )


@pages.act("limiter", "queues/<djq:queue>/limiter/", rights.CONFIGURE)
def limiter(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Change the limits of the shared limiter."""
    name = get_settings().policy(queue).limiter
    if name is None:
        raise Http404
    if not may_set_limiter(request, name):
        audit.note(request, "limiter", queue=queue, refused=True, detail={"limiter": name})
        raise PermissionDenied
    handle = Limiter(name)
    return change_limits(
        request,
        site,
        queue,
        "limiter",
        "limiter_form",
        LimiterForm(request.POST),
        lambda: limiter_limits(handle.state()),
        handle.set,
        _("Changed the limits of %(limiter)s.") % {"limiter": name},
        {"limiter": name},
    )


def queue_limits(name: str) -> dict[str, Any]:
    """Return the current limits of a queue as form values."""
    return row_limits(get_storage().reads.overview([name]).queues[0])


def row_limits(row: QueueOverview) -> dict[str, Any]:
    """Return the limits of a queue that was read before as form values."""
    return {"rate": rendering.rate_text(row.rate), "concurrency": row.concurrency}


def limiter_limits(state: LimiterState) -> dict[str, Any]:
    """Return the limits of a shared limiter as form values."""
    return {"rate": rendering.rate_text(state.rate), "concurrency": state.concurrency}


def key_overrides(key: KeyOverview) -> dict[str, Any]:
    """Return the overrides of a concurrency key as form values."""
    overrides = key.overrides
    return {
        "concurrency": overrides.concurrency,
        "rate": rendering.rate_text(overrides.rate),
        "weight": overrides.weight,
    }


def default_key_limits(keys: KeysOverview) -> dict[str, Any]:
    """Return the default limits of concurrency keys as form values."""
    return {"concurrency": keys.overrides.concurrency, "rate": rendering.rate_text(keys.overrides.rate)}


def read_keys(queue: str, name: str = "") -> KeysOverview:
    """Return the busiest concurrency keys of a queue, and the named one if given."""
    names = [name] if name else []
    cached_as = ("concurrency_keys", queue, *names)
    return read_cache.read(
        cached_as, lambda: get_storage().reads.concurrency_keys(queue, SHOWN_KEYS, names), versioned=True
    ).value


def keys_are_used(keys: KeysOverview, queue: str) -> bool:
    """Return whether the queue has limits of concurrency keys, or waiting jobs with one."""
    policy = get_settings().policy(queue)
    is_configured = policy.key_rate or policy.key_weights or policy.key_concurrency != 1
    is_overridden = any(value is not None and value is not False for value in keys.overrides)
    return keys.mode != GLOBAL and bool(keys.busiest or is_overridden or is_configured or keys.mode == KEYED)


def read_shared_limiter(
    request: HttpRequest, queue: str, lines: Sequence[boards.QueueRow]
) -> LimiterView | None:
    """Return the shared limiter of a queue; None if it has none.

    Args:
        lines: The queues that the user can see.
    """
    name = get_settings().policy(queue).limiter
    if name is None:
        return None
    state = read_cache.read(("limiter", name), lambda: get_storage().limiters.state(name)).value
    sharing = queues_sharing(name)
    takers = [line for line in lines if line.name in sharing and line.row.used]
    return LimiterView(
        name,
        state,
        tuple(sorted(takers, key=lambda line: (-line.row.used, line.name))),
        tuple(one for one in state.waiting if rights.sees(request, one)),
        not may_set_limiter(request, name),
    )


def queues_sharing(limiter: str) -> Mapping[str, Any]:
    """Return the policies of the queues that share a limiter."""
    return {name: policy for name, policy in get_settings().queues.items() if policy.limiter == limiter}


def may_set_limiter(request: HttpRequest, limiter: str) -> bool:
    """Return whether the user can see all queues that share a limiter."""
    return all(rights.sees(request, name) for name in queues_sharing(limiter))


def _unused(request: HttpRequest, lines: Sequence[QueueRow], term: str) -> list[str]:
    """Return the queues of the settings that have had no job: they, too, can be paused on their pages."""
    used = {line.name for line in lines}
    names = (name for name in sorted(get_settings().queues) if name not in used and term in name.lower())
    return [name for name in names if rights.sees(request, name)][:MAX_UNUSED]


def _drain(line: QueueRow) -> float:
    """Return the milliseconds until the queue drains; without an estimate, more than any estimate."""
    never = dict.fromkeys((NEVER, NO_WORKER, PAUSED, HELD), inf)
    drain = line.drain
    return {**never, STEADY: LONGEST_DRAIN, ESTIMATING: LONGEST_DRAIN / 2}.get(drain.kind, drain.latest)


def _chart_numbers(lines: Sequence[QueueRow]) -> ChartNumbers:
    if not lines:
        return ChartNumbers([], [])
    starts = [bucket.start for bucket in lines[0].buckets[::TABLE_MINUTES]]
    return ChartNumbers(starts, [(line.name, _in_steps(line.history)) for line in lines])


def _in_steps(numbers: Sequence[int]) -> list[int]:
    return [sum(numbers[at : at + TABLE_MINUTES]) for at in range(0, len(numbers), TABLE_MINUTES)]


def _set_paused(request: HttpRequest, site: DashboardSite, queue: str, *, paused: bool) -> HttpResponse:
    storage = get_storage()
    detail = {"old": {"paused": storage.queues.is_paused(queue)}, "new": {"paused": paused}}
    (storage.queues.pause if paused else storage.queues.resume)(queue)
    audit.note(request, "pause" if paused else "resume", queue=queue, detail=detail)
    message = _("Paused queue %(queue)s.") if paused else _("Resumed queue %(queue)s.")
    messages.success(request, message % {"queue": queue})
    return site.back(request, "queues")


def _keys_context(name: str, key: str, form: forms.Form | None) -> dict[str, Any]:
    keys = read_keys(name, key)
    if form is None and key:
        form = OneKeyForm(initial={"name": key, **key_overrides(keys.named[0])})
    return {
        "keys": keys,
        "key": key,
        "has_keys": bool(key) or keys_are_used(keys, name),
        "key_form": form or KeyForm(initial=default_key_limits(keys)),
    }


def _limiter_context(
    request: HttpRequest, name: str, board: boards.Board, form: forms.Form | None
) -> dict[str, Any]:
    shared = read_shared_limiter(request, name, board.lines)
    if shared is None:
        return {"shared": None}
    return {
        "shared": shared,
        "limiter_form": form or LimiterForm(initial=limiter_limits(shared.state)),
    }


def _set_key_paused(request: HttpRequest, site: DashboardSite, queue: str, *, paused: bool) -> HttpResponse:
    key = request.POST.get("concurrency_key", "")
    handle = Queue(queue)
    [before] = get_storage().reads.concurrency_keys(queue, 0, [key]).named
    if paused:
        handle.pause_key(key)
        message = _("Paused concurrency key %(key)s.")
    else:
        handle.resume_key(key)
        message = _("Resumed concurrency key %(key)s.")
    detail = {"concurrency_key": key, "old": {"paused": before.paused}, "new": {"paused": paused}}
    audit.note(request, "pause_key" if paused else "resume_key", queue=queue, detail=detail)
    messages.success(request, message % {"key": key})
    return site.back(request, "queue", queue, concurrency_key=key)
