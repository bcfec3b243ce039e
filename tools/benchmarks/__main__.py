"""`python -m tools.benchmarks`: how fast djqueue is on this machine, also beside others.

Without a flag, both parts are measured. Ratios come first; each value is the median of the runs.
"""

import argparse
import os
import platform
from importlib.metadata import version

from tools.benchmarks import as_user, peer_runs
from tools.benchmarks.peers import PEERS
from tools.benchmarks.projects import STORAGES


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("--as-user", action="store_true", help="only djqueue: `runworkers` as users start it")
    parser.add_argument("--storage", choices=STORAGES, action="append", help="default: all")
    parser.add_argument(
        "--metric",
        choices=as_user.MEASURES,
        action="append",
        metavar="METRIC",
        help="default: all",
    )
    parser.add_argument("--peers", action="store_true", help="only djqueue beside other job queues")
    names = sorted(peer.key for peer in PEERS)
    parser.add_argument("--peer", action="append", choices=names, help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each measurement (default: 3)")
    parser.add_argument("--quick", action="store_true", help="few jobs: to see that it works")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--write-docs", action="store_true", help="write the tables of docs/benchmarks.md")
    options = parser.parse_args()
    if not options.json:
        print(f"{platform.platform()}, {os.cpu_count()} cores, CPython {platform.python_version()}, ", end="")
        print(", ".join(f"{name} {version(name)}" for name in ("Django", "msgpack")))
    parts = [part for part, is_chosen in PARTS.items() if getattr(options, is_chosen)] or list(PARTS)
    return max(part(options) for part in parts)


PARTS = {as_user.main: "as_user", peer_runs.main: "peers"}
"""The parts, with the flag that chooses each."""


if __name__ == "__main__":
    raise SystemExit(main())
