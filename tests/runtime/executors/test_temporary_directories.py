"""Temporary directories of jobs are removed, whatever the jobs have left in them."""

import os
from pathlib import Path

import pytest

from djqueue.runtime.executors.processes.sandboxplan import PREFIX, new_parent, remove_tree
from tests.runtime.executors.sandbox.attempts import USER
from tests.runtime.executors.sandbox.harness import run, shared_directory


@USER
def test_tree_without_permissions_is_removed_and_targets_of_its_links_stay(user: str) -> None:
    with shared_directory() as place:
        outside = place / "outside"
        outside.mkdir(mode=0o755)
        (outside / "file").touch()

        def remove() -> bool:
            tree = place / "tree"
            (tree / "one" / "two").mkdir(parents=True)
            (tree / "one" / "two" / "file").touch()
            (tree / "one" / "link").symlink_to(outside)
            (tree / "link").symlink_to(outside)
            for path in (tree / "one" / "two" / "file", tree / "one" / "two", tree / "one", tree):
                path.chmod(0)
            remove_tree(str(tree))
            return os.path.lexists(tree)

        assert run(remove, user=user).value is False
        assert outside.stat().st_mode & 0o777 == 0o755
        assert (outside / "file").exists()


def test_tree_that_is_deeper_than_paths_can_be_is_removed(tmp_path: Path) -> None:
    def remove() -> bool:
        os.mkdir(tmp_path / "tree")
        os.chdir(tmp_path / "tree")
        for _ in range(3_000):
            os.mkdir("deep")
            os.chdir("deep")
        os.chdir("/")
        remove_tree(str(tmp_path / "tree"))
        return (tmp_path / "tree").exists()

    assert run(remove).value is False


def test_directory_that_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()

    remove_tree(str(tmp_path / "file"))

    assert "Could not remove the temporary directory" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_directories_of_killed_workers_are_removed_but_not_those_of_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, other = (tmp_path / f"{PREFIX}{2**22 + number}-x" for number in range(2))
    for path in (own, other):
        path.mkdir()
    os.chown(other, 65_534, 65_534)

    new_parent()

    assert (own.exists(), other.exists()) == (False, True)
