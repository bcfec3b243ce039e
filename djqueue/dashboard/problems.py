"""Findings of the health checks on pages: read once for all viewers, and shown to those who may see them."""

from dataclasses import replace
from typing import Any

from django.http import HttpRequest

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import within
from djqueue.core.overview import Finding, Overview
from djqueue.dashboard import boards, reading, rights
from djqueue.operations.healthchecks import HealthReport, HealthRun, facts_of, monitor
from djqueue.operations.problems import Situation

REUSE = 10_000
"""Milliseconds for which pages show the same findings."""
BRIEF = 0.3
"""Seconds that a page waits for findings after its reads have failed."""
OF_QUEUES = ("doctor.slow", "djqueue.")
"""Beginnings of ids of findings outside the health checks that may name queues or limiters."""


def start_checks() -> HealthRun:
    """Return the run of the checks whose findings a page shows. It goes on beside the reads of the page."""
    return monitor.run(get_settings().health, REUSE)


def visible(request: HttpRequest, report: HealthReport) -> list[Finding]:
    """Return the findings of a report if the user may see all that they name: queues, hosts and addresses."""
    if not report.findings or not rights.may(request, rights.STORAGE):
        return []
    queues = report.facts.overview.queues if report.facts is not None else ()
    return report.findings if rights.sees_each(request, (queue.name for queue in queues)) else []


def of_page(request: HttpRequest, run: HealthRun) -> tuple[HealthReport, list[Finding]]:
    """Return the report of a run in the time that is left for the page, and what the user may see of it."""
    report = run.report()
    reading.expire_at(request, SYSTEM_CLOCK.now() + max(0, REUSE - run.age))
    return report, visible(request, report)


def of_outage(request: HttpRequest) -> list[Finding]:
    """Return the findings that may explain why the storage can't be read, without waiting long."""
    with within(BRIEF):
        return visible(request, start_checks().report())


def situation_of(board: boards.Board, **lately: Any) -> Situation:
    """Return the state of the storage on a board of all queues, and what else has happened `lately`.

    A page shows at once what the health checks give a minute: a queue without a worker, for example.
    """
    overview = Overview(board.at, [line.row for line in board.lines])
    bounds = replace(get_settings().health, max_wait=0)
    facts = facts_of(get_storage(), overview, board.workers, bounds)
    return Situation(facts, board.workers, {line.name: line.buckets for line in board.lines}, **lately)
