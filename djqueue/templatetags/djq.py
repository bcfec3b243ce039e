"""What the dashboard's templates are written with: `{% load djq %}`."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

import django
from django import template, urls
from django.template import Context
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.job import AttemptRecord, JobFailure, JobRecord
from djqueue.core.limiter import Rate
from djqueue.core.metrics import Bucket, Histogram
from djqueue.core.states import State
from djqueue.dashboard import arguments as job_arguments
from djqueue.dashboard import drawing, limits, rendering, spans
from djqueue.dashboard.annotations import ChartAnnotation
from djqueue.dashboard.converters import QuotedConverter
from djqueue.models import JobState

register = template.Library()


@register.simple_tag(takes_context=True)
def page_url(context: Context, page: str, *args: Any, **query: Any) -> str:
    """The address of a page of the dashboard on this site."""
    address: str = context["dashboard"].url(page, *args, **query)
    return address


@register.simple_tag(takes_context=True)
def nonce(context: Context) -> str:
    """The nonce of the site's policy for scripts and styles as an attribute, if it has one."""
    request = context.get("request")
    value = context.get("csp_nonce") or getattr(request, "csp_nonce", "")
    return format_html(' nonce="{}"', value) if value else ""


@register.simple_tag(takes_context=True)
def breadcrumbs(context: Context) -> SafeString:
    """The way to this page, in the words of the Django that is there."""
    dashboard, crumbs = context["dashboard"], context["crumbs"]
    site = dashboard.site.name
    steps = [(_("Home"), template_url(f"{site}:index"))]
    steps.append(
        (dashboard.opts.app_config.verbose_name, template_url(f"{site}:app_list", dashboard.opts.app_label))
    )
    if context["tab"] != "changelist":
        steps.append((_("Dashboard"), dashboard.url("changelist")))
    steps += [(crumb.label, crumb.url) for crumb in crumbs]
    if django.VERSION < (6, 1):
        parts = [
            format_html('<a href="{}">{}</a>', url, label) if url else str(label) for label, url in steps
        ]
        joined = format_html_join(mark_safe(" &rsaquo; "), "{}", ((part,) for part in parts))
        return format_html('<div class="breadcrumbs">{}</div>', joined)
    items = format_html_join(
        "",
        "<li{}>{}</li>",
        (
            ("", format_html('<a href="{}">{}</a>', url, label))
            if url
            else (mark_safe(' aria-current="page"'), label)
            for label, url in steps
        ),
    )
    return format_html('<ol class="breadcrumbs">{}</ol>', items)


def template_url(name: str, *args: Any) -> str:
    """An address of the site, outside of the dashboard."""
    return urls.reverse(name, args=args)


@register.filter
def moment(at: int | None) -> str:
    """A time in UTC milliseconds, in the viewer's zone."""
    return rendering.moment(to_datetime(at)) if at else rendering.NOTHING


@register.filter
def moment_in(at: int | None, zone: str) -> str:
    """A time in UTC milliseconds, on the clocks of a named zone, with its abbreviation there."""
    return rendering.moment_in(to_datetime(at), zone) if at else rendering.NOTHING


@register.filter
def ago_in(at: int | None, zone: str) -> str:
    """As `ago`; without scripts, and when pointed at, on the clocks of a named zone."""
    return _ago(at, rendering.local_in(to_datetime(at), zone)) if at else rendering.NOTHING


@register.filter
def ago(at: int | None) -> str:
    """As `moment`; where scripts run, how long ago that is, or how soon."""
    return _ago(at, rendering.local(to_datetime(at))) if at else rendering.NOTHING


def _ago(at: int, shown: str) -> SafeString:
    when = to_datetime(at).isoformat()
    return format_html('<time datetime="{}" title="{}" data-djq-ago>{}</time>', when, shown, shown)


@register.filter
def clock(at: int) -> str:
    """Hours and minutes of a time in UTC milliseconds, in the viewer's zone."""
    return rendering.clock(to_datetime(at))


@register.filter
def day_of(at: int) -> str:
    """The day of a time in UTC milliseconds, in the viewer's zone."""
    return rendering.day(to_datetime(at))


@register.filter
def span(milliseconds: float | None) -> str:
    """A length of time."""
    return rendering.NOTHING if milliseconds is None else spans.shown(milliseconds)


@register.filter
def number(value: float | None, places: int | None = None) -> str:
    """A number with its thousands apart."""
    if value is None:
        return rendering.NOTHING
    return number_format(value, decimal_pos=places, force_grouping=True)


@register.filter
def state(value: str) -> SafeString:
    """A job's state as a label."""
    return rendering.badge(value, state_label(value))


@register.filter
def state_label(value: str) -> str:
    """A job's state in words."""
    return str(JobState(State(value).value).label)


@register.filter
def anchor(text: str) -> str:
    """A short name for what has this name, of letters and digits alone."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


@register.filter
def rate(value: Rate | None) -> str:
    """Starts per time."""
    return limits.written(value) or rendering.NOTHING


@register.simple_tag
def sparkline(values: Sequence[float], label: str) -> SafeString:
    """A small chart of numbers, oldest first."""
    return drawing.sparkline(values, label)


@register.simple_tag
def bars(kinds: Sequence[tuple[str, float]], label: str) -> SafeString:
    """What became of something, again and again, oldest first."""
    return drawing.bars(kinds, label)


@register.simple_tag
def seconds(at: int) -> str:
    """A time for a chart: seconds since 1970."""
    return str(at // 1_000)


@register.simple_tag
def annotations_in(bucket: Bucket, annotations: Sequence[ChartAnnotation]) -> list[ChartAnnotation]:
    """Marks of the time that a bucket is of."""
    return [
        annotation
        for annotation in annotations or ()
        if bucket.start <= annotation.at < bucket.start + bucket.step
    ]


@register.simple_tag
def in_seconds(milliseconds: float) -> str:
    """A length of time for a chart."""
    return f"{max(1.0, milliseconds) / 1_000:.3f}"


@register.filter
def outcome(word: str) -> str:
    """How a run ended."""
    return _("completed") if word == "completed" else rendering.outcome(word)


@register.simple_tag
def took(run: AttemptRecord | JobRecord) -> int | None:
    """Milliseconds of a run, or of a job's last run, that has ended."""
    if not run.started_at:
        return None
    return run.finished_at - run.started_at if run.finished_at else None


@register.simple_tag
def percentiles(bucket: Bucket) -> list[tuple[float | None, str]]:
    """Of waiting and of running, the 50th, 95th and 99th: in milliseconds, and for a chart in seconds."""
    found = [times.percentile(part) for times in (bucket.wait, bucket.run) for part in (0.5, 0.95, 0.99)]
    return [(value, "" if value is None else in_seconds(value)) for value in found]


@register.filter
def error_line(error: JobFailure) -> str:
    """What was raised, in a line."""
    return f"{error.type.rpartition('.')[2]}: {rendering.first_line(error.message)}"


@register.filter
def arguments(record: JobRecord) -> str:
    """What a job is called with, redacted, in a line."""
    return job_arguments.one_line(record)


@register.filter
def quoted(text: str) -> str:
    """A name as a part of an address."""
    return QuotedConverter().to_url(text)


@register.filter
def breakable(dotted: str) -> SafeString:
    """A dotted name that may go on in the next line behind its dots and underscores."""
    parts = re.split(r"(?<=[._])", dotted)
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in parts))


@register.filter
def last_part(dotted: str) -> str:
    """The last part of a dotted name."""
    return dotted.rpartition(".")[2]


@register.filter
def criterion(word: str) -> str:
    """What dead letters are chosen by, in words."""
    return rendering.criterion(word)


@register.filter
def reason(word: str) -> str:
    """A dead letter's reason in words."""
    return rendering.reason(word)


@register.filter
def of(mapping: Mapping[str, Any], key: str) -> Any:
    """What a mapping has under a key, if it has it."""
    return mapping.get(key)


@register.filter
def minus(number_: int, other: int) -> int:
    """What is left."""
    return number_ - other


@register.filter
def since(when: datetime | None) -> str:
    """As `ago`, of a row's time."""
    return ago(None if when is None else to_milliseconds(when))


@register.filter
def since_in(when: datetime | None, zone: str) -> str:
    """As `ago_in`, of a row's time."""
    return ago_in(None if when is None else to_milliseconds(when), zone)


@register.simple_tag
def percentile(times: Histogram, part: int) -> float | None:
    """Milliseconds that so many of a hundred took no longer than."""
    return times.percentile(part / 100)
