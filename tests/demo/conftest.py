"""A demo project with a small slice of its data, made once for all test processes."""

from pathlib import Path

import pytest

from tests.sharing import made_once

from .project import DemoProject


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
    """A project after `make demo-check` over the first 5,000 flights, and the output of that."""

    def check(folder: Path) -> None:
        finished = DemoProject(folder / "var").run("-m", "demo_project.demo", "--check", "--flights", "5000")
        assert finished.returncode == 0, finished.stdout + finished.stderr
        (folder / "output").write_text(finished.stdout)

    folder = made_once("demo-checked", check)
    return DemoProject(folder / "var"), (folder / "output").read_text()
