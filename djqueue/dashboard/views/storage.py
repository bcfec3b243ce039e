"""Diagnostics of the storage and its outbox.

Storages report in English, because they don't depend on Django; the page translates their texts.
"""

import re
from functools import lru_cache

from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext, gettext_lazy, gettext_noop
from django.utils.translation import gettext as _

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.diagnostics import OK, WARN, DiagnosticLine
from djqueue.core.durations import to_milliseconds
from djqueue.dashboard import rendering, rights
from djqueue.dashboard.reading import snapshots
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.models import OutboxJob

pages = Pages()
MAX_COUNTED = 10_000
"""Rows that are counted."""
OUTBOX_LATE = 60_000
"""Milliseconds after which a job should have left the outbox."""
WORDS = frozenset(
    {
        gettext_noop("Storage"),
        gettext_noop("Workers"),
        gettext_noop("Server"),
        gettext_noop("Scheduler"),
        gettext_noop("Sweep"),
        gettext_noop("Tables"),
        gettext_noop("Location"),
        gettext_noop("Queues"),
        gettext_noop("Jobs"),
        gettext_noop("Live"),
        gettext_noop("Version"),
        gettext_noop("Redis version"),
        gettext_noop("File size"),
        gettext_noop("Database size"),
        gettext_noop("Journal mode"),
        gettext_noop("Unwritten jobs"),
        gettext_noop("Last error"),
        gettext_noop("Changes to add up"),
        gettext_noop("Oldest snapshot"),
        gettext_noop("Reachable"),
        gettext_noop("no"),
        gettext_noop("unknown"),
        gettext_noop("not permitted"),
        gettext_noop("Size"),
        gettext_noop("Uptime, seconds"),
        gettext_noop("Memory used"),
        gettext_noop("Memory limit (0B: none)"),
        gettext_noop("Commands per second"),
        gettext_noop("Clients"),
        gettext_noop("Cached scripts"),
        gettext_noop("Keys"),
        gettext_noop("Evicted keys"),
        gettext_noop("Fragmentation ratio"),
        gettext_noop("Persistence"),
        gettext_noop("Replicas"),
        gettext_noop("No worker is running: start one with `manage.py runworkers`."),
        gettext_noop("Reads and writes block each other; use WAL mode."),
        gettext_noop("The first worker changes it to WAL."),
        gettext_noop("While it is open, VACUUM cannot remove the rows of ended jobs."),
        gettext_noop("Nothing sweeps: start a worker with `manage.py runworkers`."),
        gettext_noop(
            "The Redis user may not run INFO, CONFIG GET or MEMORY USAGE; only this page needs them."
        ),
        gettext_noop("Redis has evicted jobs or results: check maxmemory-policy."),
        gettext_noop("Redis deletes jobs when memory is full: set the policy to noeviction."),
        gettext_noop("Redis holds far more system memory than its data uses."),
        gettext_noop("A restart loses every job."),
        gettext_noop("The last write to disk failed."),
    }
)
"""Constant headings, labels, values and notes. A text in neither table is shown unchanged."""
SENTENCES = (
    gettext_noop("%s s ago"),
    gettext_noop("about %s rows, %s, about %s dead rows"),
    gettext_noop("about %s rows, %s"),
    gettext_noop("about %s rows"),
    gettext_noop("%s keys, %s"),
    gettext_noop("Sampled from the first %s of %s queues."),
    gettext_noop("Replica %s lag"),
)
"""Texts with placeholders."""


@pages.show("storage", "storage/", rights.STORAGE, gettext_lazy("Storage"))
def storage(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show the storage's diagnostics."""
    cached = snapshots.read("diagnostics", lambda: get_storage().reads.diagnostics(), fresh=5_000)
    groups: dict[str, list[DiagnosticLine]] = {}
    for line in cached.value.lines:
        shown = translated(line)
        groups.setdefault(shown.group, []).append(shown)
    if get_storage().capabilities.has_outbox and (backlog := outbox_lines(cached.value.backend)):
        groups[_("Outbox")] = backlog
    context = {"groups": list(groups.items()), "about": get_storage().describe()}
    return site.render(request, "storage.html", _("Storage"), context, tab="storage", read=cached)


def outbox_lines(backend: str) -> list[DiagnosticLine]:
    """Return the number of jobs in the outbox and the age of the oldest."""
    rows = rows_of(OutboxJob).order_by("id")
    count = rows[: MAX_COUNTED + 1].count()
    value = number_format(min(count, MAX_COUNTED)) + ("+" if count > MAX_COUNTED else "")
    found = [DiagnosticLine("outbox.jobs", _("Outbox"), _("Jobs"), value)]
    oldest = rows.values_list("created_at", flat=True).first()
    if oldest is not None:
        age = max(0, SYSTEM_CLOCK.now() - to_milliseconds(oldest))
        level, note = OK, ""
        if age > OUTBOX_LATE:
            level, note = WARN, _("Jobs are not reaching the scheduler: check that runworkers is running.")
            if backend == "redis":
                note = _(
                    "Jobs are not reaching Redis: check that Redis and a runworkers process are running."
                )
        found.append(
            DiagnosticLine(
                "outbox.oldest", _("Outbox"), _("Oldest job"), rendering.duration(age), level, note
            )
        )
    return found


def translated(line: DiagnosticLine) -> DiagnosticLine:
    """Return a line in the active language; its key and level are unchanged."""
    return line._replace(
        group=_said(line.group), label=_said(line.label), value=_said(line.value), note=_said(line.note)
    )


def _said(text: str) -> str:
    if text in WORDS:
        return gettext(text)
    for sentence in SENTENCES:
        if found := _pattern(sentence).fullmatch(text):
            return gettext(sentence) % found.groups()
    return text


@lru_cache
def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(re.escape(sentence).replace("%s", "(.+?)"))
