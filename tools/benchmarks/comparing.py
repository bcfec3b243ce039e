"""What a comparison with peers looks like: lines, the table of docs/benchmarks.md, and its charts."""

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.servers import MissingProgramError, find_redis, postgres_binaries
from tools.benchmarks.charts import Bar, Panel, chart
from tools.benchmarks.marks import Drain
from tools.benchmarks.peers import SLOTS
from tools.benchmarks.projects import ROOT

DOCS = ROOT / "docs"
OURS = "djqueue"
GOALS = {
    ("BullMQ", "Redis"): {1: 1.0, 10: 2.0, 100: 3.0},
    ("@platformatic/job-queue", "memory"): {1: 0.5, 100: 1.2},
}
"""The least ratio of djqueue to a peer, by the number of jobs that run at once."""
SECTIONS = {"peers-redis": ("Redis",), "peers-others": ("memory", "SQLite", "PostgreSQL")}
"""The storages of each table and its chart in the docs."""
SIZES = {"bulk": "jobs/s", "pickup": "ms", "memory": "MiB"}
"""What is measured beside rates, with its unit: the rate of a producer, the median time from an enqueue to
the handler of an idle worker, and the memory that a worker with ten jobs at once has to itself."""


@dataclass
class System:
    """A job queue on a storage, and what was measured of it."""

    name: str
    storage: str
    versions: str
    worker: str
    """How its worker is started."""
    drains: dict[int, list[Drain]] = field(default_factory=dict)
    """In the order of the runs, by the number of jobs that run at once."""
    sizes: dict[str, list[float]] = field(default_factory=dict)
    """What else was measured, by its name in `SIZES`, in the order of the runs."""

    def note(self, name: str, value: float) -> None:
        """Keep a value of one run."""
        self.sizes.setdefault(name, []).append(value)

    def size(self, name: str) -> float | None:
        """Return the median of a value."""
        return statistics.median(self.sizes[name]) if name in self.sizes else None

    def rate(self, slots: int) -> float | None:
        """Return the median rate."""
        found = self.drains.get(slots)
        return statistics.median(one.rate for one in found) if found else None


def ratio(ours: System, peer: System, slots: int) -> float | None:
    """Return the median of the ratios of djqueue to a peer in the same run."""
    pairs = zip(ours.drains.get(slots, ()), peer.drains.get(slots, ()), strict=False)
    shares = [one.rate / other.rate for one, other in pairs]
    return statistics.median(shares) if shares else None


def ours_among(systems: list[System], storage: str) -> System:
    return next(one for one in systems if one.name == OURS and one.storage == storage)


def rows(system: System, systems: list[System]) -> Iterator[dict[str, Any]]:
    """Yield an object for each rate of a system: its median, and the values of all runs."""
    ours = ours_among(systems, system.storage)
    for slots, drains in sorted(system.drains.items()):
        row: dict[str, Any] = {
            "system": f"{system.name}-{system.storage.lower()}",
            "metric": f"drain_c{slots}",
            "value": system.rate(slots),
            "unit": "jobs/s",
            "runs": [one.rate for one in drains],
            "cpu": {
                name: round(statistics.median(summed(one)[name] for one in drains), 1)
                for name in summed(drains[0])
            },
        }
        if system is not ours:
            row["djqueue"] = ratio(ours, system, slots)
            row["goal"] = GOALS.get((system.name, system.storage), {}).get(slots)
        yield row
    for name, values in system.sizes.items():
        row = {"system": f"{system.name}-{system.storage.lower()}", "metric": name, "unit": SIZES[name]}
        row |= {"value": statistics.median(values), "runs": values, "cpu": {}}
        theirs = zip(ours.sizes.get(name, ()), values, strict=False)
        if system is not ours and (shares := [one / other for one, other in theirs]):
            row["djqueue"] = statistics.median(shares)
        yield row


def summed(drain: Drain) -> dict[str, float]:
    """Return the CPU time per job, with that of all processes of the worker in one."""
    found = {"worker": sum(value for name, value in drain.cpu.items() if name != "redis")}
    return found | ({"redis": drain.cpu["redis"]} if "redis" in drain.cpu else {})


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    cpu = ", ".join(f"{name} {value:,.0f}" for name, value in row["cpu"].items())
    line = f"{row['system']:36} {row['metric']:11} {figure(row['value']):>10} {row['unit']:6}"
    line += f"  {cpu} µs/job" if cpu else ""
    if share := row.get("djqueue"):
        line += f"  djqueue {share:.2f}×"
    return line + (f" (goal {row['goal']}×)" if row.get("goal") else "")


def write_docs(
    systems: list[System],
    missing: dict[str, str],
    runs: int,
    load: list[float],
    sections: Iterable[str],
    docs: Path = DOCS,
) -> list[Path]:
    """Write tables and charts of the docs, and return their paths."""
    page = docs / "benchmarks.md"
    folder = docs / "_static" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    written = [page]
    for name in sections:
        some = [one for one in systems if one.storage in SECTIONS[name]]
        text = table(some) + "\n" + circumstances(missing, runs, load)
        page.write_text(section(page.read_text(), name, text))
        title = f"Jobs per second on {' and '.join(SECTIONS[name])}"
        written.append(folder / f"{name}.svg")
        written[-1].write_text(chart(title, list(panels_of(some))))
    return written


def section(page: str, label: str, text: str) -> str:
    """Return a page whose part between the marks of a label is replaced."""
    start, end = f"<!-- table: {label} -->\n", f"<!-- end of table: {label} -->\n"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no part between {start.strip()} and {end.strip()}")
    return f"{before}{start}{text}\n{end}{after}"


def table(systems: list[System]) -> str:
    """Return the table of all systems, the fastest of each storage first."""
    slots = [f"c{number}" for number in SLOTS]
    more = [f"{name}, {unit}" for name, unit in SIZES.items()]
    heads = [f"djqueue ÷ peer ({', '.join(slots)})", *slots, *more, "worker"]
    lines = [f"| storage | system | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for storage in dict.fromkeys(one.storage for one in systems):
        ours = ours_among(systems, storage)
        peers = [one for one in systems if one.storage == storage and one is not ours]
        for one in (ours, *sorted(peers, key=fastest, reverse=True)):
            shares = ", ".join(share(ratio(ours, one, number)) for number in SLOTS) if one is not ours else ""
            rates = [figure(one.rate(number)) for number in SLOTS]
            sizes = [figure(one.size(name)) for name in SIZES]
            cells = [storage, one.versions, shares, *rates, *sizes, one.worker]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fastest(system: System) -> float:
    return max(system.rate(slots) or 0.0 for slots in SLOTS)


def figure(value: float | None) -> str:
    """Return a number with three digits that count."""
    if value is None:
        return "–"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def share(value: float | None) -> str:
    """Return a ratio with two digits that count."""
    return "–" if value is None else f"{float(f'{value:.2g}'):g}×"


def circumstances(missing: dict[str, str], runs: int, load: list[float]) -> str:
    """Return the sentences about the machine, and about peers that could not be measured."""
    text = f"Values are {conditions(runs, load)}"
    for name, reason in missing.items():
        text += f" {name} {reason.rstrip('.')}."
    return text


def conditions(runs: int, load: list[float]) -> str:
    """Return on what the figures were measured."""
    medians = "one run" if runs == 1 else f"medians of {runs} runs"
    software = ", ".join([f"CPython {platform.python_version()}", f"Django {version('Django')}", *servers()])
    return (
        f"{medians} on {os.cpu_count()} cores, with {system_name()}, {software}. The load average was "
        f"{load[0]:.1f} before the first measurement, where 0 is an otherwise idle machine, and "
        f"{load[-1]:.1f} after the last."
    )


def servers() -> Iterator[str]:
    """Yield the servers that are installed, and their versions."""
    for name, find in (("Redis", find_redis), ("PostgreSQL", lambda: str(postgres_binaries() / "postgres"))):
        try:
            program = find()
        except MissingProgramError:
            continue
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        if found := re.search(r"\d+\.\d+(\.\d+)?", done.stdout):
            yield f"{name} {found[0]}"


def system_name() -> str:
    """Return the name of the system, and the first numbers of its version."""
    return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def panels_of(systems: list[System]) -> Iterator[Panel]:
    """Yield a panel for each storage and number of jobs at once."""
    for storage in dict.fromkeys(one.storage for one in systems):
        for slots in SLOTS:
            bars = [
                Bar(one.name, rate, one.name == OURS)
                for one in systems
                if one.storage == storage and (rate := one.rate(slots)) is not None
            ]
            at_once = "one job at a time" if slots == 1 else f"{slots} jobs at once"
            bars.sort(key=lambda bar: bar.value, reverse=True)
            yield Panel(f"{storage}, {at_once}", tuple(bars))
