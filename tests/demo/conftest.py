"""A demo project with a small slice of its data, made once for the tests of a process."""

import shutil
from pathlib import Path

import pytest

from .project import DemoProject


@pytest.fixture(scope="session")
def loaded_project(tmp_path_factory: pytest.TempPathFactory) -> DemoProject:
    """The first 5,000 flights, loaded; to be read only."""
    project = DemoProject(tmp_path_factory.mktemp("demo"))
    project.manage("migrate", "--verbosity=0")
    project.manage("load_flights", "--flights=5000")
    return project


@pytest.fixture
def project(loaded_project: DemoProject, tmp_path: Path) -> DemoProject:
    """A copy of the loaded project that a test may change."""
    return DemoProject(Path(shutil.copytree(loaded_project.var, tmp_path / "var")))
