"""A demo project with a small slice of its data, made once for all test processes."""

import os
from pathlib import Path

import pytest

from tests.sharing import made_once

from .project import ROOT, DemoProject, make_small_dataset


@pytest.fixture(scope="session")
def loaded_project() -> DemoProject:
    """The first 5,000 flights, loaded. Tests only read it."""

    def load(folder: Path) -> None:
        project = DemoProject(folder / "var")
        project.manage("migrate", "--verbosity=0")
        project.manage("load_flights", "--flights=5000")

    return DemoProject(made_once("demo-loaded", load) / "var")


@pytest.fixture
def project(loaded_project: DemoProject, tmp_path: Path) -> DemoProject:
    """A copy of the loaded project that a test may change."""
    return loaded_project.copy(tmp_path / "var")


@pytest.fixture(scope="session")
def checked() -> tuple[DemoProject, str]:
    """A project after `make demo-check` over 300 flights between a few airports, and the output of that."""

    def check(folder: Path) -> None:
        make_small_dataset(folder / "packages")
        packages = os.pathsep.join(map(str, (folder / "packages", ROOT)))
        run_check(folder, 300, PYTHONPATH=packages)

    return result_of(made_once("demo-checked", check))


@pytest.fixture(scope="session")
def checked_with_all_airports() -> tuple[DemoProject, str]:
    """A project after `make demo-check` over the first 5,000 flights, and the output of that."""
    return result_of(made_once("demo-checked-with-all-airports", lambda folder: run_check(folder, 5_000)))


def run_check(folder: Path, flights: int, **environment: str) -> None:
    arguments = ("-m", "demo_project.demo", "--check", "--flights", str(flights))
    finished = DemoProject(folder / "var").run(*arguments, **environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (folder / "output").write_text(finished.stdout)


def result_of(folder: Path) -> tuple[DemoProject, str]:
    return DemoProject(folder / "var"), (folder / "output").read_text()
