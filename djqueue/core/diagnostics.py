"""How a storage is, as lines for people: each with a key that does not change, and a level."""

from typing import Literal, NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"


class DiagnosticLine(NamedTuple):
    """One thing that is known."""

    key: str
    """Names it for good: `GROUP.WORD`, where there are several of a kind with `:` and which one behind it."""
    group: str
    """Under which heading it belongs."""
    label: str
    value: str
    """With its unit."""
    level: str = OK
    """ok | warn | bad"""
    note: str = ""
    """What it means, or what to do."""


class Diagnostics(NamedTuple):
    """A storage, its servers or tables, and who looks after it."""

    backend: str
    """memory | database | redis"""
    at: int
    """The storage's time, in UTC milliseconds."""
    lines: list[DiagnosticLine]


class Finding(NamedTuple):
    """A problem, or a possible one, of the storage's servers; one for all the servers that have it."""

    id: str
    """The id of the system check."""
    level: Literal["error", "warning", "info"]
    text: str
    hint: str


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1_000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1_000
    return f"{number:.1f} TB"


def workers_line(count: int) -> DiagnosticLine:
    """Return how many workers have been heard of lately."""
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
