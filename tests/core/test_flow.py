"""Flow graphs: order, cycles, and dependencies that must exist."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.errors import OptionError
from djqueue.core.flow import Substitutes, levels, outside, waves
from djqueue.core.job import EnqueueResult
from djqueue.testing.factories import batch

A, B, C, D = (("q", letter) for letter in "abcd")


def ordered(**needs):
    return levels(needs, lambda node: needs[node], str)


def test_nodes_come_after_their_dependencies():
    assert ordered(d="bc", c="a", b="a", a="") == [["a"], ["c", "b"], ["d"]]


def test_nodes_of_one_level_keep_order():
    assert ordered(c="", a="", b="") == [["c", "a", "b"]]
    assert ordered() == []


@pytest.mark.parametrize(
    ("needs", "circle"),
    [
        ({"a": "a"}, "a -> a"),
        ({"a": "b", "b": "a"}, "a -> b -> a"),
        ({"x": "", "a": "x", "b": "ad", "c": "b", "d": "c"}, "b -> d -> c -> b"),
        ({"z": "a", "a": "b", "b": "a"}, "a -> b -> a"),
    ],
)
def test_cycle_is_named(needs, circle):
    with pytest.raises(OptionError, match=f"depend on each other in a cycle: {circle}$"):
        ordered(**needs)


@given(st.lists(st.sets(st.integers(0, 20)), max_size=20))
def test_every_graph_is_ordered_or_has_a_cycle(drawn):
    needs = {node: {other for other in others if other < len(drawn)} for node, others in enumerate(drawn)}
    try:
        found = levels(needs, lambda node: needs[node], str)
    except OptionError as error:
        circle = [int(node) for node in str(error).rpartition(": ")[2].split(" -> ")]
        assert circle[0] == circle[-1]
        assert all(second in needs[first] for first, second in pairwise(circle))
        return
    place = {node: number for number, level in enumerate(found) for node in level}
    assert place.keys() == needs.keys()
    assert all(place[node] == max((place[other] + 1 for other in needs[node]), default=0) for node in needs)


def test_dependency_in_the_same_call_need_not_exist():
    batches = [batch(ids=["a", "b"], queue="q", depends_on=(D,)), batch(queue="q", depends_on=(A, C, D))]

    assert outside(batches) == [D, C]
    assert outside([batch(ids=["a"])]) == []


def test_dependency_that_comes_later_in_the_call_must_exist():
    assert outside([batch(depends_on=(A,)), batch(ids=["a"], queue="q")]) == [A]


def test_a_job_cannot_wait_for_its_own_batch():
    with pytest.raises(OptionError, match="'b' cannot depend on itself"):
        outside([batch(ids=["a", "b"], queue="q", depends_on=(B,))])


def test_batches_are_split_by_dependencies():
    first, second = batch(ids=["a"], queue="q"), batch(ids=["b"], queue="q", depends_on=(A,))
    other, third = batch(queue="q", depends_on=(D,)), batch(queue="q", depends_on=(A, B))

    assert waves([first, second, other, third]) == [[0, 2], [1], [3]]
    assert waves([first, first, first]) == [[0, 1, 2]]


def test_owner_of_a_unique_key_replaces_a_duplicate_dependency():
    substitutes = Substitutes()
    kept = batch(ids=["a", "b"], queue="q", unique_key="k")
    substitutes.note(kept, [EnqueueResult("a", "queued", "q"), EnqueueResult("a", "duplicate", "q")])
    later = batch(queue="q", depends_on=(B, C, A))

    assert substitutes.in_(later).options.depends_on == (A, C)
    assert substitutes.in_(kept) is kept
