"""Runs the health checks within a time limit, whatever hangs."""

import logging
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple

from django.db import Error

from djqueue.conf import HealthSettings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import within
from djqueue.core.errors import DjqueueError
from djqueue.core.overview import Finding
from djqueue.core.threads import after_fork

from . import bounded, health
from .health import STORAGE, Check, HealthFacts

logger = logging.getLogger("djqueue.health")

FRESH = 1_000
"""Milliseconds for which a monitor answers with the last report."""

Status = Literal["ok", "failed", "unknown"]


class CheckResult(NamedTuple):
    """The result of one health check."""

    name: str
    status: Status
    """ok | failed | unknown (it did not run, because an earlier check failed)"""
    findings: tuple[Finding, ...] = ()


class HealthReport(NamedTuple):
    """The results of all health checks."""

    checks: tuple[CheckResult, ...]
    facts: HealthFacts | None = None
    """State of the storage that the checks judged; None if the storage can't be used."""

    @property
    def is_healthy(self) -> bool:
        """Whether every check passed."""
        return all(check.status == "ok" for check in self.checks)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all checks."""
        return [finding for check in self.checks for finding in check.findings]


class HealthRun:
    """One run of the checks on a thread of its own, which may hang while a server does not answer.

    Callers wait for the thread only until the deadline.
    """

    def __init__(self, bounds: HealthSettings, clock: Callable[[], int] = SYSTEM_CLOCK.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._began = clock()
        self._results: dict[str, CheckResult] = {}
        self._facts: HealthFacts | None = None
        self._step = STORAGE
        self._done = bounded.start(self._run, "djqueue-health")

    @property
    def is_running(self) -> bool:
        """Whether a check has not returned yet, even if no caller waits for it any longer."""
        return not self._done.is_set()

    @property
    def age(self) -> int:
        """Milliseconds since the start."""
        return self._clock() - self._began

    def report(self) -> HealthReport:
        """Wait for the results until the deadline, and return them."""
        left = max(0, self._bounds.timeout - self.age)
        if self._done.wait(left / 1_000):
            return HealthReport(self._listed(self._results), self._facts)
        # The thread continues, so that its results may change.
        results, step = dict(self._results), self._step
        if step not in results:
            results[step] = CheckResult(step, "failed", (self._late(step),))
        return HealthReport(self._listed(results))

    def _listed(self, results: dict[str, CheckResult]) -> tuple[CheckResult, ...]:
        return tuple(results.get(name) or CheckResult(name, "unknown") for name in (STORAGE, *health.CHECKS))

    def _late(self, step: str) -> Finding:
        return Finding(
            f"health.{step}",
            "error",
            f"the storage did not answer within {self._bounds.timeout / 1_000:g} s",
            "Check whether its server hangs or is overloaded.",
        )

    def _run(self) -> None:
        with within(self._bounds.timeout / 1_000):
            self._run_checks()

    def _run_checks(self) -> None:
        facts = self._checked(STORAGE, lambda: health.read_facts(self._bounds))
        if facts is None:
            return
        self._facts = facts
        self._results[STORAGE] = CheckResult(STORAGE, "ok")
        for name, check in health.CHECKS.items():
            self._step = name
            found = self._checked(name, partial(_tried, check, facts))
            if found is not None:
                self._results[name] = CheckResult(name, "failed" if found else "ok", found)

    def _checked(self, name: str, read: Callable[[], Any]) -> Any:
        """Return what `read` returns; None, with the check failed, if the storage can't be used."""
        try:
            return read()
        except (DjqueueError, Error, OSError) as error:
            finding = health.unreachable(name, error)
        except Exception as error:
            logger.exception("The health check %r raised an exception.", name)
            finding = health.unreachable(name, error)
        self._results[name] = CheckResult(name, "failed", (finding,))
        return None


def _tried(check: Check, facts: HealthFacts) -> tuple[Finding, ...]:
    return tuple(check(facts))


class HealthMonitor:
    """The checks of a process for frequent requests: one run at a time, whose report counts for a second.

    While a run hangs, requests get the report of that run at once, so that they don't add threads.
    """

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = Lock()
        self._current: tuple[HealthSettings, HealthRun] | None = None

    def report(self, bounds: HealthSettings) -> HealthReport:
        """Return the report of the current run, or of a new one."""
        if bounded.is_in_transaction():
            return HealthRun(bounds).report()
        with self._lock:
            if self._current is None or not self._is_current(bounds, *self._current):
                self._current = (bounds, HealthRun(bounds))
            run = self._current[1]
        return run.report()

    @staticmethod
    def _is_current(bounds: HealthSettings, of: HealthSettings, run: HealthRun) -> bool:
        return of == bounds and (run.is_running or run.age < FRESH)

    def forget(self) -> None:
        """Let the next request start a new run."""
        with self._lock:
            self._current = None


monitor = HealthMonitor()
"""The monitor of this process."""
