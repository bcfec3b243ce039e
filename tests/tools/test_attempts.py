from pathlib import Path

import pytest

from tools.chaos.attempts import Attempt, Death, interrupted_early, overlapping, read, repeated, unexplained

SUPERVISOR, FIRST, SECOND = 1, 11, 22
SECOND_NS = 1_000_000_000


def attempt(pid: int, begun: int, ended: int | None = None, seen: int | None = None) -> Attempt:
    return Attempt("1", (pid, SUPERVISOR), begun, ended or seen or begun, ended)


def test_handler_notes_become_attempts_in_order_of_start(tmp_path: Path) -> None:
    notes = tmp_path / "done.txt"
    notes.write_text(
        "begin 1 11,1 100\nbegin 1 22,1 200\nstep 1 22,1 250\nend 1 22,1 300\n"
        "begin 2 11,1 90\nend 2 11,1 95\nbegin 3 11,5,1 7\nstep 3 11,5,1 8\n"
    )
    assert read(notes) == {
        "1": [Attempt("1", (11, 1), 100, 100), Attempt("1", (22, 1), 200, 300, 300)],
        "2": [Attempt("2", (11, 1), 90, 95, 95)],
        "3": [Attempt("3", (11, 5, 1), 7, 8)],
    }


@pytest.mark.parametrize(
    ("killed_at", "is_wrong"),
    [(150, False), (250, True), (50, True)],
    ids=["in between", "after the second began", "before the first began"],
)
@pytest.mark.parametrize("killed", [FIRST, SUPERVISOR])
def test_concurrent_attempt_requires_death_of_other_process(
    killed: int, killed_at: int, is_wrong: bool
) -> None:
    attempts = [attempt(FIRST, 100), attempt(SECOND, 200, 300)]
    assert bool(overlapping(attempts, [Death(killed, killed_at, killed_at + 1)])) is is_wrong


def test_death_of_another_process_does_not_excuse_two_attempts_at_once() -> None:
    attempts = [attempt(FIRST, 100, 250), attempt(SECOND, 200, 300)]
    assert overlapping(attempts, [Death(SECOND, 150, 151)])


def test_no_death_excuses_attempt_seen_after_next_attempt_started() -> None:
    killed = [Death(FIRST, 150, 250)]
    assert overlapping([attempt(FIRST, 100, seen=199), attempt(SECOND, 200)], killed) == []
    assert overlapping([attempt(FIRST, 100, seen=201), attempt(SECOND, 200)], killed)


def test_consecutive_attempts_do_not_overlap() -> None:
    assert overlapping([attempt(FIRST, 100, 150), attempt(SECOND, 200, 300)], []) == []


def test_death_of_process_that_ran_last_attempt_explains_another_attempt() -> None:
    attempts = [attempt(FIRST, 100, 150), attempt(SECOND, 200, 300)]
    assert unexplained(attempts, [Death(SECOND, 400, 401), Death(FIRST, 160, 161)]) == []
    assert unexplained(attempts, [Death(SUPERVISOR, 160, 161)]) == []
    assert unexplained(attempts, [Death(FIRST, 400, 401), Death(FIRST, 90, 91)])
    assert unexplained(attempts, [Death(SECOND, 160, 161)])


def test_process_may_start_attempt_between_kill_decision_and_death() -> None:
    attempts = [attempt(FIRST, 100), attempt(SECOND, 200, 300)]
    killed = [Death(FIRST, 99, 101)]
    assert overlapping(attempts, killed) == []
    assert unexplained(attempts, killed) == []


def test_stop_does_not_repeat_finished_attempt() -> None:
    assert repeated([attempt(FIRST, 100, 150), attempt(SECOND, 200, 300)])
    assert repeated([attempt(FIRST, 100), attempt(SECOND, 200, 300)]) == []


@pytest.mark.parametrize(
    ("seen", "stop", "is_wrong"),
    [
        (10.0, Death(SUPERVISOR, 8 * SECOND_NS, 12 * SECOND_NS), False),
        (9.0, Death(SUPERVISOR, 8 * SECOND_NS, 12 * SECOND_NS), True),
        (10.0, Death(SECOND, 8 * SECOND_NS, 12 * SECOND_NS), True),
        (20.0, Death(SUPERVISOR, 8 * SECOND_NS, 9 * SECOND_NS), True),
    ],
    ids=["after its time", "too early", "another process was stopped", "the stop was over"],
)
def test_stop_interrupts_attempts_only_after_timeout(seen: float, stop: Death, is_wrong: bool) -> None:
    begun, last = int((seen - 1) * SECOND_NS), int(seen * SECOND_NS)
    interrupted = attempt(FIRST, begun, seen=last)
    assert bool(interrupted_early([interrupted], [stop], timeout=2)) is is_wrong
    assert interrupted_early([attempt(FIRST, begun, last)], [], timeout=2) == []
