"""What a storage says of itself, in the viewer's language: storages know no Django, and say it in English."""

import re
from functools import lru_cache

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from djqueue.core.diagnostics import DiagnosticLine

WORDS = frozenset(
    {
        _("Storage"),
        _("Workers"),
        _("Server"),
        _("Journal"),
        _("Scheduler"),
        _("Tables"),
        _("where"),
        _("queues"),
        _("jobs"),
        _("alive"),
        _("version"),
        _("version, as Redis"),
        _("size of the file"),
        _("size of the database"),
        _("journal mode"),
        _("runs as"),
        _("nobody"),
        _("listens on"),
        _("nothing yet"),
        _("not yet"),
        _("lease renewed"),
        _("jobs to be written"),
        _("last written"),
        _("last upkeep"),
        _("answers"),
        _("no"),
        _("unknown"),
        _("not allowed"),
        _("bytes"),
        _("seconds since its start"),
        _("memory in use"),
        _("most memory (0B: no limit)"),
        _("commands a second"),
        _("clients"),
        _("scripts in the cache"),
        _("keys"),
        _("evicted keys"),
        _("fragmentation"),
        _("persistence"),
        _("replicas"),
        _("Nobody runs jobs: start `manage.py runworkers`."),
        _("Jobs are taken in, but nobody runs them: start `manage.py runworkers`."),
        _("Whoever enqueues waits until the database has caught up."),
        _("Readers and the writer wait for one another: the scheduler sets WAL at its start."),
        _("It may not be asked: INFO, CONFIG GET and MEMORY USAGE are needed for this page only."),
        _("Jobs, or results, are gone: see maxmemory-policy."),
        _("When the memory is full, Redis deletes jobs: set it to noeviction."),
        _("More is taken from the system than is used."),
        _("A restart forgets every job."),
        _("What was written last is not on the disk."),
    }
)
"""Headings, labels, values and notes that are always the same. What is in neither table is shown as it is."""
SENTENCES = (
    _("%s s ago"),
    _("process %s on %s"),
    _("about %s rows, %s"),
    _("about %s rows"),
    _("%s keys, %s"),
    _("Of the first %s of %s queues."),
    _("replica %s is behind by"),
)
"""Those with something in them."""


def translated(line: DiagnosticLine) -> DiagnosticLine:
    """The line in the active language; its key and level stay."""
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
