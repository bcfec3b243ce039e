"""Tags and filters for the dashboard's templates: `{% load djq %}`."""

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

from djqueue.core.job import AttemptRecord, JobRecord
from djqueue.core.metrics import Bucket, Histogram, Percentile
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import actions, charts, redaction, rendering
from djqueue.dashboard.actions import Deletion
from djqueue.dashboard.charts import ChartAnnotation
from djqueue.dashboard.site import CONVERTER
from djqueue.models import JobState

register = template.Library()
register.simple_tag(charts.sparkline, name="sparkline")
register.simple_tag(charts.bars, name="bars")
register.filter("arguments", redaction.payload_line)
register.filter("criterion", rendering.criterion)
register.filter("reason", rendering.reason)
register.filter("of_the_app", rendering.app_frames)
register.simple_tag(actions.undo_button, name="undo_button")
register.filter("error_line", rendering.failure_line)


@register.simple_tag(takes_context=True)
def page_url(context: Context, page: str, *args: Any, **query: Any) -> str:
    """Return the URL of a page of the dashboard on this site."""
    address: str = context["dashboard"].url(page, *args, **query)
    return address


@register.simple_tag(takes_context=True)
def nonce(context: Context) -> str:
    """Return the nonce attribute for scripts and styles, if the site's content security policy has one."""
    request = context.get("request")
    value = context.get("csp_nonce") or getattr(request, "csp_nonce", "")
    return format_html(' nonce="{}"', value) if value else ""


@register.simple_tag(takes_context=True)
def breadcrumbs(context: Context) -> SafeString:
    """Return the breadcrumbs, with the markup of the installed Django version."""
    dashboard, crumbs = context["dashboard"], context["crumbs"]
    site = dashboard.site.name
    steps = [(_("Home"), template_url(f"{site}:index"))]
    steps.append(
        (dashboard.opts.app_config.verbose_name, template_url(f"{site}:app_list", dashboard.opts.app_label))
    )
    if context["tab"] != "status":
        steps.append((_("Dashboard"), dashboard.url("status")))
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
    """Return a URL of the site outside the dashboard."""
    return urls.reverse(name, args=args)


@register.filter
def moment(at: int | None) -> str:
    """Format UTC milliseconds as a time in the user's time zone."""
    return rendering.moment(to_datetime(at)) if at else rendering.NOTHING


@register.filter
def moment_in(at: int | None, zone: str) -> str:
    """Format UTC milliseconds as a time in a named time zone."""
    return rendering.moment_in(to_datetime(at), zone) if at else rendering.NOTHING


@register.filter
def ago_in(at: int | None, zone: str) -> str:
    """Format a time like `ago`, with the tooltip in a named time zone."""
    return _ago(at, rendering.local_in(to_datetime(at), zone)) if at else rendering.NOTHING


@register.filter
def ago(at: int | None) -> str:
    """Format UTC milliseconds as an age, which scripts keep up to date."""
    return _ago(at, rendering.local(to_datetime(at))) if at else rendering.NOTHING


def _ago(at: int, shown: str) -> SafeString:
    when = to_datetime(at).isoformat()
    return format_html('<time datetime="{}" title="{}" data-djq-ago>{}</time>', when, shown, shown)


@register.filter
def clock(at: int) -> str:
    """Format UTC milliseconds as hours and minutes in the user's time zone."""
    return rendering.clock(to_datetime(at))


@register.filter
def day_of(at: int) -> str:
    """Format UTC milliseconds as a day in the user's time zone."""
    return rendering.day(to_datetime(at))


@register.filter
def span(milliseconds: float | None) -> str:
    """Format a duration."""
    return rendering.NOTHING if milliseconds is None else rendering.duration(milliseconds)


@register.filter
def percentile_span(value: Percentile | None) -> str:
    """Format a percentile of a histogram; of one beyond its bounds, only the last bound is known."""
    if value is None:
        return rendering.NOTHING
    return f"≥ {span(value.milliseconds)}" if value.is_floor else span(value.milliseconds)


@register.filter
def number(value: float | None, places: int | None = None) -> str:
    """Format a number with thousands separators."""
    if value is None:
        return rendering.NOTHING
    if type(value) is int and not places and -1_000 < value < 1_000:
        return str(value)  # as in every language, in a tenth of the time
    # Django cuts decimals off.
    rounded = value if places is None else round(value, places)
    return number_format(rounded, decimal_pos=places, force_grouping=True)


@register.filter
def percent(value: float, places: int = 0) -> str:
    """Format a number of percent."""
    return rendering.percent(value, places)


@register.filter
def state(value: str) -> SafeString:
    """Format a job's state as a badge."""
    return rendering.badge(value, state_label(value))


@register.filter
def state_label(value: str) -> str:
    """Return the label of a job's state."""
    return str(JobState(State(value).value).label)


@register.filter
def anchor(text: str) -> str:
    """Return a short alphanumeric hash of a name."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


@register.filter
def rate(value: Rate | None) -> str:
    """Format a rate limit."""
    return rendering.rate_text(value) or rendering.NOTHING


@register.simple_tag
def seconds(at: int) -> str:
    """Return a time for a chart, in seconds since 1970."""
    return str(at // 1_000)


@register.simple_tag
def annotations_in(bucket: Bucket, annotations: Sequence[ChartAnnotation]) -> list[ChartAnnotation]:
    """Return the annotations within a bucket."""
    return [
        annotation
        for annotation in annotations or ()
        if bucket.start <= annotation.at < bucket.start + bucket.step
    ]


@register.simple_tag
def in_seconds(milliseconds: float) -> str:
    """Return a duration for a chart, in seconds."""
    return f"{max(1.0, milliseconds) / 1_000:.3f}"


@register.filter
def outcome(word: str) -> str:
    """Return the label of an attempt's outcome."""
    return _("completed") if word == "completed" else rendering.outcome(word)


@register.simple_tag
def took(run: AttemptRecord | JobRecord) -> int | None:
    """Return the duration of a finished attempt, or of a job's last attempt, in milliseconds."""
    if not run.started_at:
        return None
    return run.finished_at - run.started_at if run.finished_at else None


@register.simple_tag
def percentiles(bucket: Bucket) -> list[tuple[Percentile | None, str]]:
    """Return the 50th, 95th and 99th percentiles of wait and run times, each also for a chart."""
    found = [times.percentile(part) for times in (bucket.wait, bucket.run) for part in (0.5, 0.95, 0.99)]
    return [(value, "" if value is None else in_seconds(value.milliseconds)) for value in found]


@register.filter
def quoted(text: str) -> str:
    """Return a name quoted as a path segment."""
    return CONVERTER.to_url(text)


@register.filter
def breakable(dotted: str) -> SafeString:
    """Allow line breaks after the dots and underscores of a dotted name."""
    parts = re.split(r"(?<=[._])", dotted)
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in parts))


@register.filter
def short(dotted: str) -> SafeString:
    """Show the last part of a dotted name. The rest is in its title, and read out and copied with it."""
    before, dot, last = dotted.rpartition(".")
    shown = '<span class="djq-name" title="{}"><span class="djq-module">{}{}</span>{}</span>'
    return format_html(shown, dotted, before, dot, last)


@register.filter
def last_part(dotted: str) -> str:
    """Return the last part of a dotted name."""
    return dotted.rpartition(".")[2]


@register.filter
def of(mapping: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of a mapping, or None."""
    return mapping.get(key)


@register.filter
def minus(number_: int, other: int) -> int:
    """Return the difference."""
    return number_ - other


@register.filter
def since(when: datetime | None) -> str:
    """Format a row's time like `ago`."""
    return ago(None if when is None else to_milliseconds(when))


@register.filter
def since_in(when: datetime | None, zone: str) -> str:
    """Format a row's time like `ago_in`."""
    return ago_in(None if when is None else to_milliseconds(when), zone)


@register.simple_tag
def percentile(times: Histogram, part: int) -> Percentile | None:
    """Return a percentile of a histogram."""
    return times.percentile(part / 100)


@register.simple_tag(takes_context=True)
def job_menu(context: Context, job: JobRecord) -> SafeString:
    """Return the menu of a job in a list. A template would take several times as long."""
    offers = context["menus"].get(job.state)
    if not offers:
        return SafeString("")
    buttons = format_html_join(
        "",
        '<button type="submit" form="djq-act" formaction="{}" class="djq-{}">{}'
        '<span class="djq-sr"> {}</span></button>',
        (
            (page_url(context, offer.page, job.queue, job.id), offer.kind or "plain", offer.label, job.id)
            for offer in offers
        ),
    )
    summary = format_html('<summary>{}<span class="djq-sr"> {}</span></summary>', _("Actions"), job.id)
    return format_html('<details class="djq-menu" data-djq-hold>{}{}</details>', summary, buttons)


@register.simple_tag(takes_context=True)
def pending_job_deletion(context: Context, queue: str, job_id: str) -> Deletion | None:
    """Return the pending deletion of a job."""
    return actions.pending_deletions(context["request"]).job(queue, job_id)


@register.simple_tag(takes_context=True)
def pending_queue_deletions(context: Context, name: str) -> list[Deletion]:
    """Return the pending deletions that cover a queue."""
    return actions.pending_deletions(context["request"]).queue(name)
