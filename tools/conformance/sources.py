"""The sources of the suites: sdists of the installed versions, kept in a folder that git ignores."""

import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "conformance"


class SourcesError(Exception):
    """The sources of a suite cannot be had, or are not as expected; the message says what to do."""


@dataclass(frozen=True)
class Change:
    """A replacement in the files of a suite, so that it runs with djqueue."""

    files: str
    """Pattern of the files."""
    old: str
    new: str


def unpack(python: Path, package: str, folder: str, changes: Sequence[Change]) -> tuple[str, Path]:
    """Return the installed version of a package, and a folder with one folder of its sdist.

    The folder is made anew each time, from an archive that is downloaded once for each version.

    Args:
        python: Interpreter of the environment that has the package.
        folder: Path of the folder in the sdist. Nothing else is unpacked, so that what the tests import is
            the installed package.
    """
    version = _installed_version(python, package)
    archive = _download(python, package, version)
    target = CACHE / f"{package}-{version}"
    shutil.rmtree(target, ignore_errors=True)
    extract(archive, folder, target)
    for change in changes:
        apply(change, target)
    return version, target


def extract(archive: Path, folder: str, target: Path) -> None:
    """Extract one folder of an sdist."""
    with tarfile.open(archive) as tar:
        top = tar.getnames()[0].split("/")[0]
        parent = f"{top}/{folder}".rpartition("/")[0]
        members = [member for member in tar if member.name.startswith(f"{top}/{folder}/")]
        if not members:
            raise SourcesError(f"{archive.name} has no folder {folder}, where other versions have the tests.")
        for member in members:
            member.name = member.name.removeprefix(f"{parent}/")
        tar.extractall(target, members=members, filter="data")


def apply(change: Change, folder: Path) -> None:
    """Make a change in all files that its pattern matches.

    Raises:
        SourcesError: No file has the text that it replaces.
    """
    changed = False
    for file in sorted(folder.glob(change.files)):
        text = file.read_text()
        if change.old in text:
            file.write_text(text.replace(change.old, change.new))
            changed = True
    if not changed:
        raise SourcesError(f"No file {change.files} of {folder.name} contains {change.old!r} any more.")


def _installed_version(python: Path, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SourcesError(f"{package} is not installed in {python.parents[1].name}: run `make conformance`.")
    return done.stdout.strip()


def _download(python: Path, package: str, version: str) -> Path:
    pattern = re.compile(rf"{re.escape(package)}-{re.escape(version)}\.tar\.gz", re.IGNORECASE)
    CACHE.mkdir(parents=True, exist_ok=True)
    for file in CACHE.iterdir():
        if pattern.fullmatch(file.name):
            return file
    print(f"Downloading the sdist of {package} {version}", flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
        done = subprocess.run(
            [*command, "--dest", folder, f"{package}=={version}"], capture_output=True, text=True, check=False
        )
        files = [file for file in Path(folder).iterdir() if pattern.fullmatch(file.name)]
        if done.returncode or not files:
            raise SourcesError(
                f"Cannot download the sdist of {package} {version}: {done.stderr.strip()[-500:]}\n"
                f"`make conformance` needs the package index of pip. Without it, put "
                f"{package}-{version}.tar.gz into {CACHE.relative_to(ROOT)}."
            )
        return files[0].rename(CACHE / files[0].name)
