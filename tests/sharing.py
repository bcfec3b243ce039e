"""Things that take long to make, and that all test processes of a run share."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

from tests import settings


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of this run that `make` has filled: the first process to ask does so, others wait."""
    folder = settings.BASE_DIR / name
    with (settings.BASE_DIR / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            lock.write("made")
    return folder
