"""The transition table."""

import pytest

from djqueue.core.states import (
    LIVE,
    PENDING,
    REUSABLE,
    TERMINAL,
    TRANSITIONS,
    State,
    actions,
    allows,
)

LEGAL = {
    State.WAITING: {"waiting", "delayed", "active", "failed", "cancelled"},
    State.DELAYED: {"waiting", "delayed", "failed", "cancelled"},
    State.BLOCKED: {"waiting", "delayed", "failed", "cancelled"},
    State.ACTIVE: {"waiting", "delayed", "completed", "failed", "cancelled"},
    State.COMPLETED: set(),
    State.FAILED: {"waiting", "delayed", "blocked"},
    State.CANCELLED: {"waiting", "delayed", "blocked"},
}


@pytest.mark.parametrize("source", State)
def test_transition_table_matches_the_design(source):
    targets = {target for row in TRANSITIONS if row.source is source for target in row.targets}

    assert targets == LEGAL[source]


def test_every_state_has_one_kind():
    assert PENDING | {State.ACTIVE} == LIVE
    assert not LIVE & TERMINAL
    assert set(State) == LIVE | TERMINAL
    assert TERMINAL > REUSABLE


def test_each_transition_has_one_row():
    changes = [(row.name, row.source, target) for row in TRANSITIONS for target in row.targets]

    assert len(changes) == len(set(changes))


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.name}-{row.source}")
def test_only_transitions_in_the_table_are_allowed(row):
    assert allows(row.name, row.source)
    assert row.name in actions(row.source)
    same = [other for other in TRANSITIONS if other.name == row.name]
    targets = {state for other in same if other.source is row.source for state in other.targets}
    for state in State:
        assert allows(row.name, row.source, state) == (state in targets)
        assert allows(row.name, state) == (state in {other.source for other in same})


def test_completed_jobs_have_no_transitions():
    assert actions(State.COMPLETED) == ()
    assert not allows("retry_dead", State.COMPLETED)
    assert not allows("no such thing", State.ACTIVE)


def test_states_read_as_words():
    assert [str(state) for state in State] == [state.value for state in State]
    assert f"{State.WAITING}" == "waiting"
