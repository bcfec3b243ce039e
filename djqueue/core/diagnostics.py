"""A storage's diagnostics: lines with a stable key and a level."""

from typing import Literal, NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"


class DiagnosticLine(NamedTuple):
    """One line of diagnostics."""

    key: str
    """Stable name: `GROUP.WORD`, followed by `:` and the instance if there are several."""
    group: str
    """Heading of the line."""
    label: str
    value: str
    """Value with its unit."""
    level: str = OK
    """ok | warn | bad"""
    note: str = ""
    """Meaning, or action to take."""


class Diagnostics(NamedTuple):
    """Diagnostics of a storage, its servers or tables, and its maintenance."""

    backend: str
    """memory | database | redis"""
    at: int
    """The storage's time, in UTC milliseconds."""
    lines: list[DiagnosticLine]


class Finding(NamedTuple):
    """A problem, or possible problem, of the storage's servers; one for all servers that have it."""

    id: str
    """Id of the system check."""
    level: Literal["error", "warning", "info"]
    text: str
    hint: str


def size(number: float) -> str:
    """Return a number of bytes in readable form."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1_000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1_000
    return f"{number:.1f} TB"


def workers_line(count: int) -> DiagnosticLine:
    """Return the line with the number of live workers."""
    if count:
        return DiagnosticLine("workers.alive", "Workers", "Live", f"{count:,}")
    return DiagnosticLine(
        "workers.alive",
        "Workers",
        "Live",
        "0",
        WARN,
        "No worker is running: start one with `manage.py runworkers`.",
    )
