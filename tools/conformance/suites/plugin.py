"""A plugin for pytest that reports the outcome of each test as a line of JSON, and gives tests more time.

The time limits of the suites are for machines that do nothing else; here they would measure the machine.
"""

import json
import os
from pathlib import Path

import django
import pytest

SHORTEST_LIMIT = 900
"""Seconds that a test may take at least."""
PATIENCE = 240
"""Seconds for constants `TIMEOUT` of modules, for which tests wait for one result."""
REPORT = Path(os.environ["CONFORMANCE_REPORT"])


def pytest_configure(config: pytest.Config) -> None:
    # Celery's tests of Django name other settings; those that are loaded stay.
    django.setup()
    # The suites mark tests that fail now and then, for a plugin that repeats them.
    config.addinivalue_line("markers", "flaky: may be repeated")
    config.addinivalue_line("markers", "env: the broker that a test needs")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        limits = [
            mark.args[0] if mark.args else mark.kwargs["timeout"] for mark in item.iter_markers("timeout")
        ]
        item.add_marker(pytest.mark.timeout(max(SHORTEST_LIMIT, *limits, 0)), append=False)
        module = getattr(item, "module", None)
        if isinstance(getattr(module, "TIMEOUT", None), int):
            module.TIMEOUT = max(module.TIMEOUT, PATIENCE)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line for each phase of a test, and for each of its subtests."""
    if report.skipped:
        is_expected = hasattr(report, "wasxfail")
        reason = report.wasxfail if is_expected else _reason(report)
        outcome = "xfailed" if is_expected else "skipped"
    else:
        outcome, reason = report.outcome, str(report.longrepr or "")
    with REPORT.open("a") as file:
        print(json.dumps({"test": report.nodeid, "outcome": outcome, "reason": reason}), file=file)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Add a line for a module that cannot be imported, or that is skipped as a whole."""
    if report.outcome != "passed":
        reason = _reason(report) if report.skipped else str(report.longrepr)
        with REPORT.open("a") as file:
            print(json.dumps({"test": report.nodeid, "outcome": report.outcome, "reason": reason}), file=file)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    found = report.longrepr
    text = found[2] if isinstance(found, tuple) else str(found)
    return text.removeprefix("Skipped: ")
