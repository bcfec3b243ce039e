"""Translates diagnostics, which storages report in English because they don't depend on Django."""

import re
from functools import lru_cache

from django.utils.translation import gettext

from djqueue.core.overview import COMPOSED, DiagnosticLine


def translated(line: DiagnosticLine) -> DiagnosticLine:
    """Return a line in the active language; its key and level are unchanged.

    A label in lower case is the name of a table, a key or a setting.
    """
    return line._replace(
        group=_translated(line.group),
        label=line.label if line.label[:1].islower() else _translated(line.label),
        value=_translated(line.value),
        note=_translated(line.note),
    )


def _translated(text: str) -> str:
    for parts in COMPOSED:
        if match := _pattern(parts).fullmatch(text):
            return " ".join(map(gettext, parts)) % match.groups()
    return gettext(text) if text else ""


@lru_cache
def _pattern(parts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(re.escape(" ".join(parts)).replace("%s", "(.+?)"))
