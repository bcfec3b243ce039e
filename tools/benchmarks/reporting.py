"""What `--as-user` reports: lines of text, objects, and the tables of docs/benchmarks.md."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.benchmarks.comparing import DOCS, conditions, figure, section


@dataclass(frozen=True)
class Value:
    """One measured value."""

    value: float
    unit: str
    cpu: dict[str, float] = field(default_factory=dict)
    """Microseconds of CPU time per job, by process."""
    cores: dict[str, float] = field(default_factory=dict)
    """Cores that each process kept busy."""


Values = dict[str, Value]


@dataclass(frozen=True)
class Ratio:
    """The ratio of two values of one run, and its goal."""

    storage: str
    name: str
    of: str
    to: str
    goal: str = ""
    """Such as ">= 0.9"."""


Row = dict[str, Any]


def rows(
    runs: Mapping[str, Sequence[Values]], ratios: Sequence[Ratio], goals: Mapping[tuple[str, str], str]
) -> Iterator[Row]:
    """Yield an object for each value and each ratio: its median, and the values of all runs."""
    for storage, found in runs.items():
        for name in found[0] if found else ():
            values = [run[name] for run in found]
            row = row_of(storage, name, [one.value for one in values], values[0].unit)
            row["goal"] = goals.get((storage, name), "")
            for key in ("cpu", "cores"):
                if medians := medians_of([summed(getattr(one, key)) for one in values]):
                    row[key] = medians
            yield row
        for ratio in ratios:
            if ratio.storage == storage and found and {ratio.of, ratio.to} <= found[0].keys():
                shares = [run[ratio.of].value / run[ratio.to].value for run in found]
                yield {**row_of(storage, ratio.name, shares, "ratio"), "goal": ratio.goal}


def row_of(storage: str, name: str, values: list[float], unit: str) -> Row:
    value = statistics.median(values)
    return {"system": f"djqueue-{storage}", "metric": name, "value": value, "unit": unit, "runs": values}


def summed(parts: Mapping[str, float]) -> dict[str, float]:
    """Add up the processes of the workers, and keep the busiest two of them beside the sum."""
    workers = sorted((value for name, value in parts.items() if name.startswith("worker")), reverse=True)
    found = {"workers": sum(workers)} if workers else {}
    if len(workers) > 1:
        found |= {"busiest": workers[0], "second": workers[1]}
    return found | {name: value for name, value in parts.items() if not name.startswith("worker")}


def medians_of(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part."""
    return {
        name: round(statistics.median(one.get(name, 0.0) for one in parts), 2) for name in (parts or [{}])[0]
    }


def shown(row: Row) -> str:
    """Return a row as a line of text."""
    spread = f"{min(row['runs']):,.4g} to {max(row['runs']):,.4g}"
    storage = row["system"].removeprefix("djqueue-")
    line = f"{storage:9} {row['metric']:24} {row['value']:>11,.2f} {row['unit']:6} {spread:>22}"
    for key, unit in (("cpu", "µs/job"), ("cores", "cores")):
        if row.get(key):
            line += "  " + ", ".join(f"{name} {value:.3g}" for name, value in row[key].items()) + f" {unit}"
    return line + (f"  (goal {row['goal']})" if row["goal"] else "")


def write_docs(found: list[Row], runs: int, load: list[float], docs: Path = DOCS) -> Path:
    """Write the tables of each storage into the docs, and return the page."""
    page = docs / "benchmarks.md"
    machine = f"The values are {conditions(runs, load)}"
    for system in dict.fromkeys(row["system"] for row in found):
        some = [row for row in found if row["system"] == system]
        text = "\n".join([ratios_table(some), values_table(some), machine])
        label = system.replace("djqueue", "as-user", 1)
        page.write_text(section(page.read_text(), label, text))
    return page


def values_table(found: list[Row]) -> str:
    """Return the table of what was measured."""
    lines = [
        "| value | median | of all runs | CPU per job: workers, Redis |",
        "|---|---|---|---|",
    ]
    for row in found:
        if row["unit"] != "ratio":
            cpu = row.get("cpu", {})
            used = ", ".join(f"{cpu[name]:,.0f} µs" for name in ("workers", "redis") if name in cpu)
            start = f"| `{row['metric']}` | {figure(row['value'])} {row['unit']}"
            lines.append(f"{start} | {spread(row)} | {used} |")
    return "\n".join(lines) + "\n"


def ratios_table(found: list[Row]) -> str:
    """Return the table of ratios and their goals."""
    lines = ["| ratio | goal | median | of all runs |", "|---|---|---|---|"]
    for row in found:
        if row["unit"] == "ratio" or row["goal"]:
            goal = row["goal"].replace(">=", "≥").replace("<=", "≤") or "–"
            middle = f"{row['metric']} | {goal} | {figure(row['value'])}"
            lines.append(f"| {middle} | {spread(row)} |")
    return "\n".join(lines) + "\n"


def spread(row: Row) -> str:
    return f"{figure(min(row['runs']))} to {figure(max(row['runs']))}"
