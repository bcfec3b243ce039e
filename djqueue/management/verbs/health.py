"""`manage.py djqueue health` and `doctor`."""

import sys
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from djqueue.conf import HealthSettings, get_settings
from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import numbered
from djqueue.health import document, finding_document
from djqueue.management.flags import seconds
from djqueue.operations.doctor import diagnose
from djqueue.operations.healthrun import HealthRun
from djqueue.runtime.exits import FAILED

from .base import Options, Output, Verbs

HEALTH = """Check whether the storage answers and jobs are being run.

The exit code is 0 if every check passes, and 1 otherwise. The bounds are those of the setting HEALTH, unless
options name others.

    manage.py djqueue health
    manage.py djqueue health --max-wait 300 --json
"""

DOCTOR = """Explain what is wrong with the jobs, the storage and the configuration, and how to fix it.

Includes the health checks, the system checks, the settings of the servers, unapplied migrations, clocks and
versions. The exit code is 0 without findings of level error, and 1 otherwise.

    manage.py djqueue doctor
"""


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    for name, run, text in (("health", health, HEALTH), ("doctor", doctor, DOCTOR)):
        _add_bounds(verbs.add(name, run, text))


def health(options: Options, output: Output) -> None:
    """Run the health checks."""
    report = HealthRun(_bounds(options)).report()
    output.document({**document(report), "findings": [finding_document(one) for one in report.findings]})
    output.table(["check", "status"], [[check.name, check.status] for check in report.checks])
    for finding in report.findings:
        output.line(f"\n{finding.id}: {finding.text}\n    Fix: {finding.hint}")
    if not report.is_healthy:
        sys.exit(FAILED)


def doctor(options: Options, output: Output) -> None:
    """Explain each finding."""
    findings = diagnose(_bounds(options))
    has_errors = any(finding.level == "error" for finding in findings)
    output.document(
        {
            "status": "failed" if has_errors else "ok",
            "findings": [finding_document(finding) for finding in findings],
        }
    )
    for finding in findings:
        output.line(f"{finding.level.upper()} {finding.id}\n    {finding.text}\n    Fix: {finding.hint}\n")
    output.line(f"{numbered(len(findings), 'finding')}." if findings else "Nothing is wrong.")
    if has_errors:
        sys.exit(FAILED)


def _add_bounds(parser: ArgumentParser) -> None:
    help_texts = {
        "--max-wait": "Time that a job may be due before it counts as not being claimed.",
        "--lease-grace": "Time after which an expired lease counts as stale.",
        "--timeout": "Time that all health checks together may take.",
    }
    for flag, text in help_texts.items():
        parser.add_argument(flag, type=seconds, metavar="SECONDS", help=f"{text} (default: see HEALTH)")


def _bounds(options: Options) -> HealthSettings:
    try:
        bounds = get_settings().health
    except ConfigurationError:
        bounds = HealthSettings()  # the checks report the settings
    given: dict[str, Any] = {
        name: int(options[name] * 1_000)
        for name in ("max_wait", "lease_grace", "timeout")
        if options[name] is not None
    }
    return replace(bounds, **given)
