"""The lanes of the tests: which of them a change needs, and what is said of the others."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import lanes


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit that has all paths of the table, in place of this one."""
    for path in {path for paths in lanes.CHANGES.values() for path in paths}:
        file = tmp_path / path / "a.py" if path.endswith("/") else tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A change")


def lanes_that_run(output: str) -> list[str]:
    return [line.split(":")[0].removeprefix("=== lane ") for line in output.splitlines() if ": runs" in line]


def test_every_path_of_the_table_exists() -> None:
    paths = [path for paths in lanes.CHANGES.values() for path in paths]

    assert [path for path in paths if not (lanes.ROOT / path).exists()] == []


def test_lane_runs_if_its_code_changed_and_the_others_are_skipped_with_a_reason(checkout, capsys) -> None:
    base = git(checkout, "rev-parse", "HEAD")
    (checkout / "djqueue/runtime/executors/a.py").write_text("changed = True\n")
    commit(checkout)

    assert lanes.changed(base, dry_run=True) == 0

    output = capsys.readouterr().out
    assert lanes_that_run(output) == ["sandbox"]
    assert "because of djqueue/runtime/executors/a.py since" in output
    assert "lane spark: skipped, because nothing below pyproject.toml" in output


def test_every_lane_runs_if_no_earlier_landing_is_known(checkout, capsys) -> None:
    lanes.changed(None, dry_run=True)

    assert lanes_that_run(capsys.readouterr().out) == list(lanes.CHANGES)


def test_path_of_the_table_that_no_longer_exists_is_an_error(checkout) -> None:
    (checkout / "djqueue/fields.py").unlink()

    with pytest.raises(SystemExit, match=r"djqueue/fields\.py"):
        lanes.changed(None, dry_run=True)


def test_report_lists_the_slowest_tests_and_the_time_of_each_lane(capsys) -> None:
    items = [(float(seconds), f"tests.test_a::test_{seconds}") for seconds in range(30)]

    lanes._report([lanes.Result("sqlite", 90, 0, items), lanes.Result("postgresql", 30, 1, [])])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in lines if "tests.test_a" in line] == [
        f"tests.test_a::test_{seconds}" for seconds in range(29, 9, -1)
    ]
    assert "    29.0 ! tests.test_a::test_29 (sqlite)" in lines
    assert "     1.5 min      30 tests  sqlite: passed" in lines
    assert "     0.5 min       0 tests  postgresql: exit status 1" in lines


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["-n", "4"], lanes.NO_TESTS), (["-k", "renewal"], 0), (["tests/core"], 0), (["-m", "slow"], 0)],
)
def test_lane_without_tests_fails_unless_tests_were_selected(monkeypatch, arguments, status) -> None:
    done = subprocess.CompletedProcess([], lanes.NO_TESTS)
    monkeypatch.setattr(lanes, "_call", lambda command: done)

    assert lanes.run(["sqlite"], arguments) == status


STUB = """#!/bin/sh
echo "$0 $*" >>calls
case "$0 $*" in *mypy*|*lanes*|*test-lane*) exit 1 ;; esac
"""


@pytest.mark.slow
def test_all_lanes_run_although_each_of_them_fails(tmp_path: Path) -> None:
    """`make test-all` of a project whose commands record their arguments."""
    for name in ("Makefile", "scripts/test-compat.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(lanes.ROOT / name, tmp_path / name)
    stubs = [f"scripts/{name}.sh" for name in ("find-java", "find-python", "system-packages", "test-lane")]
    stubs += [f".venv/bin/{name}" for name in ("lint-imports", "mypy", "python", "ruff")]
    stubs += [".venv-django6/bin/python", "scripts/make-venv.sh"]
    made = ["pyproject.toml", "hatch_build.py", "demo_project/requirements.txt"]
    made += [".venv/.installed", ".venv/.spark-installed", ".venv-django6/.installed"]
    for name in (*made, *stubs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    done = subprocess.run(["make", "test-all"], cwd=tmp_path, env=environment, check=False)

    assert done.returncode != 0
    calls = (tmp_path / "calls").read_text()
    lanes_of = ("run sqlite-all postgresql-all --", "run spark --", "run spark-cluster --", "run versions --")
    for call in ("mypy", *lanes_of, "test-lane.sh .venv-oldest", "test-lane.sh .venv-django60"):
        assert call in calls
