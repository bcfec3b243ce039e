"""`python -m tools.benchmarks --as-user`."""

import json
import subprocess
import sys

import pytest

from tests.docs.pages import first_cells
from tools.benchmarks.as_user import MEASURES, RATIOS, chosen
from tools.benchmarks.bare import calls
from tools.benchmarks.projects import ROOT
from tools.benchmarks.reporting import Ratio, Value, rows, shown, write_docs


def test_metrics_table_is_complete():
    assert first_cells("benchmarks.md", "as-user metrics") == list(MEASURES)


def test_metrics_needed_by_ratio_are_measured():
    assert chosen("redis", ["beside"]) == ["yardstick", "drain_c10", "drain_c100", "beside"]
    assert chosen("memory", ["drain_c1"]) == ["drain_c1"]
    assert chosen("redis", None) == list(MEASURES)[:-2]
    assert chosen("sqlite", ["features"]) == ["drain_c10", "features"]


def test_rows_show_medians_and_ratios_of_same_run():
    cpu = {"worker 0.0": 1.0, "worker 0.1": 4.0, "redis": 2.0}
    runs = [{"fast": Value(rate, "jobs/s", cpu), "bare": Value(10, "jobs/s")} for rate in (5.0, 20.0, 10.0)]

    found = list(rows({"redis": runs}, [Ratio("redis", "share", "fast", "bare", ">= 0.7")], {}))

    assert [(row["metric"], row["value"]) for row in found] == [
        ("fast", 10.0),
        ("bare", 10.0),
        ("share", 1.0),
    ]
    assert found[0]["cpu"] == {"workers": 5.0, "busiest": 4.0, "second": 1.0, "redis": 2.0}
    assert shown(found[2]).endswith("(goal >= 0.7)")


def test_benchmark_rewrites_tables_of_docs(tmp_path):
    page = tmp_path / "benchmarks.md"
    labels = ("as-user-redis", "as-user-sqlite")
    parts = [f"<!-- table: {label} -->\nold\n<!-- end of table: {label} -->\n" for label in labels]
    page.write_text("before\n" + "between\n".join(parts) + "after\n")
    runs = [{"fast": Value(1234.5, "jobs/s", {"worker 0.0": 7.0}), "bare": Value(1000.0, "jobs/s")}]
    found = list(rows({"redis": runs}, [Ratio("redis", "share", "fast", "bare", ">= 0.7")], {}))

    write_docs(found, 1, [0.0, 1.5], tmp_path)

    text = page.read_text()
    assert "| `fast` | 1,230 jobs/s | 1,230 to 1,230 | 7 µs |" in text
    assert "| share | ≥ 0.7 | 1.23 | 1.23 to 1.23 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "between" in text
    assert text.count("old") == 1  # SQLite was not measured.


def test_ratio_is_of_values_that_are_measured():
    names = {"enqueue_bulk", "bare_bulk", "pickup_p50", "ping_p50", "enqueue_and_wait_p50"}
    names |= {"memory_of_few", "memory_of_many"}
    for ratio in RATIOS:
        for name in (ratio.of, ratio.to):
            assert name in names or name.startswith(
                ("drain_", "bare_c", "with", "processes_", "two_runworkers", "request_", "computing")
            )


def test_recorded_requests_are_parsed():
    ping = b"*1\r\n$4\r\nPING\r\n"
    script = b"*3\r\n$7\r\nevalsha\r\n$0\r\n\r\n$4\r\na\r\nb\r\n"

    assert list(calls(ping + script)) == [(ping, b"PING"), (script, b"EVALSHA")]


@pytest.mark.slow
def test_benchmark_measures_runworkers_on_redis():
    done = run("--storage", "redis", "--metric", "drain_c10", "--metric", "enqueue")

    found = {row["metric"]: row for row in done}
    assert {"drain_c10", "bare_c10", "c10 / bare loop", "bulk / prepacked calls"} <= found.keys()
    assert all(row["value"] > 0 for row in found.values())
    assert {"workers", "redis"} <= found["drain_c10"]["cpu"].keys()
    assert found["bytes_per_waiting_job"]["value"] < 1_000


@pytest.mark.slow
@pytest.mark.thorough
def test_benchmark_measures_runworkers_on_sqlite():
    done = run("--storage", "sqlite", "--metric", "enqueue", "--metric", "features", "--metric", "latency")

    found = {row["metric"]: row["value"] for row in done}
    assert all(value > 0 for value in found.values())
    assert {"pickup_p95", "enqueue_durable", "unique keys", "groups", "limits never reached"} <= found.keys()
    assert found["bulk / bare executemany"] == found["enqueue_bulk"] / found["bare_bulk"]


@pytest.mark.slow
def test_benchmark_measures_worker_in_process_of_producer():
    [row] = run("--storage", "memory", "--metric", "drain_c100")

    assert row["value"] > 0
    assert row["cpu"]["workers"] > 0


def run(*arguments):
    """Return the objects that the command prints."""
    flags = ["--as-user", "--quick", "--runs", "1", "--json", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "tools.benchmarks", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
