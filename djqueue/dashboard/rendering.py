"""Renders values, times, durations and explanations for pages."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.formats import get_format, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import get_language, gettext_lazy
from django.utils.translation import gettext as _

from djqueue.conf import RATE_UNITS
from djqueue.core import explain
from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.explain import MAX_BEFORE, BlockingJob, Dependency, Explanation
from djqueue.core.job import JobFailure
from djqueue.core.logs import type_name
from djqueue.core.policies import Rate
from djqueue.core.states import PENDING

SHOWN = 10_000
"""Maximum characters shown of a value."""
ONE_LINE = 80
"""Maximum characters of a list or dict of plain values on one line."""
MAX_DEPTH = 30
"""Maximum nesting level shown."""
NOTHING = "-"
YEAR = re.compile(r"%[Yy][-/ ]?|[-/ ]%[Yy]")
"""The year in a date format, with its separator."""
REASONS = {
    "explicit_fail": gettext_lazy("failed permanently"),
    "max_attempts_exceeded": gettext_lazy("no attempts left"),
    "timeout": gettext_lazy("timed out"),
    "stalled": gettext_lazy("stalled too often"),
    "ttl_expired": gettext_lazy("expired before start"),
    "worker_lost": gettext_lazy("worker lost"),
    "worker_crashed": gettext_lazy("process crashed"),
    "memory_limit": gettext_lazy("too much memory"),
    "cpu_limit": gettext_lazy("too much processor time"),
    "process_limit": gettext_lazy("too many processes"),
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
    "error_type": gettext_lazy("Error type"),
    "fingerprint": gettext_lazy("Error"),
    "older_than": gettext_lazy("Older than (s)"),
    "newer_than": gettext_lazy("Newer than (s)"),
}
"""Filters of dead letters."""
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
PROGRESS_KEYS = {"done", "of"}
"""Keys of a mapping that is shown as a bar."""
FRAME = re.compile(r'  File "(?P<path>[^"]+)", line \d+')
LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3[^/\\]*[/\\]|^<")
"""Paths of installed packages, of Python's own modules, and of frames without a file."""
FRAMES_CUT = "  …"


class ProgressValue(NamedTuple):
    """The progress of a job as a page shows it."""

    text: str
    """The text of a value, or the counts of a bar; empty for a bar with only a percentage."""
    share: str = ""
    """Share from 0 to 1 as HTML writes numbers; empty if there is no bar."""
    percent: int = 0


class ShownExplanation(NamedTuple):
    """The explanation on a job's page."""

    word: str
    sentence: str
    until: int | None
    """Time at which the reason is expected to clear, in UTC milliseconds."""
    before: str
    """Place in line and the time until the start, as text; empty if no jobs are ahead, or it is unknown."""
    holders: tuple[BlockingJob, ...]
    unmet: tuple[Dependency, ...]
    workers: tuple[str, ...]


def text(value: Any, limit: int = SHOWN) -> str:
    """Return a value in Python syntax, cut to a maximum length."""
    return "".join(islice(_characters(value), limit))


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
    return _local(value, timezone.get_current_timezone(), get_language())


@lru_cache(maxsize=5_000)
def _local(value: datetime, zone: tzinfo, _language: str | None) -> str:
    return _written(timezone.localtime(value, zone))


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


def clock(value: datetime) -> str:
    """Return hours and minutes in the user's time zone."""
    return timezone.localtime(value).strftime("%H:%M")


def day(value: datetime) -> str:
    """Return the day without the year, in the user's time zone and language."""
    written = YEAR.sub("", get_format("DATE_INPUT_FORMATS")[0])
    is_numeric = "%d" in written and "%m" in written
    return timezone.localtime(value).strftime(written if is_numeric else "%m-%d")


@lru_cache(maxsize=1_000)
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


def failure_line(error: JobFailure) -> str:
    """Return the type of a job's error and the first line of its message."""
    return f"{error.type.rpartition('.')[2]}: {first_line(error.message)}"


def first_line(text: str, longest: int = 120) -> str:
    """Return the first line of a text, cut if too long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= longest else f"{line[:longest]}…"


def number(value: float) -> str:
    """Return a number with separators of thousands."""
    return str(number_format(value, force_grouping=True))


def percent(value: float, places: int = 0) -> str:
    """Return a number of percent."""
    return _("%s%%") % number_format(round(value, places), decimal_pos=places, force_grouping=True)


def duration(milliseconds: float) -> str:
    """Return a duration in a suitable unit: 3 ms, 1.2 s, 4 min, 2.5 h, 3 d."""
    size = abs(milliseconds)
    if size < SECOND:
        return _("%s ms") % _in_unit(milliseconds, 1)
    if size < 2 * MINUTE:
        return _("%s s") % _in_unit(milliseconds, SECOND)
    if size < 2 * HOUR:
        return _("%s min") % _in_unit(milliseconds, MINUTE)
    if size < 2 * DAY:
        return _("%s h") % _in_unit(milliseconds, HOUR)
    return _("%s d") % _in_unit(milliseconds, DAY)


def exact_duration(milliseconds: int) -> str:
    """Return a duration in the largest unit of which it is a whole multiple: 30 s, 90 s, 1 h."""
    units = ((DAY, _("%s d")), (HOUR, _("%s h")), (MINUTE, _("%s min")), (SECOND, _("%s s")))
    for unit, text in units:
        if milliseconds and milliseconds % unit == 0:
            return text % number(milliseconds // unit)
    return _("%s ms") % number(milliseconds)


def progress(value: Any) -> ProgressValue | None:
    """Return the progress of a value.

    A number from 0 to 1 and `{"done": 3, "of": 10}` are bars. None means that no progress was reported.
    """
    if value is None:
        return None
    if _is_number(value) and 0 <= value <= 1:
        return _bar(float(value), "")
    if isinstance(value, Mapping) and value.keys() == PROGRESS_KEYS:
        done, of = value["done"], value["of"]
        if _is_number(done) and _is_number(of) and 0 <= done <= of and of > 0:
            return _bar(done / of, f"{number(done)} / {number(of)}")
    return ProgressValue(text(value))


def app_frames(text: str) -> str | None:
    """Return a traceback with only the application's frames; None if it has no others, or none."""
    shown: list[str] = []
    kept = cut = 0
    is_left_out = False
    for line in text.splitlines():
        frame = FRAME.match(line)
        if frame:
            is_left_out = bool(LIBRARY.search(frame["path"]))
            kept += not is_left_out
            cut += is_left_out
            if is_left_out and shown[-1:] != [FRAMES_CUT]:
                shown.append(FRAMES_CUT)
        elif not line.startswith("    "):
            is_left_out = False
        if not is_left_out:
            shown.append(line)
    return "\n".join(shown) if kept and cut else None


def explained(
    explanation: Explanation | None, sees: Callable[[str], bool], per_minute: float = 0.0
) -> ShownExplanation | None:
    """Return an explanation as text; None if there is nothing to explain.

    Args:
        sees: Whether the user can see a queue; jobs of other queues are not named.
        per_minute: Jobs of the queue that start per minute; 0 if unknown.
    """
    if explanation is None or explanation.verdict == "not_pending":
        return None
    sentence = explain.sentence(explanation, _) or explanation.verdict
    before = ""
    if explanation.before:
        position = number(explanation.before + 1)
        before = _("Number %(number)s in line") % {"number": position}
        if explanation.before >= MAX_BEFORE:
            before = _("10,000 or more jobs are ahead")
        elif per_minute:
            time = duration(explanation.before / per_minute * MINUTE)
            before = _("%(place)s, about %(time)s") % {"place": before, "time": time}
    # A time that is over tells nothing, and that of the next start nothing about jobs behind it.
    is_next = explanation.until is not None and explanation.until > explanation.at and not before
    until = explanation.until if is_next else None
    holders = tuple(one for one in explanation.holders if not one.queue or sees(one.queue))
    unmet = tuple(one for one in explanation.unmet if sees(one.queue))
    return ShownExplanation(explanation.verdict, sentence, until, before, holders, unmet, explanation.workers)


def rate_text(rate: Rate | None) -> str | None:
    """Return a rate as settings write it; one with another period as a phrase."""
    if rate is None:
        return None
    for unit, per in RATE_UNITS.items():
        if rate.per == per:
            return f"{rate.capacity}/{unit}"
    return _("%(count)d in %(seconds)g s") % {"count": rate.capacity, "seconds": rate.per / 1_000}


def _written(value: datetime) -> str:
    # Django's output formats leave out seconds; its first input format has them.
    written = get_format("DATETIME_INPUT_FORMATS")[0]
    return value.strftime(written if "%S" in written else "%Y-%m-%d %H:%M:%S")


def _characters(value: Any) -> Iterator[str]:
    for piece in _pieces(value, 0):
        yield from piece


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield a value in Python syntax, piece by piece, so that what is not shown is not built."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        yield _repr(value)
        return
    if depth == MAX_DEPTH:
        yield "…"
        return
    parts = value.values() if isinstance(value, dict) else value
    if not any(isinstance(part, (dict, list, tuple)) and part for part in parts):
        line = _repr(value)
        if len(line) <= ONE_LINE:
            yield line
            return
    opening, closing = _brackets(value)
    indent = "    " * (depth + 1)
    yield f"{opening}\n"
    for key in value:
        yield indent
        if isinstance(value, dict):
            yield f"{_repr(key)}: "
            yield from _pieces(value[key], depth + 1)
        else:
            yield from _pieces(key, depth + 1)
        yield ",\n"
    yield f"{'    ' * depth}{closing}"


def _repr(value: Any) -> str:
    """Return the representation of a value, whatever a class of the project does."""
    try:
        return repr(value)
    except Exception:
        return f"<{type_name(value)}>"


def _brackets(value: Any) -> tuple[str, str]:
    if isinstance(value, dict):
        return "{", "}"
    return ("[", "]") if isinstance(value, list) else ("(", ")")


def _in_unit(milliseconds: float, unit: int) -> str:
    value = milliseconds / unit
    places = 1 if abs(value) < 10 and unit > 1 and value != int(value) else 0
    return number_format(round(value, places), decimal_pos=places, force_grouping=True)


def _bar(share: float, text: str) -> ProgressValue:
    return ProgressValue(text, f"{share:.4f}", int(share * 100))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
