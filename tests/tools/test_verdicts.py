from pathlib import Path
from typing import Any

from tools.chaos.verdicts import check_leftovers, check_logs, wrong_counts, wrong_records

LINES = [["shop.jobs.inline_note", "a", "1"], ["shop.jobs.inline_refuse", "b", "2"]]


def report(**jobs: list[Any] | None) -> dict[str, Any]:
    found: dict[str, list[Any] | None] = {"a": ["completed", 1, 0, 0], "b": ["failed", 1, 1, 0], **jobs}
    return {"jobs": found, "every": ["a", "b"], "dead": ["b"], "counts": {"failed": 1}}


def test_jobs_that_ended_as_expected_are_right() -> None:
    assert wrong_records(LINES, report()) == []
    assert wrong_counts(LINES, report()) == []


def test_lost_and_unfinished_jobs_are_reported() -> None:
    assert wrong_records(LINES, report(a=None)) == ["a is lost"]
    assert wrong_records(LINES, report(a=["active", 1, 0, 0])) == ["a (shop.jobs.inline_note) is active"]
    assert wrong_records(LINES, report(b=["completed", 1, 0, 0])) == [
        "b (shop.jobs.inline_refuse) is completed"
    ]


def test_duplicates_are_reported() -> None:
    assert wrong_records(LINES, {**report(), "every": ["a", "b", "a"]}) == ["a is there twice (every)"]
    assert wrong_records(LINES, {**report(), "dead": ["b", "b"]}) == [
        "b is there twice (dead)",
        "2 dead letters, and 1 failed jobs",
    ]


def test_interrupted_job_must_not_have_used_attempt_or_stalled() -> None:
    assert len(wrong_counts(LINES, report(a=["completed", 2, 0, 0]))) == 1
    assert len(wrong_counts(LINES, report(a=["completed", 1, 0, 1]))) == 1
    assert len(wrong_counts(LINES, report(b=["failed", 2, 2, 0]))) == 1
    assert wrong_counts(LINES, report(a=None)) == []


def test_errors_in_logs_are_reported(tmp_path: Path) -> None:
    (tmp_path / "first.log").write_text(
        "12:00 INFO djqueue.worker: stopped\n"
        "12:00 ERROR djqueue.worker: a [b] failed permanently (explicit_fail): UnrecoverableError: 1\n"
        "12:01 ERROR djqueue.supervisor: Process 7 (worker 1) did not stop in time and is killed.\n"
    )
    (found,) = check_logs(tmp_path, ["first"])
    assert "did not stop in time" in found


def test_leftover_files_and_temporary_directories_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "djqueue-0").mkdir(parents=True)
    assert check_leftovers(tmp_path) == []
    (tmp_path / "tmp" / "djqueue-0" / "a.sock").touch()
    (tmp_path / "tmp" / "djqueue-jobs-7-abc").mkdir()
    assert check_leftovers(tmp_path) == [
        "tmp/djqueue-0/a.sock is left behind",
        "tmp/djqueue-jobs-7-abc is left behind",
    ]
