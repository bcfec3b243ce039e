"""The tables of docs/conformance.md, which `make conformance` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .outcomes import Verdict
from .sources import ROOT

PAGE = ROOT / "docs" / "conformance.md"
BEGIN = "<!-- written by make conformance: {} -->"
END = "<!-- end of what make conformance writes -->"


@dataclass(frozen=True)
class Row:
    """The result of one suite."""

    title: str
    package: str
    version: str
    verdict: Verdict


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Replace the tables of the page."""
    text = page.read_text()
    for label, lines in (
        ("results", _results(rows)),
        ("deviations", _deviations(rows)),
        ("skips", _skips(rows)),
    ):
        begin = BEGIN.format(label) + "\n"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(END)
        if not found or not ended:
            raise ValueError(f"{page.name} has no place for {label}: {begin.strip()} ... {END}")
        text = before + begin + "\n".join(lines) + "\n" + END + after
    page.write_text(text)


def _results(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| suite | of | tests | passed | expected deviations | skipped by the suite |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = row.verdict
        counts = (verdict.total, len(verdict.passed), len(verdict.expected), len(verdict.skipped))
        lines.append(f"| {row.title} | {row.package} {row.version} | {' | '.join(map(str, counts))} |")
    return lines


def _deviations(rows: Sequence[Row]) -> list[str]:
    lines = ["| suite | test | reason |", "|---|---|---|"]
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for outcome, deviation in row.verdict.expected:
            by_reason.setdefault(deviation.reason, []).append(f"`{outcome.test.rpartition('::')[2]}`")
        for reason, tests in by_reason.items():
            lines.append(f"| {row.title} | {', '.join(sorted(tests))} | {reason} |")
    return lines


def _skips(rows: Sequence[Row]) -> list[str]:
    lines = ["| suite | skipped | reason |", "|---|---|---|"]
    for row in rows:
        by_reason: dict[str, int] = {}
        for skip, count in row.verdict.skips().items():
            by_reason[skip.reason] = by_reason.get(skip.reason, 0) + count
        lines += [f"| {row.title} | {count} | {reason} |" for reason, count in sorted(by_reason.items())]
    return lines
