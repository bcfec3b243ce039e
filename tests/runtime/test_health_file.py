"""The health file, in a folder that other users may write to."""

import json
import stat
from pathlib import Path

import pytest

from djqueue.runtime.supervisor import notices
from djqueue.runtime.supervisor.notices import HealthFile


def test_health_file_replaces_a_link_of_another_user_and_leaves_its_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "health.json"
    path.symlink_to(target)

    HealthFile(path).write("ok", [], 0, [])

    assert target.read_text() == "precious"
    assert json.loads(path.read_text())["status"] == "ok"
    assert stat.S_ISREG(path.lstat().st_mode)
    assert sorted(tmp_path.iterdir()) == [path, target]


def test_health_file_never_follows_a_link_in_place_of_its_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    monkeypatch.setattr(notices, "token_hex", lambda _: "guessed")
    monkeypatch.setattr(notices.os, "getpid", lambda: 7)
    (tmp_path / "health.json.7-guessed").symlink_to(target)

    with pytest.raises(FileExistsError):
        HealthFile(tmp_path / "health.json").write("ok", [], 0, [])

    assert target.read_text() == "precious"


def test_failed_write_of_the_health_file_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "health.json").mkdir()

    with pytest.raises(OSError):
        HealthFile(tmp_path / "health.json").write("ok", [], 0, [])

    assert [path.name for path in tmp_path.iterdir()] == ["health.json"]
