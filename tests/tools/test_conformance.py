"""The runs of foreign suites: their sources, the outcomes that are expected, and the tables of the docs."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from tools.conformance import page
from tools.conformance.catalog import SUITES
from tools.conformance.outcomes import Deviation, Outcome, Skip, judge, read, unexpected_failures
from tools.conformance.sources import Change, SourcesError, apply, extract

REFUSED = Deviation("test_a.py::test_refused", "djqueue can do this.")
BROKEN = Skip("Broken", "The suite says so.")


def line(test: str, outcome: str, reason: str = "") -> str:
    return json.dumps({"test": test, "outcome": outcome, "reason": reason})


def test_outcome_of_a_test_is_the_worst_of_its_phases_and_subtests() -> None:
    outcomes = read(
        [line("a", "passed"), line("a", "failed", "no"), line("a", "passed"), line("b", "passed")]
    )

    assert outcomes == [Outcome("a", "failed", "no"), Outcome("b", "passed")]


def test_expected_outcomes_are_no_problem() -> None:
    outcomes = [
        Outcome("test_a.py::test_fine", "passed"),
        Outcome("test_a.py::test_refused[1]", "failed", "no"),
        Outcome("test_a.py::test_odd", "skipped", "Broken test"),
    ]

    verdict = judge(outcomes, [REFUSED], [BROKEN])

    assert verdict.problems == []
    assert (verdict.total, len(verdict.passed), verdict.skips()) == (2, 1, {BROKEN: 1})
    assert unexpected_failures(outcomes, [REFUSED]) == []


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome("test_a.py::test_other", "failed"), "is not an expected deviation"),
        (Outcome("test_a.py::test_refused[1]", "passed"), "passed: remove it"),
        (Outcome("test_a.py::test_odd", "skipped", "no server"), "for an unknown reason: no server"),
        (Outcome("test_a.py::test_fine", "passed"), "No test failed that the expected deviation"),
    ],
)
def test_unexpected_outcome_is_a_problem(outcome: Outcome, problem: str) -> None:
    [found] = judge([outcome], [REFUSED], [], is_complete=problem.startswith("No")).problems

    assert problem in found


def test_obsolete_skip_is_a_problem_of_a_complete_run_only() -> None:
    assert len(judge([], [], [BROKEN]).problems) == 1
    assert judge([], [REFUSED], [BROKEN], is_complete=False).problems == []


def test_only_the_tests_are_extracted(tmp_path: Path) -> None:
    archive = tmp_path / "celery-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("celery-1.0/celery/app.py", "celery-1.0/tests/tasks/test_a.py"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"#"))

    extract(archive, "tests/tasks", tmp_path / "out")

    assert [file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.py")] == [
        "tasks/test_a.py"
    ]
    with pytest.raises(SourcesError, match="has no folder t"):
        extract(archive, "t", tmp_path / "out")


def test_change_that_no_longer_applies_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("old, old")

    apply(Change("*.py", "old", "new"), tmp_path)

    assert file.read_text() == "new, new"
    with pytest.raises(SourcesError, match="'old' any more"):
        apply(Change("*.py", "old", "new"), tmp_path)


def test_tables_of_the_page_are_replaced(tmp_path: Path) -> None:
    copy = tmp_path / "conformance.md"
    copy.write_text(page.PAGE.read_text())
    outcomes = [Outcome("test_a.py::test_refused", "failed"), Outcome("b", "skipped", "Broken")]
    verdict = judge(outcomes, [REFUSED], [BROKEN])

    page.write([page.Row("integration tests", "Celery", "5.7", verdict)], copy)
    page.write([page.Row("tests of tasks", "Django", "6.0", verdict)], copy)
    page.write([page.Row("tests of tasks", "Django", "6.1", verdict)], copy)

    text = copy.read_text()
    for lines in (
        ("6.1 | tests of tasks | 1 | 0 | 1 | 1 |", "5.7 | integration tests | 1 | 0 | 1 | 1 |"),
        ("| `test_refused` | djqueue can do this. |",) * 2,
        ("| 1 | The suite says so. |",) * 2,
    ):
        first, second = (f"| {name} {line}\n" for name, line in zip(("Django", "Celery"), lines, strict=True))
        assert text.count(first) == text.count(second) == 1
        assert text.index(first) < text.index(second)
    assert "6.0" not in text


def test_reasons_are_sentences_and_each_deviation_is_listed_once() -> None:
    for suite in SUITES.values():
        entries = [*suite.deviations, *suite.skips]
        assert all(entry.reason.endswith(".") for entry in entries)
        tests = [deviation.test for deviation in suite.deviations]
        assert len(tests) == len(set(tests))
