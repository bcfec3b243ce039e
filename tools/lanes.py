"""Run the tests in lanes, and report how long each lane took and which tests were slowest.

    python -m tools.lanes run sqlite postgresql [-- PYTEST-ARGUMENT...]
    python -m tools.lanes changed [--since COMMIT] [--dry-run]

`run` runs lanes one after the other, with the interpreter that runs this script, and fails if one of them
fails. `changed` runs `make test-LANE` for each lane whose code was touched since a commit, and says why it
skips the others. With `DJQUEUE_RERUN=N`, up to N tests that failed are run again, alone, and must then pass:
for machines where a failed run costs more than a defect that goes unnoticed for a day.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / ".pytest_cache" / "lanes"
NO_TESTS = 5
"""pytest's exit status if no test was selected."""
SLOWEST = 20
SECONDS_PER_ITEM = 10
"""A longer test belongs to `make test-all`; the report marks it."""

RERUN = int(os.environ.get("DJQUEUE_RERUN", "0"))

NEVER = "not spark and not spark_cluster"
CHOSEN = ("dashboard", "packaging", "redis", "sandbox", "scheduler")
"""Lanes that only a change of their code needs: see CHANGES."""
ON_POSTGRESQL = ("-m", "tests.servers", "postgresql", sys.executable)
OTHER_STORAGES = "not memory and not redis and not OrmAlone"


@dataclass(frozen=True)
class Lane:
    """Tests that run together."""

    markers: str
    keywords: str = ""
    command: tuple[str, ...] = ()
    """What runs pytest, behind the name of the interpreter."""
    paths: tuple[str, ...] = ()


LANES = {
    # What `make test` runs.
    "sqlite": Lane(f"not thorough and {' and '.join(f'not {lane}' for lane in CHOSEN)} and {NEVER}"),
    "postgresql": Lane(
        f"dialect and not thorough and not scheduler and not slow and {NEVER}", OTHER_STORAGES, ON_POSTGRESQL
    ),
    # What the other targets run.
    "sqlite-all": Lane(NEVER),
    "postgresql-all": Lane(f"database and not slow and {NEVER}", OTHER_STORAGES, ON_POSTGRESQL),
    "thorough": Lane(f"thorough and {NEVER}"),
    "scheduler": Lane(f"scheduler and not thorough and {NEVER}"),
    "redis": Lane(f"redis and not thorough and {NEVER}"),
    "sandbox": Lane(f"sandbox and {NEVER}", paths=("tests/runtime",)),
    "dashboard": Lane(f"dashboard and not thorough and {NEVER}", paths=("tests/dashboard", "tests/admin")),
    "packaging": Lane(f"packaging and not thorough and {NEVER}"),
    "postgresql-wide": Lane(
        f"database and (scheduler or not dialect) and not thorough and not slow and {NEVER}",
        OTHER_STORAGES,
        ON_POSTGRESQL,
    ),
    "versions": Lane(f"not slow and not thorough and {NEVER}"),
    "spark": Lane(
        "spark or (thorough and not spark_cluster)",
        paths=("tests/contrib/spark", "tests/demo/test_demo_spark.py"),
    ),
    "spark-versions": Lane("spark or not spark"),
    "spark-cluster": Lane("spark_cluster", paths=("tests/contrib/spark",)),
}

CHANGES = {
    "scheduler": (
        *("djqueue/storage/scheduler/", "djqueue/storage/tables/", "djqueue/storage/wire.py"),
        *("djqueue/storage/enginesnapshots.py", "djqueue/storage/outbox.py", "djqueue/core/engine/"),
        *("djqueue/testing/contract/", "tests/storage/scheduler/"),
    ),
    "redis": (
        "djqueue/storage/redis/",
        "djqueue/storage/outbox.py",
        "tests/storage/redis/",
        "tests/servers.py",
    ),
    "postgresql": (
        *("djqueue/storage/database/", "djqueue/storage/scheduler/", "djqueue/storage/tables/"),
        *("djqueue/models/", "djqueue/migrations/", "djqueue/operations/", "djqueue/backup/"),
        *("djqueue/fields.py", "tests/storage/database/", "tests/storage/scheduler/", "tests/operations/"),
        *("tests/backup/", "tests/settings.py"),
    ),
    "sandbox": ("djqueue/runtime/executors/", "djqueue/core/procfs.py", "tests/runtime/executors/"),
    "dashboard": (
        *("djqueue/dashboard/", "djqueue/admin/", "djqueue/operations/", "djqueue/templatetags/"),
        *("templates/", "static/", "tests/dashboard/", "tests/admin/"),
    ),
    "packaging": (
        *("pyproject.toml", "hatch_build.py", "scripts/", "tools/", "demo_project/", "djqueue/client/"),
        *("djqueue/management/", "djqueue/runtime/supervisor/", "djqueue/conf/", "djqueue/testing/"),
        *("tests/packaging/", "tests/demo/", "tests/tools/", "tests/testing/"),
        *("tests/client/test_typing.py", "tests/client/test_pytest_plugin.py", "tests/test_alone.py"),
    ),
    "compat": (
        *("pyproject.toml", "scripts/oldest.txt", "scripts/test-compat.sh", "scripts/test-lane.sh"),
        *("djqueue/admin/", "djqueue/models/", "djqueue/migrations/", "djqueue/management/", "djqueue/conf/"),
        *("djqueue/dashboard/", "djqueue/codecs/", "djqueue/client/", "djqueue/contrib/celery/"),
        *("djqueue/contrib/tasks/", "djqueue/runtime/loops.py", "templates/"),
    ),
    "spark": (
        *("pyproject.toml", "djqueue/contrib/spark/", "demo_project/spark/", "tests/contrib/spark/"),
        *("djqueue/storage/staging.py", "djqueue/storage/bulkwrites.py", "djqueue/storage/export.py"),
        *("djqueue/storage/database/staging.py", "djqueue/storage/redis/bulkwrites.py"),
        *("djqueue/storage/sparktables.py", "scripts/find-java.sh"),
    ),
}
"""The lanes that run only after a change of their code, `make test-LANE` each, and the paths of that code."""


@dataclass
class Result:
    """The outcome of a lane."""

    lane: str
    seconds: float
    status: int
    items: list[tuple[float, str]]
    """Seconds and name of each test."""


def run(names: list[str], arguments: list[str]) -> int:
    """Run lanes and print the report; return the exit status."""
    results = [_run_lane(name, arguments) for name in names]
    _report(results)
    # A selection of tests may leave a lane without any.
    passed = {0, NO_TESTS} if _names_tests(arguments) or {"-k", "-m"} & {*arguments} else {0}
    failed = [result for result in results if result.status not in passed]
    return failed[0].status if failed else 0


def _run_lane(name: str, arguments: list[str]) -> Result:
    lane = LANES[name]
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    print(f"=== lane {name}: -m {lane.markers!r}", flush=True)
    command = [sys.executable, *lane.command, "-m", "pytest", "-m", lane.markers]
    if lane.keywords:
        command += ["-k", lane.keywords]
    command += ["-o", f"cache_dir={REPORTS / name}", *arguments]
    started = time.monotonic()
    paths = [] if _names_tests(arguments) else lane.paths
    status = _call([*command, f"--junit-xml={report}", *paths]).returncode
    if status == 1 and RERUN:
        status = _run_failed_again([*command, *paths])
    return Result(name, time.monotonic() - started, status, _items(report))


def _names_tests(arguments: list[str]) -> bool:
    return any((ROOT / argument.split("::")[0]).exists() for argument in arguments)


def _call(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command whose processes keep compiled code, because tests start Python hundreds of times."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, text=True, **options)


def _run_failed_again(command: list[str]) -> int:
    """Run the failed tests once more, one after the other, unless there are more than `RERUN`."""
    command = [*command, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    listed = _call([*command, "--collect-only", "-q"], capture_output=True).stdout
    failed = [line for line in listed.splitlines() if "::" in line]
    if not 0 < len(failed) <= RERUN:
        return 1
    status = _call(command).returncode
    if status == 0:
        print(f"=== {len(failed)} tests failed once and passed alone. Each of them is a defect:")
        print(*failed, sep="\n")
    return status


def _items(report: Path) -> list[tuple[float, str]]:
    if not report.exists():
        return []
    cases = ElementTree.parse(report).iter("testcase")
    return [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]


def _report(results: list[Result]) -> None:
    items = sorted((seconds, name, result.lane) for result in results for seconds, name in result.items)
    if not items:
        return
    print(f"\n=== the {SLOWEST} slowest tests, in seconds ('!': longer than {SECONDS_PER_ITEM} s)")
    for seconds, name, lane in reversed(items[-SLOWEST:]):
        print(f"{seconds:8.1f} {'!' if seconds > SECONDS_PER_ITEM else ' '} {name} ({lane})")
    print("=== lanes")
    for result in results:
        outcome = "passed" if result.status == 0 else f"exit status {result.status}"
        print(f"{result.seconds / 60:8.1f} min  {len(result.items):6d} tests  {result.lane}: {outcome}")


def changed(since: str | None, dry_run: bool) -> int:
    """Run the lanes whose code was touched since a commit; return the exit status."""
    missing = [path for paths in CHANGES.values() for path in paths if not (ROOT / path).exists()]
    if missing:
        raise SystemExit(f"tools/lanes.py: CHANGES names what does not exist: {', '.join(missing)}")
    since = since or os.environ.get("DJQUEUE_LANDED") or _last_landing()
    files = _git("diff", "--name-only", f"{since}..HEAD").splitlines() if since else None
    origin = f"since {since[:12]}" if since else "(no earlier landing found)"
    statuses = []
    for lane, paths in CHANGES.items():
        touched = None if files is None else next((file for file in files if file.startswith(paths)), None)
        if files is not None and touched is None:
            print(f"=== lane {lane}: skipped, because nothing below {', '.join(paths)} changed {origin}")
            continue
        print(f"=== lane {lane}: runs, because of {touched or 'an unknown base'} {origin}", flush=True)
        if not dry_run:
            statuses.append(subprocess.run(["make", f"test-{lane}"], cwd=ROOT, check=False).returncode)
    return next((status for status in statuses if status), 0)


def _last_landing() -> str:
    """Return the commit that changes are compared with: where this branch left its upstream, or else the
    newest one that is older than four hours; "" if there is none.
    """
    head = _git("rev-parse", "HEAD")
    upstream = _git("merge-base", "HEAD", "@{upstream}")
    return upstream if upstream not in ("", head) else _git("rev-list", "-1", "--before=4 hours ago", "HEAD")


def _git(*arguments: str) -> str:
    """Return what a git command prints; "" if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run lanes of this environment")
    running.add_argument("lanes", nargs="+", choices=LANES, metavar="LANE", help=", ".join(LANES))
    changes = commands.add_parser("changed", help="run the lanes whose code has changed")
    changes.add_argument("--since", metavar="COMMIT", help="the last commit that needs no test")
    changes.add_argument("--dry-run", action="store_true", help="only say what would run")
    options = parser.parse_args(arguments[:split])
    if options.command == "run":
        return run(options.lanes, arguments[split + 1 :])
    return changed(options.since, options.dry_run)


if __name__ == "__main__":
    sys.exit(main())
