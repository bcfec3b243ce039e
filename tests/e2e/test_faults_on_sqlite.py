"""The default storage on SQLite with the real program, and faults of its file."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from .load import Load, sqlite

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_locked_file(tmp_path: Path) -> None:
    with Load(tmp_path, sqlite("jobs.sqlite3")) as load:
        with closing(sqlite3.connect(tmp_path / "jobs.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            load.answers()
            load.outlasts_leases()
            other.execute("ROLLBACK")
        load.ends_well("file locked by another program", time.monotonic())


def test_full_disk(small_disk: Path, tmp_path: Path) -> None:
    with Load(tmp_path, sqlite(str(small_disk / "jobs.sqlite3"))) as load:
        load.outlasts_full_disk(small_disk)
