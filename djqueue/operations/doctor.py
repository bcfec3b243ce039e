"""Explains what is wrong with the jobs, the storage and the configuration, for `djqueue doctor`."""

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Literal

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.db import Error, connections, router
from django.db.migrations.executor import MigrationExecutor

from djqueue import models
from djqueue._version import __version__
from djqueue.apps import TAG
from djqueue.conf import HealthSettings, get_settings, is_wrong
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError
from djqueue.core.messages import in_one_line, numbered
from djqueue.core.overview import BAD, OK, Finding, QueueOverview

from .healthchecks import HealthFacts, HealthRun, slow_queues, start_bounded, with_ages
from .problems import OBSERVED, problems, read_situation

TIMEOUT = 30.0
"""Seconds that everything but the health checks may take."""
CLOCK_WARNING, CLOCK_ERROR = 1_000, 30_000
"""Milliseconds between this machine's clock and the storage's that are a warning, and an error."""
COVERED = (
    *("server.persistence", "server.policy", "server.up"),
    *("storage.where", "workers.alive"),
)
"""Lines of the storage's diagnostics about which a health check or a system check has a finding."""
LEVELS: dict[int, Literal["error", "warning", "info"]] = {
    checks.INFO: "info",
    checks.WARNING: "warning",
}
"""Levels of system checks; higher ones are errors."""
ORDER = ("error", "warning", "info")
EXTRAS = {"redis": ("redis", "hiredis")}
"""Packages by extra."""
EFFECTS: dict[str, tuple[Literal["error", "warning", "info"], str]] = {
    "redis": ("warning", "replies of Redis are parsed several times more slowly"),
}
"""Level and effect of missing packages by extra."""


def diagnose(bounds: HealthSettings) -> list[Finding]:
    """Return all findings, errors first, within a time limit even if a server hangs."""
    report = HealthRun(bounds).report()
    findings: set[Finding] = set(report.findings)
    done = start_bounded(lambda: findings.update(_examined(report.facts)), "djqueue-doctor")
    if not done.wait(TIMEOUT):
        findings.add(
            Finding(
                "doctor.late",
                "error",
                f"not everything could be examined within {TIMEOUT:g} s",
                "Check whether a server or database hangs.",
            )
        )
    return worst_first(findings)


def _examined(facts: HealthFacts | None) -> list[Finding]:
    return [*examine(facts), *(() if facts is None else _tried(_observed, facts))]


def _observed(facts: HealthFacts) -> list[Finding]:
    """Return the problems that the health checks leave alone."""
    return [one for one in problems(read_situation(facts)) if one.id not in OBSERVED]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, errors first."""
    return sorted(findings, key=lambda one: (ORDER.index(one.level), one.id, one.text))


def examine(facts: HealthFacts | None, *, asks_servers: bool = True) -> list[Finding]:
    """Return the findings that no health check has.

    Args:
        facts: The state of the storage; None if it can't be used.
        asks_servers: Whether the system checks may connect to servers and databases, if the storage answers.
    """
    asks_servers = asks_servers and facts is not None
    findings = [*_system_checks(asks_servers=asks_servers), *_migrations(), *_extras()]
    if facts is not None:
        for examine in (_clocks, _versions, _slow, _diagnostics):
            findings += _tried(examine, facts)
    return findings


def _tried(examine: Callable[[HealthFacts], Iterable[Finding]], facts: HealthFacts) -> Iterable[Finding]:
    try:
        return list(examine(facts))
    except (DjqueueError, Error, OSError) as error:
        return [_unexamined(error)]


def _unexamined(error: Exception) -> Finding:
    return Finding(
        "doctor.unexamined",
        "error",
        f"something could not be examined: {in_one_line(error)}",
        "Fix the other findings first, then run the command again.",
    )


def _system_checks(*, asks_servers: bool) -> Iterator[Finding]:
    """Run the system checks of djqueue with `--deploy`, and with `--database` if the storage answers."""
    aliases = [router.db_for_write(models.Job), router.db_for_write(models.OutboxJob)]
    messages = checks.run_checks(
        tags=[TAG], include_deployment_checks=True, databases=aliases if asks_servers else None
    )
    for message in messages:
        if not message.is_silenced():
            level = LEVELS.get(message.level, "error")
            yield Finding(message.id or "djqueue", level, str(message.msg), message.hint or "")


def _migrations() -> Iterator[Finding]:
    """Find migrations that are not applied to the databases that have tables of djqueue."""
    for alias in {router.db_for_write(model) for model in (models.Job, models.CronJob, models.AuditEvent)}:
        try:
            executor = MigrationExecutor(connections[alias])
            targets = [node for node in executor.loader.graph.leaf_nodes() if node[0] in _labels()]
            missing = [migration for migration, _ in executor.migration_plan(targets)]
        except Error as error:
            yield Finding(
                "doctor.database",
                "error",
                f"the database {alias!r} cannot be used: {in_one_line(error)}",
                "Check that it is running, and the setting DATABASES.",
            )
            continue
        names = [f"{one.app_label}.{one.name}" for one in missing if one.app_label in _labels()]
        if names:
            yield Finding(
                "doctor.migrations",
                "error",
                f"the database {alias!r} lacks {numbered(len(names), 'migration')}: {', '.join(names)}",
                f"Run `manage.py migrate --database {alias}`.",
            )


def _labels() -> set[str]:
    """Return the labels of the installed apps of djqueue."""
    return {app.label for app in apps.get_app_configs() if app.name.partition(".")[0] == "djqueue"}


def _extras() -> Iterator[Finding]:
    """Find packages that the settings make use of and that are not installed."""
    used = {"redis": _backend().startswith("djqueue.storage.redis.")}
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if find_spec(name) is None]
        if used[extra] and missing:
            level, effect = EFFECTS[extra]
            yield Finding(
                "doctor.extra",
                level,
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {effect}",
                f"Run `pip install 'djqueue[{extra}]'`.",
            )


def _backend() -> str:
    configured = getattr(django_settings, "DJQUEUE", {})
    return "" if is_wrong(configured) else get_settings().backend


def _clocks(facts: HealthFacts) -> Iterator[Finding]:
    """Compare the clock of this machine with the storage's."""
    before = SYSTEM_CLOCK.now()
    at = facts.storage.reads.overview([]).at
    after = SYSTEM_CLOCK.now()
    # The storage has read its clock at some time in between.
    ahead = at - after if at > after else min(0, at - before)
    if abs(ahead) >= CLOCK_WARNING:
        yield Finding(
            "doctor.clock",
            "error" if abs(ahead) >= CLOCK_ERROR else "warning",
            f"the storage's clock is {abs(ahead) / 1_000:.1f} s {'ahead of' if ahead > 0 else 'behind'} this "
            "machine's: delayed jobs and schedules start at other times than this machine expects",
            "Synchronize both clocks with NTP.",
        )


def _versions(facts: HealthFacts) -> Iterator[Finding]:
    """Find workers of other versions than this process, or than each other."""
    versions = {worker.version for worker in facts.workers if worker.version}
    others = sorted(versions - {__version__})
    if others:
        yield Finding(
            "doctor.version",
            "warning",
            f"workers run djqueue {', '.join(others)}, and this process runs {__version__}",
            "Deploy one version everywhere, and restart the workers.",
        )


def _slow(facts: HealthFacts) -> Iterator[Finding]:
    """Explain why jobs of queues that workers serve have been due for long."""
    by_meaning: dict[str, list[QueueOverview]] = {}
    for queue, meaning in slow_queues(facts):
        by_meaning.setdefault(meaning, []).append(queue)
    for meaning, queues in by_meaning.items():
        yield Finding(
            "doctor.slow",
            "warning",
            f"jobs wait in {with_ages(facts, queues)}: {meaning}",
            "Add workers or slots, or raise the limit that holds the jobs back.",
        )


def _diagnostics(facts: HealthFacts) -> Iterator[Finding]:
    """Report the lines of the storage's diagnostics that are not in order."""
    for line in facts.storage.reads.diagnostics().lines:
        if line.level != OK and line.key.partition(":")[0] not in COVERED:
            yield Finding(
                f"storage.{line.key}",
                "error" if line.level == BAD else "warning",
                f"{line.group}: {line.label}: {line.value}",
                line.note or "See the page System of the dashboard.",
            )
