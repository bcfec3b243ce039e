"""Cleaning up after projects with several processes."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.project import close_consoles, count_consoles


@pytest.fixture(autouse=True)
def _consoles_are_closed() -> Iterator[None]:
    """Those that a module's fixture has opened stay."""
    keep = count_consoles()
    yield
    close_consoles(keep)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of few MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("this account may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
