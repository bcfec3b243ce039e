import os
import subprocess
import sys

import pytest

from tests.support import eventually
from tools.chaos import tree
from tools.chaos.tree import Member, by_role, lineage, lives, members, parse_status, role_of

STATUS = "42 (dq:a (b) c) S 7 42 42 0 -1 4194560 1 0 0 0 3 4 0 0 20 0 1 0 9876 1 1\n"

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_process_status_is_parsed_for_any_process_name() -> None:
    found = parse_status(STATUS)
    assert found == tree.Status("dq:a (b) c", "S", 7, 9876)
    assert not found.has_ended
    assert found._replace(state="Z").has_ended


@pytest.mark.parametrize(
    ("name", "above", "expected"),
    [
        ("python", (None, ""), tree.SUPERVISOR),
        ("dq:mirror", (tree.SUPERVISOR, "python"), tree.MIRROR),
        ("dq:backup", (tree.SUPERVISOR, "python"), tree.BACKUP),
        ("dq:worker-2", (tree.SUPERVISOR, "python"), tree.WORKER),
        ("dq:worker-2", (tree.WORKER, "dq:worker-2"), tree.KEEPER),
        ("dq:template", (tree.WORKER, "dq:worker-2"), tree.TEMPLATE),
        ("python", (tree.WORKER, "dq:worker-2"), tree.TEMPLATE),
        ("python", (tree.SINGLE, "python"), tree.KEEPER),
        ("dq:shop.jobs.no", (tree.TEMPLATE, "dq:template"), tree.JOB),
        ("sleep", (tree.JOB, "dq:shop.jobs.no"), tree.PROGRAM),
    ],
)
def test_roles_follow_from_names_and_parents(name: str, above: tuple[str | None, str], expected: str) -> None:
    assert role_of(name, *above) == expected


def test_programs_of_jobs_are_not_killed() -> None:
    job, program = Member(2, 1, tree.JOB, "a"), Member(3, 1, tree.PROGRAM, "b")
    assert by_role([job, program]) == {tree.JOB: [job]}


@linux
def test_members_are_process_and_its_descendants() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as process:
        try:
            shell, sleep = eventually(lambda: len(found := members(process.pid)) == 2 and found)
            assert [shell.pid, shell.role] == [process.pid, tree.SUPERVISOR]
            assert lineage(sleep.pid, os.getpid()) == [sleep.pid, process.pid, os.getpid()]
            assert lives(sleep)
            assert not lives(sleep._replace(started=sleep.started - 1))  # Another process with its id.
        finally:
            os.killpg(process.pid, 9)
    assert members(process.pid) == []
    assert not lives(shell)
