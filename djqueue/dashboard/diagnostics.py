"""Translates diagnostics, which storages report in English because they don't depend on Django."""

import re
from functools import lru_cache

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from djqueue.core.overview import DiagnosticLine

WORDS = frozenset(
    {
        _("Storage"),
        _("Workers"),
        _("Server"),
        _("Scheduler"),
        _("Sweep"),
        _("Tables"),
        _("Location"),
        _("Queues"),
        _("Jobs"),
        _("Live"),
        _("Version"),
        _("Redis version"),
        _("File size"),
        _("Database size"),
        _("Journal mode"),
        _("Unwritten jobs"),
        _("Last error"),
        _("Changes to add up"),
        _("Oldest snapshot"),
        _("Reachable"),
        _("no"),
        _("unknown"),
        _("not permitted"),
        _("Size"),
        _("Uptime, seconds"),
        _("Memory used"),
        _("Memory limit (0B: none)"),
        _("Commands per second"),
        _("Clients"),
        _("Cached scripts"),
        _("Keys"),
        _("Evicted keys"),
        _("Fragmentation ratio"),
        _("Persistence"),
        _("Replicas"),
        _("No worker is running: start one with `manage.py runworkers`."),
        _("Reads and writes block each other; use WAL mode."),
        _("The first worker changes it to WAL."),
        _("While it is open, VACUUM cannot remove the rows of ended jobs."),
        _("Nothing sweeps: start a worker with `manage.py runworkers`."),
        _("The Redis user may not run INFO, CONFIG GET or MEMORY USAGE; only this page needs them."),
        _("Redis has evicted jobs or results: check maxmemory-policy."),
        _("Redis holds far more system memory than its data uses."),
        _(
            "Nothing is written to disk (appendonly no, no save points): a restart loses every job. "
            "Set appendonly to yes, with appendfsync everysec or always."
        ),
        _("The last write to disk failed."),
    }
)
"""Constant headings, labels, values and notes. A text in neither table is shown unchanged."""
SENTENCES = (
    _("%s s ago"),
    _("about %s rows, %s, about %s dead rows"),
    _("about %s rows, %s"),
    _("about %s rows"),
    _("%s keys, %s"),
    _("Sampled from the first %s of %s queues."),
    _("Replica %s lag"),
    _(
        "maxmemory-policy is %s: when memory is full, Redis evicts jobs or results. Set maxmemory-policy to "
        "noeviction. Use another server for a cache that needs another policy."
    ),
)
"""Texts with placeholders."""


def translated(line: DiagnosticLine) -> DiagnosticLine:
    """Return a line in the active language; its key and level are unchanged."""
    return line._replace(
        group=_translated(line.group),
        label=_translated(line.label),
        value=_translated(line.value),
        note=_translated(line.note),
    )


def _translated(text: str) -> str:
    if text in WORDS:
        return gettext(text)
    for sentence in SENTENCES:
        if match := _pattern(sentence).fullmatch(text):
            return gettext(sentence) % match.groups()
    return text


@lru_cache
def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(re.escape(sentence).replace("%s", "(.+?)"))
