"""`python -m tools.benchmarks`: how fast the queue is on this machine, measured as a user would use it.

Each run of each measure is a process of its own; the table shows medians.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version

from tools.benchmarks import as_user, peer_runs
from tools.benchmarks.measures import MEASURES, STORAGES
from tools.benchmarks.peers import PEERS
from tools.benchmarks.projects import STORAGES as PROJECTS

TARGETS = {
    ("memory", "enqueue_bulk"): (">=", 230_000),
    ("memory", "drain_c100"): (">=", 50_000),
    ("memory", "bytes_per_waiting_job"): ("<=", 1_200),
    ("memory", "drain_ratio_1m"): (">=", 0.9),
    ("memory", "drain_limited"): (">=", 0.9),
    ("memory", "drain_shared_limiter"): (">=", 0.9),
    ("memory", "claim_beside_blocked"): ("<=", 2.0),
    ("redis", "drain_limited"): (">=", 0.9),
    ("redis", "claim_beside_blocked"): ("<=", 2.0),
    ("memory", "pickup_p50"): ("<=", 1.0),
    ("redis", "enqueue_bulk"): (">=", 200_000),
    ("redis", "enqueue_awaited"): (">=", 8_000),
    ("redis", "drain_c100"): (">=", 55_000),
    ("redis", "drain_c10"): (">=", 28_000),
    ("redis", "drain_c1"): (">=", 5_000),
    ("redis", "drain_threads_c100"): (">=", 35_000),
    ("redis", "drain_two_processes"): (">=", 1.6),
    ("redis", "bytes_per_waiting_job"): ("<=", 400),
    ("redis", "pickup_p50"): ("<=", 0.8),
    ("redis", "pickup_p99"): ("<=", 2.0),
    ("redis", "roundtrip_p50"): ("<=", 2.0),
    ("redis", "claim_ratio_1m"): ("<=", 1.2),
    ("redis", "overview_100"): ("<=", 4.0),
    ("redis", "overview_growth"): ("<=", 3.0),
    ("memory", "overview_growth"): ("<=", 3.0),
    ("redis", "drain_with_mirror"): (">=", 0.7),
    ("redis", "drain_with_events"): (">=", 0.9),
}


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("--storage", choices=PROJECTS, action="append", help="default: all")
    parser.add_argument("--metric", action="append", help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs: to see that it works")
    parser.add_argument("--as-user", action="store_true", help="`runworkers` as users start it")
    parser.add_argument("--write-docs", action="store_true", help="--as-user: write its tables into the docs")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="other job queues and djqueue; writes the docs",
    )
    names = sorted(peer.key for peer in PEERS)
    parser.add_argument("--peer", action="append", choices=names, help="--peers: default: all")
    options = parser.parse_args()
    if options.peers:
        return peer_runs.main(options)
    known = as_user.MEASURES if options.as_user else MEASURES
    if unknown := set(options.metric or ()) - known.keys():
        parser.error(f"unknown metric: {', '.join(sorted(unknown))}. Choose from {', '.join(known)}.")
    if not options.json:
        print(f"{platform.platform()}, {os.cpu_count()} cores, CPython {platform.python_version()}, ", end="")
        print(", ".join(f"{name} {version(name)}" for name in ("Django", "msgpack")))
    if options.as_user:
        return as_user.main(options)
    for storage in options.storage or sorted(STORAGES, reverse=True):
        if storage not in STORAGES:
            parser.error(f"{storage} is only measured with --as-user")
        for metric, measure in MEASURES.items():
            if options.metric and metric not in options.metric:
                continue
            if storage in measure.storages:
                values = [run(storage, metric, options.quick) for _ in range(options.runs)]
                show(storage, metric, values, as_json=options.json)
    return 0


def run(storage: str, metric: str, quick: bool) -> dict[str, float]:
    """One run, in a process of its own: a value for each name that it measures."""
    command = [sys.executable, "-m", "tools.benchmarks.one", storage, metric, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"the benchmark {metric} on {storage} failed")
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def show(storage: str, metric: str, runs: list[dict[str, float]], *, as_json: bool) -> None:
    """The medians of some runs."""
    unit = MEASURES[metric].unit
    for name in runs[0]:
        values = [run[name] for run in runs]
        value = statistics.median(values)
        if as_json:
            entry = {"system": f"djqueue-{storage}", "metric": name, "value": value}
            print(json.dumps({**entry, "unit": unit, "runs": values}), flush=True)
            continue
        target = TARGETS.get((storage, name))
        goal = "" if target is None else f"  (goal {target[0]} {target[1]:,})"
        spread = f"{min(values):,.4g} to {max(values):,.4g}"
        print(f"{storage:9} {name:22} {value:>14,.2f} {unit:6} {spread:>28}{goal}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
