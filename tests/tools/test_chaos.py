"""Whom the chaos runs kill."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from tools.chaos import tree
from tools.chaos.__main__ import _kill_one
from tools.chaos.project import SQLITE, leader, project_on


def test_workers_without_supervisor_are_killed_more_often_than_producer() -> None:
    names = ("first", "second", "third", "fourth")
    running = [SimpleNamespace(name=name, root=tree.SINGLE) for name in names]
    running.append(SimpleNamespace(name="producer", root="producer"))
    killed: list[str] = []
    signals = SimpleNamespace(kill_any=lambda service: killed.append(service.name))

    random = Random(1)
    for _ in range(400):
        _kill_one(signals, running, random)

    assert set(killed) == {*names, "producer"}
    assert killed.count("producer") < min(map(killed.count, names))


@pytest.mark.slow
def test_leader_is_process_whose_lease_is_in_database(tmp_path: Path) -> None:
    with project_on(SQLITE, tmp_path) as project:
        project.migrate()
        assert leader(tmp_path) is None
        maintain = "import os, django; django.setup(); from djqueue.client import get_storage; "
        pid = project.run(f"{maintain}get_storage().maintain(); answer = os.getpid()")
        assert leader(tmp_path) == pid
