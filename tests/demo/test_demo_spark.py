"""The demo by way of Spark, as `make demo-spark` runs it, on the flights of one month."""

import fcntl
import re
import shutil
import subprocess

import pytest

from .project import DemoProject

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.spark]

DEMO = ("-m", "demo_project.spark", "--month", "1")
TIMEOUT = 900.0
Finished = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def january(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoProject, Finished]:
    """A project after its first run, and what that said."""
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, which is not installed here")
    project = DemoProject(tmp_path_factory.mktemp("spark"))
    return project, project.run(*DEMO, timeout=TIMEOUT)


def counts(finished: Finished) -> dict[str, tuple[int, int]]:
    """What was expected, and what was found."""
    rows = re.findall(r"^ *([a-z].*?\S) {2,}([\d,]+) +([\d,]+)(?: +differs)?$", finished.stdout, re.MULTILINE)
    return {
        what: (int(expected.replace(",", "")), int(found.replace(",", ""))) for what, expected, found in rows
    }


def test_counts_of_a_spark_run_add_up(january: tuple[DemoProject, Finished]) -> None:
    _, finished = january
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert counts(finished) == {
        "flights read": (27_004, 27_004),
        "badly delayed": (212, 212),
        "jobs inserted, or there before": (212, 212),
        "brought by the same write again": (0, 0),
        "jobs completed, or dead": (212, 212),
        "assessed": (193, 193),
        "dead letter: arrival not on record": (3, 3),
        "dead letter: aircraft not on record": (16, 16),
        "dead letter: any other reason": (0, 0),
        "jobs in the archive": (212, 212),
        "jobs completed, in the rollups": (193, 193),
        "jobs dead, in the rollups": (19, 19),
    }


def test_second_run_enqueues_nothing_and_reports_a_deleted_result(
    january: tuple[DemoProject, Finished],
) -> None:
    project, _ = january
    DemoProject(project.var / "2013-01").evaluate(
        """
from demo_project.flights.models import Compensation
answer = Compensation.objects.first().delete()
"""
    )
    finished = project.run(*DEMO, timeout=TIMEOUT)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "336,776 flights are loaded already." in finished.stdout
    assert "212 were published by an earlier run" in finished.stdout
    assert [line for line in finished.stderr.splitlines() if "add up" in line] == [
        "The counts do not add up: assessed: expected 193, found 192"
    ]


def test_second_run_in_the_same_folder_at_the_same_time_is_rejected(
    january: tuple[DemoProject, Finished],
) -> None:
    project, _ = january
    folder = project.var / "2013-01"
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = project.run(*DEMO)
    assert finished.returncode == 1
    assert f"Another demo is running in {folder}" in finished.stderr


def test_error_without_java_names_the_package_to_install(tmp_path_factory: pytest.TempPathFactory) -> None:
    project = DemoProject(tmp_path_factory.mktemp("javaless"))
    finished = project.run(*DEMO, PATH="/nonexistent", JAVA_HOME="")
    assert finished.returncode == 1
    assert finished.stderr == (
        "Spark requires Java 17 or 21, but no java was found on PATH, and JAVA_HOME is not set."
        " Debian: apt install openjdk-17-jre-headless.\n"
    )
