"""The wheel and the sdist: complete, and installable in a new project."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.sharing import made_once

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("probe.py")
CONTRACT = "djqueue/testing/contract/"
LIMIT = 2_000_000
"""Bytes of a wheel."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel of this checkout, built once for all test processes."""
    (built,) = made_once("wheel", lambda folder: build("wheel", ROOT, folder)).glob("*.whl")
    return built


@pytest.fixture(scope="session")
def unpacked_sdist() -> Path:
    """The unpacked sdist of this checkout, built once for all test processes. Tests only read it."""

    def unpack(folder: Path) -> None:
        with tarfile.open(build("sdist", ROOT, folder)) as archive:
            archive.extractall(folder, filter="data")

    (unpacked,) = (path for path in made_once("sdist", unpack).iterdir() if path.is_dir())
    return unpacked


def test_wheel_contains_every_file_of_the_package_once(wheel):
    contents = names(wheel)
    expected = {"djqueue/py.typed", "djqueue/migrations/0001_initial.py"}
    package = (path for path in ROOT.glob("djqueue/**/*") if path.is_file())
    files = {path for path in package if "__pycache__" not in path.parts}
    expected |= {str(path.relative_to(ROOT)) for path in files if path.suffix != ".po"}
    expected = {name for name in expected if not name.startswith(CONTRACT)}
    for folder in ("templates", "static"):
        shipped = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert shipped, f"{folder}/ is empty"
        expected |= {f"djqueue/{path.relative_to(ROOT)}" for path in shipped}

    assert len(contents) == len(set(contents))
    assert expected <= set(contents)
    assert not [name for name in contents if name.endswith(".po") or name.startswith(CONTRACT)]
    assert wheel.stat().st_size < LIMIT
    tops = {name.split("/")[0].partition("-")[0] for name in contents}
    assert tops == {"djqueue", "pyspark_djqueue"}
    assert [name for name in contents if name.startswith("pyspark_")] == ["pyspark_djqueue/__init__.py"]


def test_builds_from_a_checkout_and_from_an_sdist_are_equal(wheel, unpacked_sdist, tmp_path):
    """Also at another time, from other copies of the files, and in another folder."""
    source = Path(shutil.copytree(unpacked_sdist, tmp_path / "source", copy_function=shutil.copy))
    (sdist,) = unpacked_sdist.parent.glob("*.tar.gz")

    assert build("wheel", source, tmp_path).read_bytes() == wheel.read_bytes()
    assert build("sdist", source, tmp_path).read_bytes() == sdist.read_bytes()


def test_package_index_accepts_the_builds(wheel, unpacked_sdist):
    (sdist,) = unpacked_sdist.parent.glob("*.tar.gz")

    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=ROOT)
    run(Path(sys.executable).with_name("check-wheel-contents"), wheel, cwd=ROOT)


def test_wheel_names_the_addresses_of_the_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()

    for label in ("Documentation", "Source", "Changelog", "Issues"):
        assert f"Project-URL: {label}, https://" in metadata
    assert "Requires-Dist: kombu>=5.5.2; extra == 'kombu'" in metadata


@pytest.mark.thorough  # The tests themselves run in an editable install.
def test_editable_install_finds_templates_and_does_not_change_the_wheel(wheel, unpacked_sdist, tmp_path):
    source = Path(shutil.copytree(unpacked_sdist, tmp_path / "source"))

    run(
        *[sys.executable, "-c", "import hatchling.build as b; b.build_editable('editable')"],
        cwd=source,
    )

    assert (source / "djqueue/templates/djqueue/state_badge.html").is_file()
    assert (source / "djqueue/static/djqueue/djqueue.css").is_file()
    assert names(build("wheel", source, tmp_path)) == names(wheel)


def test_wheel_works_in_a_new_project(wheel, tmp_path):
    python = clean_environment(tmp_path / "env", wheel)
    run(python, "-m", "django", "startproject", "shop", cwd=tmp_path)
    project = tmp_path / "shop"
    settings = project / "shop" / "settings.py"
    text = settings.read_text()
    settings.write_text(text.replace("INSTALLED_APPS = [", 'INSTALLED_APPS = [\n    "djqueue",', 1))

    shutil.copy(PROBE, project)
    answer = run(python, PROBE.name, cwd=project)

    assert "rendered djqueue.Job" in answer


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build with the hatchling of this environment, so that nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}"]
    run(*command, "--outdir", folder, source, cwd=source)
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def clean_environment(folder: Path, wheel: Path) -> Path:
    """Return the Python of a new environment with the wheel and the packages that it requires, and no others.

    The wheel's metadata lists them; they are linked from this environment, and `pip check` verifies them.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (installed,) = Distribution.discover(name="djqueue", path=[str(site_packages)])
    for needed in requirements_of(installed).values():
        link(needed, site_packages)
    run(*pip, "check")
    return python


def requirements_of(root: Distribution) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    todo = [root]
    while todo:
        for line in todo.pop().requires or ():
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                todo.append(found[requirement.name])
    return found


def link(package: Distribution, site_packages: Path) -> None:
    """Link the modules, packages and metadata of an installed package, whose compiled code is used, too."""
    for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        (site_packages / top).symlink_to(package.locate_file(top))


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command without this checkout and the tests' settings in its environment."""
    hidden = ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, f"{command} failed:\n{finished.stdout}"
    return finished.stdout
