"""The outcomes of a suite's tests, compared with the deviations that are expected."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PASSED, FAILED, SKIPPED, XFAILED = "passed", "failed", "skipped", "xfailed"
WORST = (FAILED, XFAILED, SKIPPED, PASSED)
"""Outcomes of phases and subtests: the first of them is that of the test."""


@dataclass(frozen=True)
class Deviation:
    """A test that fails, and why this is right."""

    test: str
    """Id of the test, without parameters if all of its variants fail."""
    reason: str


@dataclass(frozen=True)
class Skip:
    """Tests that a suite skips itself, or expects to fail."""

    message: str
    """Beginning of the message of the suite."""
    reason: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test."""

    test: str
    outcome: str
    reason: str = ""
    """Message of a failure or a skip."""


@dataclass
class Verdict:
    """The outcomes of a suite, sorted by what was expected."""

    passed: list[Outcome] = field(default_factory=list)
    expected: list[tuple[Outcome, Deviation]] = field(default_factory=list)
    skipped: list[tuple[Outcome, Skip]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Unexpected outcomes, one sentence each."""

    @property
    def total(self) -> int:
        """Number of tests that were run, without those that the suite skips."""
        return len(self.passed) + len(self.expected)

    def skips(self) -> "Counter[Skip]":
        """Return the number of skipped tests for each reason."""
        return Counter(skip for _, skip in self.skipped)


def read(lines: Iterable[str]) -> list[Outcome]:
    """Return the outcome of each test from the report of the plugin."""
    worst: dict[str, Outcome] = {}
    for line in lines:
        found = Outcome(**json.loads(line))
        known = worst.get(found.test)
        if known is None or WORST.index(found.outcome) < WORST.index(known.outcome):
            worst[found.test] = found
    return list(worst.values())


def unexpected_failures(outcomes: Sequence[Outcome], deviations: Sequence[Deviation]) -> list[str]:
    """Return the ids of tests that failed and are not in the list."""
    return [one.test for one in outcomes if one.outcome == FAILED and _matching(one, deviations) is None]


def judge(
    outcomes: Sequence[Outcome],
    deviations: Sequence[Deviation],
    skips: Sequence[Skip],
    *,
    is_complete: bool = True,
) -> Verdict:
    """Compare outcomes with what is expected.

    Args:
        is_complete: Whether all tests were run, so that entries of the lists without a test are obsolete.
    """
    verdict = Verdict()
    for one in outcomes:
        deviation = _matching(one, deviations)
        if one.outcome == FAILED and deviation is not None:
            verdict.expected.append((one, deviation))
        elif one.outcome == FAILED:
            verdict.problems.append(f"{one.test} failed, and is not an expected deviation.")
        elif one.outcome == PASSED and deviation is not None:
            verdict.problems.append(f"{one.test} passed: remove it from the expected deviations.")
        elif one.outcome == PASSED:
            verdict.passed.append(one)
        else:
            skip = next((skip for skip in skips if one.reason.startswith(skip.message)), None)
            if skip is None:
                verdict.problems.append(f"{one.test} was skipped for an unknown reason: {one.reason}")
            else:
                verdict.skipped.append((one, skip))
    if is_complete:
        run = {id(entry) for _, entry in (*verdict.expected, *verdict.skipped)}
        passed = {_without_parameters(one.test) for one in outcomes if one.outcome == PASSED}
        verdict.problems += [
            f"No test failed that the expected deviation {entry.test} names: remove it."
            for entry in deviations
            if id(entry) not in run and _without_parameters(entry.test) not in passed
        ]
        verdict.problems += [
            f"No test is skipped with the message {entry.message!r}: remove it from the list."
            for entry in skips
            if id(entry) not in run
        ]
    return verdict


def _matching(outcome: Outcome, deviations: Sequence[Deviation]) -> Deviation | None:
    names = (outcome.test, _without_parameters(outcome.test))
    return next((deviation for deviation in deviations if deviation.test in names), None)


def _without_parameters(test: str) -> str:
    return re.sub(r"\[.*\]$", "", test)
