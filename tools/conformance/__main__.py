"""Run the test suites of Django, kombu and Celery with djqueue in the place of their own backends.

    python -m tools.conformance                         all suites
    python -m tools.conformance kombu celery
    python -m tools.conformance celery -- -k chord      some tests; the page is not written

The suites are those of the versions that are installed. Their sources are downloaded once, with pip. They
run in the environment that `make conformance` makes, on a PostgreSQL and a Redis of their own. A test that
fails unexpectedly is run once more, because Celery and kombu mark most of theirs as flaky. The exit code is
1 if a test fails or is skipped that is not listed in `tools/conformance/catalog.py`, or a listed one passes.

The results of a suite that ran as expected are written into the tables of docs/conformance.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.servers import PostgresServer, RedisServer

from . import page
from .catalog import SUITES, Suite
from .outcomes import FAILED, Outcome, Verdict, judge, read, unexpected_failures
from .sources import ROOT, SourcesError, unpack

ENVIRONMENT = Path(f"{sys.prefix}-conformance")
"""The environment that has the suites' requirements."""
FILES = Path(__file__).parent / "suites"
LONGEST = 90 * 60
"""Seconds that one run of pytest may take."""
ENDED = (0, 1)
"""pytest's exit statuses when all tests were run."""
NO_TESTS = 5
"""pytest's exit status if no test was selected."""


class BrokenRunError(Exception):
    """A run of pytest did not come to its end; the message has the end of its output."""


def run_part(suite: Suite, selected: Sequence[str], extra: Sequence[str], source: Path) -> list[Outcome]:
    """Run a part of a suite; return the outcome of each test."""
    module = re.sub(r"\W+", "-", Path(selected[-1]).name)
    name = f"{suite.parts.index(tuple(selected))}-{module}"
    outcomes = _run_pytest(suite, [*selected, *extra], source, name, may_be_empty=bool(extra))
    again = unexpected_failures(outcomes, suite.deviations)
    if again:
        print(f"{suite.name}: running {len(again)} tests again that failed", flush=True)
        second = {one.test: one for one in _run_pytest(suite, again, source, f"{name}-again")}
        for test in again:
            if test in second and second[test].outcome != FAILED:
                print(f"{suite.name}: {test} failed once, and passed alone", flush=True)
        outcomes = [second.get(one.test, one) for one in outcomes]
    return outcomes


def _run_pytest(
    suite: Suite, arguments: Sequence[str], source: Path, name: str, *, may_be_empty: bool = False
) -> list[Outcome]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djqueue-conformance-")))
        postgresql = stack.enter_context(PostgresServer())
        redis = stack.enter_context(RedisServer())
        report = folder / "report"
        report.touch()
        environment = _environment(suite, source, postgresql, redis) | {"CONFORMANCE_REPORT": str(report)}
        python = ENVIRONMENT / "bin" / "python"
        migrate = [python, "-m", "django", "migrate", "--verbosity", "0"]
        subprocess.run(migrate, env=environment, check=True, cwd=folder)
        configuration = folder / "pytest.ini"
        configuration.write_text("[pytest]\n")
        command = [python, "-m", "pytest", "-c", configuration, "--rootdir", source]
        command += [
            "-p",
            "tools.conformance.suites.plugin",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "-ra",
            *suite.options,
        ]
        log = ROOT / ".cache" / "conformance" / f"{suite.name}-{name}.log"
        with log.open("w") as output:
            status = subprocess.run(
                [*command, *(argument.format(suites=FILES) for argument in arguments)],
                cwd=source,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LONGEST,
                check=False,
            ).returncode
        if status not in ENDED and not (status == NO_TESTS and may_be_empty):
            raise BrokenRunError(
                f"pytest ended with status {status}; its output is in {log.relative_to(ROOT)}:\n"
                f"{log.read_text()[-3000:]}"
            )
        return read(report.read_text().splitlines())


def _environment(
    suite: Suite, source: Path, postgresql: PostgresServer, redis: RedisServer
) -> dict[str, str]:
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": postgresql.user,
        "HOST": "127.0.0.1",
        "PORT": postgresql.port,
    }
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DJQUEUE_"))},
        "CONFORMANCE_DATABASE": json.dumps(database),
        "DJANGO_SETTINGS_MODULE": "tools.conformance.suites.settings",
        "PATH": os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]),
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(redis.port),
        **suite.environment,
    }


def verdict_of(suite: Suite, parts: "Sequence[Future[list[Outcome]]]", *, is_complete: bool) -> Verdict:
    """Wait for the parts of a suite, and compare their outcomes with what is expected."""
    outcomes: list[Outcome] = []
    broken: list[str] = []
    for part in parts:
        try:
            outcomes += part.result()
        except (BrokenRunError, subprocess.SubprocessError) as error:
            broken.append(str(error))
    verdict = judge(outcomes, suite.deviations, suite.skips, is_complete=is_complete and not broken)
    verdict.problems += broken
    return verdict


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m tools.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: all)")
    parser.add_argument("--jobs", type=int, default=3, help="runs of pytest at the same time (default: 3)")
    options = parser.parse_args(arguments[:split])
    extra = arguments[split + 1 :]
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"unknown suite {unknown[0]!r}; choose from {', '.join(SUITES)}")

    is_good = True
    suites = [SUITES[name] for name in options.suites or SUITES]
    python = ENVIRONMENT / "bin" / "python"
    try:
        sources = [unpack(python, suite.package.lower(), suite.folder, suite.changes) for suite in suites]
    except SourcesError as error:
        print(error, file=sys.stderr)
        return 1
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            [pool.submit(run_part, suite, part, extra, source) for part in suite.parts]
            for suite, (_, source) in zip(suites, sources, strict=True)
        ]
        for suite, (version, _), parts in zip(suites, sources, runs, strict=True):
            verdict = verdict_of(suite, parts, is_complete=not extra)
            print(
                f"{suite.package} {version}: {len(verdict.passed)} of {verdict.total} passed, "
                f"{len(verdict.expected)} expected deviations, {len(verdict.skipped)} skipped by the suite, "
                f"{len(verdict.problems)} problems, after {(time.monotonic() - began) / 60:.0f} minutes",
                flush=True,
            )
            for problem in verdict.problems:
                print(f"  {problem}", flush=True)
            is_good = is_good and not verdict.problems
            if not verdict.problems and not extra:
                page.write([page.Row(suite.title, suite.package, version, verdict)])
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
