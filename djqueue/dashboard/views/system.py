"""The installation: findings of the doctor, diagnostics of the storage and its outbox, settings in effect."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.conf import Settings, get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.messages import HiddenOptions, without_credentials
from djqueue.core.overview import OK, WARN, DiagnosticLine
from djqueue.core.policies import Rate
from djqueue.core.units import to_milliseconds
from djqueue.dashboard import boards, diagnostics, problems, redaction, rendering, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.models import OutboxJob
from djqueue.operations import doctor

pages = Pages()
MAX_COUNTED = 10_000
"""Rows that are counted."""
EXAMINED_FRESH = 60_000
"""Milliseconds before the doctor examines the installation again."""
OUTBOX_LATE = 60_000
"""Milliseconds after which a job should have left the outbox."""
DURATIONS = frozenset(
    {
        "every",
        "heartbeat",
        "lease_grace",
        "max_wait",
        "objective",
        "poll",
        "shutdown_timeout",
        "stuck_timeout",
        "timeout",
    }
)
"""Names of settings in milliseconds."""
OF_QUEUES = ("queues", "limiters")
"""Settings that name queues."""


class SettingLine(NamedTuple):
    """A setting in effect."""

    name: str
    value: str
    is_default: bool


@pages.show("system", "system/", rights.STORAGE, gettext_lazy("System"))
def system(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show what is wrong with the installation, and what it consists of."""
    checks = problems.start_checks()
    cached = read_cache.read("diagnostics", lambda: get_storage().reads.diagnostics(), fresh=5_000)
    groups: dict[str, list[DiagnosticLine]] = {}
    for line in cached.value.lines:
        shown = diagnostics.translated(line)
        groups.setdefault(shown.group, []).append(shown)
    if get_storage().capabilities.has_outbox and (backlog := outbox_lines(cached.value.backend)):
        groups[_("Outbox")] = backlog
    report, found = problems.of_page(request, checks)
    examined = read_cache.read(
        "examined", lambda: doctor.examine(report.facts, asks_servers=False), fresh=EXAMINED_FRESH
    )
    sees_all = boards.sees_all(request)
    others = [
        one
        for one in examined.value
        if one.level != "info" and (sees_all or not one.id.startswith(problems.OF_QUEUES))
    ]
    context = {
        "groups": list(groups.items()),
        "about": get_storage().describe(),
        "findings": doctor.worst_first({*found, *others}),
        "settings": sorted(
            settings_in_effect(get_settings(), hidden=() if sees_all else OF_QUEUES),
            key=lambda line: line.is_default,
        ),
    }
    return site.render(request, "system.html", _("System"), context, tab="system", read=cached)


def settings_in_effect(settings: Any, *, hidden: tuple[str, ...] = ()) -> Iterator[SettingLine]:
    """Yield the settings with the values in effect, without their secrets.

    Args:
        hidden: Names of settings that the user must not see.
    """
    default = Settings()
    for field in fields(settings):
        if field.name in hidden:
            continue
        value, usual = getattr(settings, field.name), getattr(default, field.name)
        name = {"backend": "storage", "storage_options": "storage: options"}.get(field.name, field.name)
        if is_dataclass(value):
            for part in fields(value):
                one = getattr(value, part.name)
                text = redaction.HIDDEN if not part.repr and one else _shown(part.name, one)
                label = f"{name}: {part.name}".upper()
                yield SettingLine(label, text, one == getattr(usual, part.name))
        else:
            yield SettingLine(name.upper(), _shown(field.name, value), value == usual)


def outbox_lines(backend: str) -> list[DiagnosticLine]:
    """Return the number of jobs in the outbox and the age of the oldest."""
    rows = rows_of(OutboxJob).order_by("id")
    count = rows[: MAX_COUNTED + 1].count()
    value = rendering.number(min(count, MAX_COUNTED)) + ("+" if count > MAX_COUNTED else "")
    lines = [DiagnosticLine("outbox.jobs", _("Outbox"), _("Jobs"), value)]
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
        lines.append(
            DiagnosticLine(
                "outbox.oldest", _("Outbox"), _("Oldest job"), rendering.duration(age), level, note
            )
        )
    return lines


def _shown(name: str, value: Any) -> str:
    """Return the value of a setting as text."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return rendering.exact_duration(value) if name in DURATIONS else rendering.number(value)
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, HiddenOptions):
        return repr(value)
    if isinstance(value, (tuple, list, frozenset)) and not hasattr(value, "_asdict"):
        return ", ".join(sorted(map(str, value))) or rendering.NOTHING
    if is_dataclass(value) or hasattr(value, "_asdict"):
        return _changed(value) or rendering.NOTHING
    if isinstance(value, Mapping):
        value = redaction.redact(value, get_settings().dashboard.redact)
        return "; ".join(f"{key}: {_changed(one)}" for key, one in value.items()) or rendering.NOTHING
    return without_credentials(str(value)) or rendering.NOTHING


def _changed(value: Any) -> str:
    """Return the fields of a policy that differ from their defaults."""
    if isinstance(value, Rate):
        return rendering.rate_text(value) or ""
    if not is_dataclass(value) and not hasattr(value, "_asdict"):
        return without_credentials(str(value))
    names = value._fields if hasattr(value, "_asdict") else [one.name for one in fields(value)]
    try:
        usual: Any = type(value)()
    except TypeError:
        return without_credentials(str(value))  # it has fields without defaults
    given = [name for name in names if getattr(value, name) != getattr(usual, name)]
    return ", ".join(f"{name} {_changed(getattr(value, name))}" for name in given)
