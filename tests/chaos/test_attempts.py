from pathlib import Path

import pytest

from .attempts import Attempt, Death, overlapping, read, unexplained

FIRST, SECOND = 11, 22


def test_the_notes_of_handlers_become_attempts_in_the_order_of_their_begin(tmp_path: Path) -> None:
    notes = tmp_path / "done.txt"
    notes.write_text("begin 1 11 100\nbegin 1 22 200\nend 1 22 300\nbegin 2 11 90\nend 2 11 95\n")
    assert read(notes) == {
        "1": [Attempt("1", FIRST, 100), Attempt("1", SECOND, 200, 300)],
        "2": [Attempt("2", FIRST, 90, 95)],
    }


@pytest.mark.parametrize(
    ("killed_at", "is_wrong"),
    [(150, False), (250, True), (50, True)],
    ids=["in between", "after the second began", "before the first began"],
)
def test_an_attempt_beside_one_that_has_not_ended_needs_the_death_of_its_process(
    killed_at: int, is_wrong: bool
) -> None:
    attempts = [Attempt("1", FIRST, 100), Attempt("1", SECOND, 200, 300)]
    assert bool(overlapping(attempts, [Death(FIRST, killed_at, killed_at + 1)])) is is_wrong


def test_the_death_of_another_process_does_not_excuse_two_attempts_at_once() -> None:
    attempts = [Attempt("1", FIRST, 100, 250), Attempt("1", SECOND, 200, 300)]
    assert overlapping(attempts, [Death(SECOND, 150, 151)])


def test_attempts_one_after_the_other_do_not_overlap() -> None:
    assert overlapping([Attempt("1", FIRST, 100, 150), Attempt("1", SECOND, 200, 300)], []) == []


def test_another_attempt_is_explained_by_the_death_of_the_process_that_ran_the_last_one() -> None:
    attempts = [Attempt("1", FIRST, 100, 150), Attempt("1", SECOND, 200, 300)]
    assert unexplained(attempts, [Death(SECOND, 400, 401), Death(FIRST, 160, 161)], []) == []
    assert unexplained(attempts, [Death(FIRST, 400, 401), Death(FIRST, 90, 91)], [])
    assert unexplained(attempts, [Death(SECOND, 160, 161)], [])


def test_another_attempt_is_explained_by_the_death_of_a_scheduler_since_the_last_one_began() -> None:
    attempts = [Attempt("1", FIRST, 100, 150), Attempt("1", SECOND, 200, 300)]
    assert unexplained(attempts, [], [Death(SECOND, at, at + 1) for at in (400, 160, 90)]) == []
    assert unexplained(attempts, [], [Death(SECOND, at, at + 1) for at in (400, 90)])


def test_a_process_may_begin_an_attempt_between_the_decision_to_kill_it_and_its_end() -> None:
    attempts = [Attempt("1", FIRST, 100), Attempt("1", SECOND, 200, 300)]
    killed = [Death(FIRST, 99, 101)]
    assert overlapping(attempts, killed) == []
    assert unexplained(attempts, killed, []) == []
    assert unexplained(attempts, [], killed) == []
