"""Reading a flow graph: its jobs, their distance, and limits."""

from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.flow import FlowNode, JobLink, explore, walked
from djqueue.core.states import State


def links_of(needs, dependents=None):
    """A storage's links of jobs of one queue, by their ids and what they depend on."""
    after = {}
    for one, wanted in needs.items():
        for other in wanted:
            after.setdefault(other, []).append(one)
    after = after if dependents is None else dependents
    return {
        ("q", one): JobLink(
            FlowNode("q", one, "job", State.WAITING),
            tuple(("q", other) for other in wanted),
            tuple(("q", other) for other in after.get(one, ())),
        )
        for one, wanted in needs.items()
    }


def walk(links, root, limit=1_000):
    steps = []

    def look(keys):
        steps.append([key[1] for key in keys])
        return {key: links[key] for key in keys if key in links}

    return walked(explore(("q", root), limit), look), steps


def ids(graph):
    return {node.id for node in graph.nodes}


def test_each_step_reads_the_next_neighbors_once():
    found, steps = walk(links_of({"a": "", "b": "a", "c": "a", "d": "bc", "e": "d"}), "a")

    assert steps == [["a"], ["b", "c"], ["d"], ["e"]]
    assert ids(found) == set("abcde")
    assert found.nodes[found.root].id == "a"


def test_unrelated_named_job_is_left_out_of_the_graph():
    found, _ = walk(links_of({"a": "", "b": "", "c": "b"}, {"a": "b"}), "a")

    assert ids(found) == {"a"}
    assert found.edges == []


def test_removed_dependency_is_shown_for_its_dependents():
    found, _ = walk(links_of({"b": "a"}), "b")

    assert [(node.id, node.state) for node in found.nodes] == [("a", None), ("b", State.WAITING)]


def test_an_unknown_job_has_no_graph():
    assert walk({}, "a") == (None, [["a"]])


def test_large_graph_shows_the_nearest_jobs_and_reports_more():
    found, _ = walk(links_of({str(number): "" for number in range(9)} | {"z": "012345678"}), "z", limit=4)

    assert ids(found) == {"z", "0", "1", "2"}
    assert found.cut
    assert not walk(links_of({"a": "", "b": "a"}), "a", limit=2)[0].cut


@st.composite
def graphs(draw):
    """What each of some jobs depends on: of those before it."""
    count = draw(st.integers(1, 12))
    return {
        str(number): [str(other) for other in draw(st.sets(st.integers(0, number - 1), max_size=3))]
        if number
        else []
        for number in range(count)
    }


@given(graphs(), st.data())
def test_graph_is_the_same_from_each_of_its_jobs(needs, data):
    links = links_of(needs)
    root = data.draw(st.sampled_from(sorted(needs)))
    found, _ = walk(links, root)

    for other in ids(found):
        same, _ = walk(links, other)
        assert (same.nodes, same.edges) == (found.nodes, found.edges)
    inside = ids(found)
    said = {(before, after) for after, wanted in needs.items() for before in wanted if after in inside}
    assert {(found.nodes[one.before].id, found.nodes[one.after].id) for one in found.edges} == said
    assert all(before in inside for before, _ in said)
