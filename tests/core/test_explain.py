"""Explanations of pending jobs: the first true verdict, with its evidence."""

from itertools import combinations
from pathlib import Path

import pytest

from djqueue.core.explain import VERDICTS, BlockingJob, Dependency, Explanation, Facts, decide
from djqueue.core.policies import Hold
from djqueue.core.states import PENDING, State
from djqueue.testing.factories import worker

AT = 1_000_000
HOLDERS = (BlockingJob("a", "w"), BlockingJob("b", "w"))
WAITING = Facts(AT, "q", "id", "handler", State.WAITING, AT, before=3)
IDLE = worker("idle", concurrency=2, active=1)

OBSTACLES = {
    "paused": {"paused": True},
    "key_paused": {"concurrency_key": "g", "key_paused": True},
    "held": {"hold": Hold("handler", AT - 1, AT + 6, "the provider is down")},
    "delayed": {"state": State.DELAYED, "run_at": AT + 5},
    "blocked": {"state": State.BLOCKED, "unmet": (Dependency("q", "x", State.ACTIVE),)},
    "key_rate": {"concurrency_key": "g", "key_next_at": AT + 7},
    "key_busy": {
        "concurrency_key": "g",
        "is_group_waiting": True,
        "key_limit": 2,
        "key_active": 2,
        "key_holders": HOLDERS,
    },
    "behind_rate": {"next_token_at": AT + 9},
    "concurrency_full": {"concurrency": 2, "used": 2, "holders": HOLDERS},
    "too_heavy": {"concurrency": 5, "used": 3, "weight": 3, "holders": HOLDERS},
    "limiter_rate": {"limiter": "l", "limiter_next_at": AT + 11},
    "limiter_full": {"limiter": "l", "limiter_limit": 4, "limiter_used": 4, "limiter_holders": HOLDERS},
}
"""What is true of a job that has a verdict, by itself."""
STAFF = {
    "no_worker": [worker("a", queues=("other",)), worker("b", state="stopping")],
    "no_handler": [worker("a", names=("other",))],
    "workers_busy": [worker("a", concurrency=2, active=2)],
}
EVIDENCE = {
    "delayed": {"until": AT + 5},
    "blocked": {"unmet": (Dependency("q", "x", State.ACTIVE),)},
    "key_paused": {"concurrency_key": "g"},
    "held": {"until": AT + 6, "reason": "the provider is down"},
    "key_rate": {"concurrency_key": "g", "until": AT + 7},
    "key_busy": {"concurrency_key": "g", "limit": 2, "holders": HOLDERS, "before": 3},
    "behind_rate": {"until": AT + 9, "before": 3},
    "concurrency_full": {"limit": 2, "holders": HOLDERS, "before": 3},
    "too_heavy": {"weight": 3, "free": 2, "holders": HOLDERS},
    "limiter_rate": {"limiter": "l", "until": AT + 11, "before": 3},
    "limiter_full": {"limiter": "l", "limit": 4, "weight": 1, "free": 0, "holders": HOLDERS, "before": 3},
    "no_handler": {"workers": ("a",)},
    "workers_busy": {"workers": ("a",), "before": 3},
}
ORDER = [verdict.word for verdict in VERDICTS]


def explanation(facts: Facts, verdict: str, **evidence: object) -> Explanation:
    return Explanation("q", "id", "handler", facts.state, AT, verdict, **evidence)


@pytest.mark.parametrize("word", OBSTACLES)
def test_obstacle_is_explained_with_its_evidence(word: str) -> None:
    facts = WAITING._replace(**OBSTACLES[word])

    assert decide(facts, [IDLE]) == explanation(facts, word, **EVIDENCE.get(word, {}))


@pytest.mark.parametrize("word", STAFF)
def test_lack_of_workers_is_explained_with_its_evidence(word: str) -> None:
    assert decide(WAITING, STAFF[word]) == explanation(WAITING, word, **EVIDENCE.get(word, {}))


def test_job_without_obstacles_waits_for_its_turn() -> None:
    assert decide(WAITING, [IDLE]) == explanation(WAITING, "waiting_turn", before=3)


@pytest.mark.parametrize(("one", "other"), list(combinations(OBSTACLES, 2)))
def test_first_obstacle_in_the_table_is_explained(one: str, other: str) -> None:
    merged = {**OBSTACLES[one], **OBSTACLES[other]}
    if {one, other} == {"delayed", "blocked"} or {one, other} == {"concurrency_full", "too_heavy"}:
        return  # a job has one state, and a queue one number of free slots

    found = decide(WAITING._replace(**merged), [IDLE])

    assert found.verdict == min(one, other, key=ORDER.index)


@pytest.mark.parametrize("staff", STAFF)
@pytest.mark.parametrize("word", OBSTACLES)
def test_a_lack_of_workers_has_its_place_among_the_obstacles(word: str, staff: str) -> None:
    found = decide(WAITING._replace(**OBSTACLES[word]), STAFF[staff])

    assert found.verdict == min(word, staff, key=ORDER.index)


@pytest.mark.parametrize("state", sorted(set(State) - PENDING - {State.ACTIVE}))
def test_ended_job_is_not_pending_despite_obstacles(state: State) -> None:
    facts = WAITING._replace(state=state, paused=True)

    assert decide(facts, []) == explanation(facts, "not_pending")


@pytest.mark.parametrize("state", ["running", "stopping"])
def test_an_active_job_is_not_pending_while_its_worker_lives(state: str) -> None:
    facts = WAITING._replace(state=State.ACTIVE, worker="w", lease_until=AT + 3)

    assert decide(facts, [worker("w", state=state)]).verdict == "not_pending"
    assert decide(facts, [IDLE]) == explanation(facts, "lease_of_dead_worker", worker="w", until=AT + 3)


def test_due_delayed_job_waits_for_its_turn() -> None:
    facts = WAITING._replace(state=State.DELAYED, run_at=AT)

    assert decide(facts, [IDLE]).verdict == "waiting_turn"
    assert decide(facts, []).verdict == "no_worker"


def test_hold_that_ends_before_a_delayed_job_is_due_does_not_keep_it_waiting() -> None:
    delayed = WAITING._replace(state=State.DELAYED, run_at=AT + 5)

    for until, verdict in ((AT + 5, "delayed"), (AT + 6, "held"), (None, "held")):
        assert decide(delayed._replace(hold=Hold("handler", AT, until)), [IDLE]).verdict == verdict
    overdue = delayed._replace(run_at=AT - 5, hold=Hold("handler", AT, AT + 1))
    assert decide(overdue, [IDLE]).verdict == "held"


def test_job_heavier_than_the_limit_runs_alone() -> None:
    facts = WAITING._replace(concurrency=2, weight=7)

    assert decide(facts._replace(used=0), [IDLE]).verdict == "waiting_turn"
    assert decide(facts._replace(used=1), [IDLE]).verdict == "too_heavy"


def test_workers_of_every_queue_and_of_this_one_count() -> None:
    for queues in (None, ("q", "other")):
        assert decide(WAITING, [worker("w", queues=queues)]).verdict == "waiting_turn"


def test_every_verdict_has_an_explanation_with_its_fields() -> None:
    assert len(set(ORDER)) == len(ORDER)
    for verdict in VERDICTS:
        assert set(verdict.evidence) <= set(Explanation._fields), verdict
    assert {*OBSTACLES, *STAFF, "waiting_turn", "not_pending", "lease_of_dead_worker"} == set(ORDER)


def test_documented_table_of_verdicts_matches_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "insight.md").read_text(encoding="utf-8")

    lines = [line for line in page.splitlines() if line.startswith("| `")]
    for verdict in VERDICTS:
        evidence = ", ".join(f"`{field}`" for field in verdict.evidence)
        assert f"| `{verdict.word}` | {verdict.meaning} | {evidence} |" in lines
