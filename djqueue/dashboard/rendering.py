"""Renders values for pages."""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from urllib.parse import urlencode

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.formats import get_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.states import PENDING

SHOWN = 10_000
"""Maximum characters shown of a value."""
ONE_LINE = 80
"""Maximum characters of a list or dict of plain values on one line."""
DEEPEST = 30
"""Maximum nesting level shown."""
NOTHING = "-"
YEAR = re.compile(r"%[Yy][-/ ]?|[-/ ]%[Yy]")
"""The year in a date format, with its separator."""

REASONS = {
    "explicit_fail": gettext_lazy("failed explicitly"),
    "max_attempts_exceeded": gettext_lazy("no attempts left"),
    "timeout": gettext_lazy("timed out"),
    "stalled": gettext_lazy("stalled too often"),
    "ttl_expired": gettext_lazy("expired before start"),
    "worker_lost": gettext_lazy("worker lost"),
    "worker_crashed": gettext_lazy("process crashed"),
    "memory_limit": gettext_lazy("too much memory"),
    "dependency_failed": gettext_lazy("dependency failed"),
    "enqueue_rejected": gettext_lazy("rejected by a bulk write"),
    "invalid_payload": gettext_lazy("invalid payload"),
    "invalid_result": gettext_lazy("invalid result"),
    "unknown": gettext_lazy("unknown"),
}
"""Reasons of dead letters."""
OUTCOMES = {
    "failed": gettext_lazy("failed"),
    "retried": gettext_lazy("failed, retried"),
    "released": gettext_lazy("released"),
    "stalled": gettext_lazy("stalled (lease expired)"),
    "cancelled": gettext_lazy("cancelled"),
}
"""Outcomes of attempts that did not complete the job."""
CRITERIA = {
    "reason": gettext_lazy("Reason"),
    "name": gettext_lazy("Job"),
    "error_type": gettext_lazy("Error"),
    "fingerprint": gettext_lazy("Fingerprint"),
    "older_than": gettext_lazy("Older than (s)"),
    "newer_than": gettext_lazy("Newer than (s)"),
}
"""Filters of dead letters."""


def reason(word: str) -> str:
    """Return the label of a dead letter's reason."""
    return str(REASONS.get(word, word))


def outcome(word: str) -> str:
    """Return the label of an attempt's outcome."""
    return str(OUTCOMES.get(word, word))


def criterion(word: str) -> str:
    """Return the label of a filter of dead letters."""
    return str(CRITERIA.get(word, word))


def link(address: str, text: str, **query: str) -> SafeString:
    """Return a link."""
    target = f"{address}?{urlencode(query)}" if query else address
    return format_html('<a href="{}">{}</a>', target, text)


def mono(text: str) -> SafeString:
    """Return a text in a monospaced font."""
    return format_html('<span class="djq-mono">{}</span>', text)


def moment(value: datetime | None) -> str:
    """Return a time to the second, in the user's time zone and language."""
    if value is None:
        return NOTHING
    return format_html('<time datetime="{}">{}</time>', value.isoformat(), local(value))


def local(value: datetime) -> str:
    """Return a time to the second as text, in the user's time zone and language."""
    return _written(timezone.localtime(value))


def moment_in(value: datetime, zone: str) -> str:
    """Return a time to the second, in a named time zone."""
    return format_html('<time datetime="{}">{}</time>', value.isoformat(), local_in(value, zone))


def local_in(value: datetime, zone: str) -> str:
    """Return a time as text in a named time zone, with the abbreviation of the zone."""
    from djqueue.schedules.zones import parse_timezone

    try:
        zoned = value.astimezone(parse_timezone(zone))
    except OptionError:
        zoned = value.astimezone(UTC)  # the page shows the error in the name
    return f"{_written(zoned)} {zoned.tzname()}"


def _written(value: datetime) -> str:
    # Django's output formats leave out seconds; its first input format has them.
    written = get_format("DATETIME_INPUT_FORMATS")[0]
    return value.strftime(written if "%S" in written else "%Y-%m-%d %H:%M:%S")


def clock(value: datetime) -> str:
    """Return hours and minutes in the user's time zone."""
    return timezone.localtime(value).strftime("%H:%M")


def day(value: datetime) -> str:
    """Return the day without the year, in the user's time zone and language."""
    written = YEAR.sub("", get_format("DATE_INPUT_FORMATS")[0])
    is_numeric = "%d" in written and "%m" in written
    return timezone.localtime(value).strftime(written if is_numeric else "%m-%d")


def badge(state: str, label: str) -> SafeString:
    """Return a job's state as a label."""
    return render_to_string("djqueue/state_badge.html", {"state": state, "label": label})


def job_state(job: Any) -> SafeString:
    """Return a job's state as a label, with a note if the job has no handler."""
    from djqueue.client import registry

    shown = badge(job.state, job.get_state_display())
    if job.state in PENDING and job.name not in registry.names():
        return noted(shown, _("no handler registered"))
    return shown


def noted(text: str, note: str) -> SafeString:
    """Return a text followed by a note."""
    return format_html('{} <span class="djq-note">{}</span>', text, note)


def decoded(data: Any, content_type: str) -> str:
    """Return a stored value as text, or why it can't be decoded."""
    from djqueue.codecs import decode

    if data is None:
        return NOTHING
    return shown(lambda: decode(bytes(data), content_type))


def shown(read: Callable[[], Any]) -> str:
    """Return a value as text, or the reason why reading it failed."""
    try:
        value = read()
    except SerializationError as error:
        return format_html('<p class="djq-note">{} {}</p>', _("Can't be displayed:"), str(error))
    return preformatted(text(value, SHOWN + 1))


def text(value: Any, limit: int = SHOWN) -> str:
    """Return a value in Python syntax, cut to a maximum length."""
    return "".join(islice(_characters(value), limit))


def preformatted(text: str, *, end: bool = False) -> str:
    """Return a text unchanged; of a long one the start, or the end."""
    if not text:
        return NOTHING
    shown = text if len(text) <= SHOWN else text[-SHOWN:] if end else text[:SHOWN]
    block = format_html('<pre class="djq-value">{}</pre>', shown)
    if len(text) <= SHOWN:
        return block
    note = _("Showing the last 10,000 characters.") if end else _("Showing the first 10,000 characters.")
    return format_html('{}<p class="djq-note">{}</p>', block, note)


def attempts(rows: Sequence[Any], limit: int) -> str:
    """Return attempts as a table."""
    entries = [
        {
            "number": row.attempt,
            "outcome": outcome(row.outcome),
            "started": moment(row.started_at),
            "finished": moment(row.finished_at),
            "worker": row.worker,
            "error": error_line(row),
        }
        for row in rows
    ]
    context = {"attempts": entries, "limit": limit, "cut": len(entries) == limit}
    return render_to_string("djqueue/admin/attempts.html", context) if entries else NOTHING


def log(rows: Sequence[Any], limit: int) -> str:
    """Return log lines as a list."""
    lines = [{"time": moment(row.at), "text": row.line} for row in rows]
    context = {"lines": lines, "limit": limit, "cut": len(lines) == limit}
    return render_to_string("djqueue/admin/log.html", context) if lines else NOTHING


def error_line(row: Any) -> str:
    """Return the type of an exception and the first line of its message."""
    kind = row.error_type.rpartition(".")[2]
    message = first_line(row.error_message)
    return f"{kind}: {message}" if kind and message else kind or message or NOTHING


def first_line(text: str, longest: int = 120) -> str:
    """Return the first line of a text, cut if too long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= longest else f"{line[:longest]}…"


def _characters(value: Any) -> Iterator[str]:
    for piece in _pieces(value, 0):
        yield from piece


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield a value in Python syntax, piece by piece, so that what is not shown is not built."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        yield repr(value)
        return
    if depth == DEEPEST:
        yield "…"
        return
    parts = value.values() if isinstance(value, dict) else value
    if not any(isinstance(part, (dict, list, tuple)) and part for part in parts):
        line = repr(value)
        if len(line) <= ONE_LINE:
            yield line
            return
    opening, closing = _brackets(value)
    indent = "    " * (depth + 1)
    yield f"{opening}\n"
    for key in value:
        yield indent
        if isinstance(value, dict):
            yield f"{key!r}: "
            yield from _pieces(value[key], depth + 1)
        else:
            yield from _pieces(key, depth + 1)
        yield ",\n"
    yield f"{'    ' * depth}{closing}"


def _brackets(value: Any) -> tuple[str, str]:
    if isinstance(value, dict):
        return "{", "}"
    return ("[", "]") if isinstance(value, list) else ("(", ")")
