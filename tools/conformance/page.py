"""The tables of docs/conformance.md, which `make conformance` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .catalog import SUITES
from .outcomes import Verdict
from .sources import ROOT

PAGE = ROOT / "docs" / "conformance.md"
BEGIN = "<!-- written by make conformance: {} -->"
HEADS = {
    "results": (
        "| package | suite | tests | passed | expected deviations | skipped by the suite |",
        "|---|---|---|---|---|---|",
    ),
    "deviations": ("| package | tests | reason |", "|---|---|---|"),
    "skips": ("| package | tests | reason |", "|---|---|---|"),
}
PACKAGES = [suite.package for suite in SUITES.values()]
END = "<!-- end of what make conformance writes -->"


@dataclass(frozen=True)
class Row:
    """The result of one suite."""

    title: str
    package: str
    version: str
    verdict: Verdict


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Write the results of suites into the tables of the page, which keep those of other suites."""
    text = page.read_text()
    for label, lines_of in (("results", _results), ("deviations", _deviations), ("skips", _skips)):
        begin = BEGIN.format(label) + "\n"
        before, found, rest = text.partition(begin)
        old, ended, after = rest.partition(END)
        if not found or not ended:
            raise ValueError(f"{page.name} has no place for {label}: {begin.strip()} ... {END}")
        lines = old.splitlines()[2:]
        for row in rows:
            lines = [line for line in lines if not line.startswith(f"| {row.package} ")]
            lines += lines_of(row)
        # Each line begins with its package.
        lines.sort(key=lambda line: PACKAGES.index(line.split()[1]))
        text = before + begin + "\n".join([*HEADS[label], *lines]) + "\n" + END + after
    page.write_text(text)


def _results(row: Row) -> list[str]:
    verdict = row.verdict
    counts = (verdict.total, len(verdict.passed), len(verdict.expected), len(verdict.skipped))
    return [f"| {row.package} {row.version} | {row.title} | {' | '.join(map(str, counts))} |"]


def _deviations(row: Row) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for outcome, deviation in row.verdict.expected:
        by_reason.setdefault(deviation.reason, []).append(f"`{outcome.test.rpartition('::')[2]}`")
    return [
        f"| {row.package} | {', '.join(sorted(tests))} | {reason} |"
        for reason, tests in sorted(by_reason.items())
    ]


def _skips(row: Row) -> list[str]:
    by_reason: dict[str, int] = {}
    for skip, count in row.verdict.skips().items():
        by_reason[skip.reason] = by_reason.get(skip.reason, 0) + count
    return [f"| {row.package} | {count} | {reason} |" for reason, count in sorted(by_reason.items())]
